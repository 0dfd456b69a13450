"""Audits: one member's number decides nothing, all members' median does, and honest members lose nothing."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.core import admission as pool
from p2ptrain.core import audits as module
from p2ptrain.core.admission import Requests, check_request
from p2ptrain.core.audits import (
    ACQUITTED_ROUNDS,
    AUDIT_ROUNDS,
    AUDITED_FROM,
    CREDIT,
    FAILED_ROUNDS,
    MUTED_ROUNDS,
    PASSES,
    SUMMONS_MAX,
    SUMMONS_ROUNDS,
    TRIAL_ROUNDS,
    TYPICAL_ROUNDS,
    TYPICAL_STEP,
    Conduct,
    Measured,
    Tier,
    may_report,
)
from p2ptrain.core.context import Context
from p2ptrain.core.manifest import Join, Manifest, Request, contradiction
from p2ptrain.core.messages import AuditReport
from p2ptrain.core.state import Admitted, AgreedState
from p2ptrain.core.view import failed_text
from p2ptrain.errors import RemoteProtocolError
from tests.helpers.core import KEYS, RUN, DigestSigner, announced, run_of, signed
from tests.helpers.manifest import ASKED, admitting, all_hold, decide, names, quorum

LOCAL: dict[str, Any] = {"name": "local", "local_steps": 10, "sequences_per_pass": 8}
AUDITED = run_of(recipe=LOCAL)
SIZE, TYPICAL = 7, 1_500
MEMBERS, VICTIM, NEWCOMER = KEYS[:SIZE], KEYS[3], KEYS[9]
WORK, NOTHING, BLAME = (1_500, 1_000), (0, 1_000), (-2_000, -8_000)


def start(**changes: Any) -> AgreedState:
    return admitting(size=SIZE, **({"typical": TYPICAL} | changes))


def conduct(state: AgreedState, key: bytes) -> Conduct:
    return state.admitted[state.place[key]].conduct


def after(
    state: AgreedState, *measured: Measured, authors: tuple[bytes, ...] = MEMBERS, run: RunConfig = AUDITED
) -> AgreedState:
    """The state after a round that took a contribution of each author, with these audits."""
    return state.after(taking(state, *measured, authors=authors, run=run), run)


def taking(
    state: AgreedState, *measured: Measured, authors: tuple[bytes, ...] = MEMBERS, run: RunConfig = AUDITED
) -> Manifest:
    number = state.round + 1
    offers = tuple(
        announced(key, number, base_round=state.round, which=key[:4], branch=state.branch)
        for key in authors
        if key in state.place
    )
    asked = dict(
        zip(
            (bytes([place]) * 16 for place in range(len(measured))),
            (Request(measured=each) for each in measured),
            strict=True,
        )
    )
    return decide(state, quorum(state, held=names(*offers), requests=tuple(sorted(asked))), offers, asked, run)


def alone(state: AgreedState, author: bytes, key: bytes, found: tuple[int, int]) -> Measured:
    """An audit of the contribution that the last round took."""
    return Measured(author, key, state.round, *found, False)


def all_measure(state: AgreedState, found: tuple[int, int], liars: tuple[bytes, ...] = ()) -> list[Measured]:
    """What members report of every contribution that they are summoned to measure; liars praise or blame."""
    return [
        Measured(author, summons.key, summons.round, *(BLAME if author in liars else found), True)
        for summons in state.summons
        for author in state.members
        if author != summons.key
    ]


def doubted(key: bytes, state: AgreedState | None = None) -> AgreedState:
    """A state in which members are summoned to measure this key's contribution."""
    state = after(state or start())
    others = [each for each in MEMBERS if each != key]
    for author in others[:3]:
        if not state.summons:
            state = after(state, alone(state, author, key, NOTHING))
    assert [summons.key for summons in state.summons] == [key]
    return state


def suspended(key: bytes) -> AgreedState:
    state = doubted(key)
    state = after(state, *all_measure(state, NOTHING))
    assert conduct(state, key).tier is Tier.COUNTED, "it is measured once more"
    return after(state, *all_measure(state, NOTHING))


# ---------------------------------------------------------------------------------------------------
# One number decides nothing


def test_a_single_member_can_only_summon_all() -> None:
    state = after(start())
    for author in (KEYS[0], KEYS[1], KEYS[2]):
        state = after(state, alone(state, author, VICTIM, BLAME))
    assert len(state.summons) == 1
    assert conduct(state, VICTIM).tier is Tier.COUNTED


def test_whoever_accuses_an_honest_member_falsely_may_not_audit_for_a_time_that_doubles() -> None:
    liars, state = MEMBERS[:2], after(start())
    for round_of_lies in range(2):
        while not state.summons:
            state = after(state, *(alone(state, liar, VICTIM, BLAME) for liar in liars))
        by, number = state.summons[0].by, state.round + 1
        state = after(state, *all_measure(state, WORK, liars))
        assert conduct(state, VICTIM) == Conduct(audited=conduct(state, VICTIM).audited)
        assert state.summons == ()
        struck = {liar: conduct(state, liar) for liar in liars}
        assert by in liars
        assert {each.strikes for each in struck.values()} == {round_of_lies + 1}
        doubled = MUTED_ROUNDS << round_of_lies
        assert {liar: each.muted - number for liar, each in struck.items()} == {
            liar: max(doubled, ACQUITTED_ROUNDS) if liar == by else doubled for liar in liars
        }
        assert not may_report(state, alone(state, by, KEYS[5], BLAME))
        state = replace(
            state, admitted=tuple(replace(each, conduct=replace(each.conduct, muted=0)) for each in state.admitted)
        )


def test_whoever_accuses_pauses_though_it_was_not_far_off_and_blame_by_strength_is_struck() -> None:
    for found, is_struck in (((0, 1_000), False), ((1_500, -8_000), True)):
        state = after(start())
        for author in MEMBERS[:3]:
            if not state.summons:
                state = after(state, alone(state, author, VICTIM, found))
        by = state.summons[0].by
        state = after(state, *all_measure(state, WORK))
        assert conduct(state, by).muted > state.round
        assert bool(conduct(state, by).strikes) is is_struck
        assert conduct(state, VICTIM).tier is Tier.COUNTED


def test_whoever_accuses_pauses_where_all_find_neither_work_nor_none() -> None:
    state = doubted(VICTIM)
    by = state.summons[0].by
    state = after(state, *all_measure(state, (500, 1_000)))
    assert (state.summons, conduct(state, by).strikes) == ((), 0)
    assert conduct(state, by).muted == state.round + module.PAUSED_ROUNDS


def test_f_liars_among_those_who_measure_do_not_move_the_medians() -> None:
    liars, state = MEMBERS[:2], doubted(VICTIM)
    state = after(state, *all_measure(state, WORK, liars))
    assert conduct(state, VICTIM).tier is Tier.COUNTED
    assert all(not conduct(state, key).strikes for key in MEMBERS[2:])


def test_more_than_f_have_to_agree_or_the_doubt_stays() -> None:
    """All but one tolerated liar may be silent: who is honest agrees."""
    for count, has_failed in ((2, False), (3, True)):
        state = doubted(VICTIM)
        since = state.summons[0].since
        state = after(state, *all_measure(state, NOTHING)[:count])
        while state.round < since + SUMMONS_ROUNDS:
            assert (len(state.summons), conduct(state, VICTIM).failed) == (1, 0)
            state = after(state)
        assert bool(conduct(state, VICTIM).failed) is has_failed
        assert conduct(state, VICTIM).doubt > 0
        assert conduct(state, VICTIM).tier is Tier.COUNTED


@pytest.mark.parametrize("protocol", [2, 3])
def test_liars_who_repeat_the_z_of_too_few_honest_reports_decide_nothing_by_another_strength(protocol: int) -> None:
    run = AUDITED.model_copy(update={"protocol": protocol})
    state = doubted(VICTIM)
    (summons,) = state.summons
    honest, liars = MEMBERS[4:6], MEMBERS[:2]
    reports = [(key, WORK) for key in honest] + [(key, (WORK[0], -1_000)) for key in liars]
    found = [Measured(key, VICTIM, summons.round, *what, is_summoned=True) for key, what in reports]
    state = after(state, *found, run=run)
    while state.summons:
        state = after(state, run=run)
    assert (conduct(state, VICTIM).failed > 0) == (protocol == 2)
    assert any(conduct(state, key).strikes for key in honest) == (protocol == 2)


def test_who_leaves_while_it_is_measured_is_judged_no_more() -> None:
    """Or every node would end when the summons does."""
    state = doubted(VICTIM)
    state = after(state, *all_measure(state, NOTHING)[:3])
    leave = Request(leave=VICTIM, leave_round=state.round)
    state = state.after(decide(state, quorum(state, requests=ASKED[:1]), (), {ASKED[0]: leave}, AUDITED), AUDITED)
    assert VICTIM not in state.place
    for _ in range(SUMMONS_ROUNDS + 1):
        state = after(state)
    assert state.summons == ()


def test_audits_that_no_honest_quorum_certifies_change_nothing() -> None:
    state = after(start())
    strange = (Measured(NEWCOMER, VICTIM, 1, 0, 0, False), Measured(KEYS[0], NEWCOMER, 1, 0, 0, False))
    odd = replace(taking(state), audits=strange)
    assert state.after(odd, AUDITED).summons == ()


def test_liars_who_agree_among_themselves_are_too_few() -> None:
    state = doubted(VICTIM)
    since = state.summons[0].since
    reports = all_measure(state, WORK, MEMBERS[:2])
    state = after(state, *reports[:4])
    while state.round < since + SUMMONS_ROUNDS:
        state = after(state)
    assert (conduct(state, VICTIM).failed, conduct(state, VICTIM).tier) == (0, Tier.COUNTED)


def test_reports_of_several_rounds_add_up() -> None:
    state = doubted(VICTIM)
    reports = all_measure(state, NOTHING)
    for each in reports[: state.roster.quorum]:
        assert not conduct(state, VICTIM).failed
        state = after(state, each)
    assert conduct(state, VICTIM).failed == state.round


def test_work_while_all_look_forgives_no_failure() -> None:
    """Who works only while it is summoned fails by the next contribution for which nobody had been summoned yet."""
    state = doubted(VICTIM)
    state = after(state, *all_measure(state, NOTHING))
    [again] = state.summons
    assert (again.key, again.by, again.round) == (VICTIM, VICTIM, state.round), "of the contribution taken meanwhile"
    state = after(state, *all_measure(state, WORK))
    assert (state.summons, conduct(state, VICTIM).tier) == ((), Tier.COUNTED)
    assert {conduct(state, key).strikes for key in MEMBERS} == {0}
    state = doubted(VICTIM, state)
    state = after(state, *all_measure(state, NOTHING))
    assert conduct(state, VICTIM).tier is Tier.SUSPENDED


def test_a_failure_long_ago_is_forgiven() -> None:
    state = doubted(VICTIM)
    state = after(state, *all_measure(state, NOTHING))
    state = after(state, *all_measure(state, WORK))
    for _ in range(FAILED_ROUNDS):
        state = after(state)
    state = doubted(VICTIM, state)
    state = after(state, *all_measure(state, NOTHING))
    assert conduct(state, VICTIM).tier is Tier.COUNTED


def test_who_fails_and_stays_away_is_measured_when_it_is_back() -> None:
    state, others = doubted(VICTIM), tuple(key for key in MEMBERS if key != VICTIM)
    state = after(state, *all_measure(state, NOTHING), authors=others)
    assert (state.summons, conduct(state, VICTIM).failed > 0) == ((), True)
    state = after(after(state, authors=others))
    state = after(state, alone(state, KEYS[6], VICTIM, NOTHING))
    state = after(state, *all_measure(state, NOTHING))
    assert conduct(state, VICTIM).tier is Tier.SUSPENDED


def test_the_typical_z_follows_members_and_no_liar_moves_it_far() -> None:
    """Who says something in every round moves it no more often than who can afford an audit now and then."""
    state, liars = after(start(typical=TYPICAL - 5 * TYPICAL_STEP)), (KEYS[5], KEYS[6])
    while state.round < 12 * TYPICAL_ROUNDS:
        said = [alone(state, author, other, (2_000, 1_000)) for author, other in zip(liars, liars[::-1], strict=True)]
        said += [alone(state, author, VICTIM, WORK) for author in MEMBERS[:3] if state.round % TYPICAL_ROUNDS == 9]
        state = after(state, *said)
    assert TYPICAL - TYPICAL_STEP <= state.typical <= TYPICAL + 2 * TYPICAL_STEP


def test_early_in_a_run_nobody_is_suspended_for_a_low_z() -> None:
    state = after(start(typical=400))
    for author in MEMBERS[:3] * 4:
        state = after(state, alone(state, author, VICTIM, (-500, 1_000)))
    assert state.summons == ()


# ---------------------------------------------------------------------------------------------------
# Who does not work


def test_who_contributes_nothing_of_its_own_counts_for_nothing_and_then_loses_its_seat() -> None:
    state = suspended(VICTIM)
    assert conduct(state, VICTIM).tier is Tier.SUSPENDED
    assert VICTIM in state.members, "it still votes"
    manifest = taking(state)
    assert [each.author for each in manifest.taken if not each.counts] == [VICTIM]
    assert VICTIM not in {each.author for each in manifest.counted}
    for author in (KEYS[0], KEYS[1], KEYS[2]):
        state = after(state, alone(state, author, VICTIM, NOTHING))
    assert state.summons == (), "it counts for nothing anyway"
    while conduct(state, VICTIM).tier is Tier.SUSPENDED:
        assert state.round <= conduct(state, VICTIM).since + TRIAL_ROUNDS
        state = after(state)
    assert conduct(state, VICTIM).tier is Tier.EXPELLED
    manifest = taking(state)
    assert manifest.unseated == (VICTIM,)
    state = state.after(manifest, AUDITED)
    assert VICTIM not in state.place


def test_who_was_on_trial_loses_its_seat_with_its_work() -> None:
    """Or one machine would work for one key after the other, and all would vote for hundreds of rounds more."""
    tried = tuple(Admitted(key, 0, 0, 0, 0, Conduct(since=1 if key == VICTIM else 0)) for key in MEMBERS)
    state = doubted(VICTIM, replace(start(), admitted=tried))
    for _ in range(2):
        state = after(state, *all_measure(state, NOTHING))
    assert conduct(state, VICTIM).tier is Tier.EXPELLED
    manifest = taking(state)
    assert manifest.unseated == (VICTIM,)
    state = state.after(manifest, AUDITED)
    assert (VICTIM in state.place, VICTIM in state.members) == (True, False), "it may be found working again"


def test_harm_is_found_by_its_strength() -> None:
    state = after(start())
    for author in MEMBERS[:2]:
        state = after(state, alone(state, author, VICTIM, (1_500, -1_000)))
        if state.summons:
            break
    for _ in range(2):
        state = after(state, *all_measure(state, (1_500, -1_000)))
    assert conduct(state, VICTIM).tier is Tier.SUSPENDED


def test_a_suspended_member_is_told_which_contribution_it_was_and_what_all_found() -> None:
    state, manifests = doubted(VICTIM), list[Manifest]()
    while conduct(state, VICTIM).tier is Tier.COUNTED:
        manifests.append(taking(state, *all_measure(state, NOTHING)))
        state = state.after(manifests[-1], AUDITED)
    since, last = conduct(state, VICTIM).since, manifests[-1].audits[0].round
    manifests.append(taking(state))
    told = f"the contribution that round {last} took (z 0.00, strength 1.00 in the median)"
    assert (failed_text(manifests, VICTIM, since), len(manifests)) == (told, 3)
    assert failed_text(manifests[2:], VICTIM, since) == "a contribution", "that round is not kept any more"


def test_a_suspended_member_earns_its_weight_back() -> None:
    state = suspended(VICTIM)
    others = [key for key in MEMBERS if key != VICTIM]
    for author in others[:PASSES]:
        assert state.summons == ()
        state = after(state, alone(state, author, VICTIM, WORK))
    assert [summons.key for summons in state.summons] == [VICTIM]
    state = after(state, *all_measure(state, WORK))
    assert conduct(state, VICTIM).tier is Tier.COUNTED
    assert all(each.counts for each in taking(state).taken)


def test_four_members_have_to_find_work_not_one_four_times() -> None:
    state = suspended(VICTIM)
    for _ in range(2 * PASSES):
        state = after(state, alone(state, KEYS[0], VICTIM, WORK))
    assert state.summons == ()
    assert conduct(state, VICTIM).passed_by == (KEYS[0],)


# ---------------------------------------------------------------------------------------------------
# Newcomers to an open run


def joined(state: AgreedState, run: RunConfig = AUDITED) -> AgreedState:
    join = Request(join=Join(NEWCOMER, bytes(32), 0, 0))
    return state.after(decide(state, quorum(state, requests=ASKED[:1]), (), {ASKED[0]: join}, run), run)


def test_a_newcomer_counts_once_four_members_and_then_all_found_its_work() -> None:
    state, authors = joined(after(start())), (*MEMBERS, NEWCOMER)
    assert conduct(state, NEWCOMER).tier is Tier.ON_TRIAL
    state = after(state, authors=authors)
    for author in MEMBERS[:PASSES]:
        assert not any(each.counts for each in taking(state, authors=authors).taken if each.author == NEWCOMER)
        state = after(state, alone(state, author, NEWCOMER, WORK), authors=authors)
    assert NEWCOMER not in state.members
    state = after(state, *all_measure(state, WORK), authors=authors)
    assert conduct(state, NEWCOMER).tier is Tier.COUNTED
    assert after(state, authors=authors).members == tuple(sorted(authors)), "and gets its seat after probation"


def test_without_an_audit_it_never_gets_a_seat() -> None:
    state, authors = joined(after(start())), (*MEMBERS, NEWCOMER)
    for _ in range(30):
        state = after(state, authors=authors)
    assert NEWCOMER in state.place
    assert NEWCOMER not in state.members


def test_a_newcomer_without_work_is_forgotten() -> None:
    state, authors = joined(after(start())), (*MEMBERS, NEWCOMER)
    for _ in range(TRIAL_ROUNDS + 1):
        assert (NEWCOMER in state.place, state.summons) == (True, ())
        doubts = [alone(state, KEYS[0], NEWCOMER, NOTHING)] if state.round % 9 == 0 else []
        state = after(state, *doubts, authors=authors)
    assert NEWCOMER not in state.place


def test_a_seat_needs_half_of_the_work_that_members_do() -> None:
    """A key that shares one machine's work with others gathers credit as many times more slowly."""
    entries = [Admitted(key, 0, 9, 0, 0, Conduct(credit=40 * CREDIT)) for key in MEMBERS]
    for credit, is_seated in ((5 * CREDIT, False), (11 * CREDIT, True)):
        newcomer = Admitted(NEWCOMER, 200, 9, 0, 0, Conduct(credit=credit))
        state = admitting(*entries, newcomer, size=SIZE, round=400)
        assert (NEWCOMER in all_hold(state, run=AUDITED).seated) is is_seated


def test_members_who_praise_each_other_keep_nobody_from_a_seat() -> None:
    praised = {key: Conduct(credit=(4_000 if key in MEMBERS[:2] else 10) * CREDIT) for key in MEMBERS}
    entries = [Admitted(key, 0, 9, 0, 0, each) for key, each in praised.items()]
    state = admitting(*entries, Admitted(NEWCOMER, 200, 9, 0, 0, Conduct(credit=5 * CREDIT)), size=SIZE, round=400)
    assert all_hold(state, run=AUDITED).seated == (NEWCOMER,)


def test_a_pass_by_luck_is_lost_on_trial() -> None:
    state, authors = joined(after(start())), (*MEMBERS, NEWCOMER)
    state = after(state, authors=authors)
    state = after(state, alone(state, KEYS[0], NEWCOMER, WORK), authors=authors)
    assert conduct(state, NEWCOMER).credit > 0
    state = after(state, alone(state, KEYS[1], NEWCOMER, NOTHING), authors=authors)
    assert conduct(state, NEWCOMER).credit == 0


def test_a_small_run_seats_who_contributes_whatever_credit_others_have() -> None:
    size = AUDITED_FROM - 2
    entries = [Admitted(key, 0, 9, 0, 0, Conduct(credit=40 * CREDIT)) for key in KEYS[:size]]
    state = admitting(*entries, Admitted(NEWCOMER, 200, 9, 0, 0), size=size, round=400)
    assert all_hold(state, run=AUDITED).seated == (NEWCOMER,)


@pytest.mark.parametrize(("size", "tier"), [(AUDITED_FROM - 1, Tier.COUNTED), (AUDITED_FROM, Tier.ON_TRIAL)])
def test_the_first_members_of_a_run_count_at_once(size: int, tier: Tier) -> None:
    assert conduct(joined(admitting(size=size)), NEWCOMER).tier is tier


def test_an_invitation_or_a_run_that_cannot_be_audited_needs_no_trial() -> None:
    for run in (run_of(), run_of(admission={"policy": "allowlist", "keys": [NEWCOMER.hex()]}, recipe=LOCAL)):
        assert conduct(joined(start(), run), NEWCOMER).tier is Tier.COUNTED


# ---------------------------------------------------------------------------------------------------
# What may be said


def report(state: AgreedState, author: bytes = KEYS[0], **changes: Any) -> AuditReport:
    fields = {"key": VICTIM, "round": state.round, "z": 0, "strength": 0, "is_summoned": False}
    return AuditReport(branch=state.branch, author=author, **(fields | changes))  # type: ignore[arg-type]


def test_audits_of_nothing_are_refused() -> None:
    state = after(start())
    assert check_request(report(state), state, AUDITED, DigestSigner()).measured == Measured(
        KEYS[0], VICTIM, state.round, 0, 0, False
    )
    own = run_of(admission={"policy": "allowlist", "keys": [KEYS[0].hex()]}, recipe=LOCAL, data={"source": "own"})
    with pytest.raises(RemoteProtocolError, match="nobody but the author has the data"):
        check_request(report(state), state, own, DigestSigner())
    old = state
    for _ in range(AUDIT_ROUNDS):
        old = after(old)
    cases = {
        "no seat": (state, report(state, NEWCOMER)),
        "its own": (state, report(state, VICTIM)),
        "not taken": (state, report(state, key=NEWCOMER)),
        "another round": (state, report(state, round=state.round + 1)),
        "too long ago": (old, report(old, round=state.round)),
        "not summoned": (state, report(state, is_summoned=True)),
        "heard": (after(state, alone(state, KEYS[0], VICTIM, WORK)), report(state)),
    }
    for what, (here, message) in cases.items():
        with pytest.raises(RemoteProtocolError, match="the audit is of nothing that its author may audit now"):
            pytest.fail(f"{what}: {check_request(message, here, AUDITED, DigestSigner())}")


def test_a_thousand_audits_of_a_member_cost_a_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    state, made = after(start()), Requests(Context(AUDITED, RUN, KEYS[0], DigestSigner(KEYS[0]), Random(0)))
    found = [made.add(signed(report(state, z=number)), state) for number in range(-500, 500)]
    assert sum(found) == pool.AUDITS_OF_MEMBER_MAX
    assert made.limits()["audits"] == (pool.AUDITS_OF_MEMBER_MAX, 2 * pool.AUDITS_MAX)
    assert made.limits()["requests"][0] == 0, "they keep out nothing else"
    manifest = taking(state, *(Measured(KEYS[0], VICTIM, state.round, z, 0, False) for z in range(9)))
    state = state.after(manifest, AUDITED)
    assert conduct(state, VICTIM).doubt == TYPICAL // 2, "one counts"


def test_so_many_summonses_are_open_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOUBT", 1)
    state = after(start())
    state = after(state, *(alone(state, KEYS[0] if key != KEYS[0] else KEYS[1], key, NOTHING) for key in MEMBERS[:1]))
    state = after(
        state, *(alone(state, MEMBERS[(place + 1) % SIZE], key, NOTHING) for place, key in enumerate(MEMBERS))
    )
    assert len(state.summons) == SUMMONS_MAX


def test_a_manifest_that_breaks_the_rules_of_audits_is_seen() -> None:
    state = suspended(VICTIM)
    manifest = taking(state, alone(state, KEYS[0], VICTIM, WORK))
    assert contradiction(manifest, state, AUDITED) is None
    applied = replace(manifest, taken=tuple(replace(each, counts=True) for each in manifest.taken))
    assert "do not count" in (contradiction(applied, state, AUDITED) or "")
    false = replace(manifest, audits=(Measured(NEWCOMER, VICTIM, state.round, 0, 0, False),))
    assert "may not audit" in (contradiction(false, state, AUDITED) or "")


# ---------------------------------------------------------------------------------------------------
# Copies


def test_the_same_content_counts_once_and_never_again() -> None:
    state = admitting(Admitted(NEWCOMER, 0, 0, 0), size=SIZE)
    original = announced(KEYS[2])
    copies = [announced(key, which=b"copy", content=original.content) for key in (KEYS[4], NEWCOMER)]
    manifest = all_hold(state, original, *copies)
    assert len(manifest.taken) == 1
    assert manifest.taken[0].author in (KEYS[2], KEYS[4]), "of two members one is drawn"
    assert contradiction(manifest, state, run_of()) is None
    assert all_hold(state, original, copies[1]).taken[0].author == KEYS[2], "and a newcomer takes no member's place"
    state = state.after(manifest, run_of())
    again = announced(KEYS[5], 2, base_round=1, base_root=state.root, content=original.content)
    assert not state.may_take(again, 0)
    uncounted = admitting(Admitted(KEYS[4], 0, 0, 0, 0, Conduct(Tier.SUSPENDED)), size=SIZE)
    assert all_hold(uncounted, original, copies[0]).taken[0].author == KEYS[2], "nor who counts for nothing"
    both = replace(manifest, taken=tuple(replace(manifest.taken[0], author=key) for key in (KEYS[2], KEYS[4])))
    assert "same content of two authors" in (contradiction(both, start(), run_of()) or "")
