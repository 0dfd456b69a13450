"""Bounds on a node's memory after a long round, long silence and many branches, and that it keeps the right part."""

from __future__ import annotations

from random import Random

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core import questions as questions_module
from p2ptrain.core import round as round_module
from p2ptrain.core import voice as voice_module
from p2ptrain.core.context import Context
from p2ptrain.core.messages import NOTHING, Authored, Availability, Ballot, Call, Vote, message_digest
from p2ptrain.core.reputation import Reason
from p2ptrain.core.round import OF_MEMBER_MAX
from p2ptrain.core.voice import BACKING_BYTES_MAX, PLACES_MAX, SAID_MAX, SILENT_BRANCHES_MAX, Voice
from p2ptrain.digest import digest
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    Bench,
    DigestSigner,
    announced,
    name_of,
    payload,
    published,
    run_of,
    signed,
    signed_set,
    voted,
)

ME = KEYS[1]
PREVOTE, PRECOMMIT = Ballot.PREVOTE, Ballot.PRECOMMIT
A, B = digest("core test", b"a"), digest("core test", b"b")
BACKING = (b"proposal", b"availabilities")


def voice(branch: bytes = RUN, number: int = 1) -> Voice:
    made = Context(run_of(), RUN, ME, DigestSigner(ME), Random(0)).voice
    made.enter(branch, number)
    return made


def say(made: Voice, message: Authored, backing: tuple[bytes, ...] = ()) -> None:
    received = signed(message)
    made.remember(received, ev.Said(received.envelope, backing, (A,)))


def within_bounds(limits: dict[str, tuple[int, int]]) -> bool:
    return all(size <= bound for size, bound in limits.values())


def branch(number: int) -> bytes:
    return digest("core test", b"branch", number.to_bytes(4, "big"))


# ---------------------------------------------------------------------------------------------------
# What we said


def test_what_backs_our_words_is_dropped_when_their_round_is_certified() -> None:
    made = voice()
    lock = voted(ME, PRECOMMIT, A)
    say(made, lock, BACKING)
    assert made.remembered(RUN, 1) == [ev.Said(signed(lock).envelope, BACKING)]
    made.enter(branch(1), 2)  # which says nothing about the round that we left
    assert made.remembered(RUN, 1) == [ev.Said(signed(lock).envelope, BACKING)]
    made.enter(RUN, 2)
    assert made.remembered(RUN, 1) == [ev.Said(signed(lock).envelope)]
    assert not made.remembered(RUN, 2)


def test_only_the_newest_lock_of_a_round_keeps_what_backs_it() -> None:
    made = voice()
    first, second = voted(ME, PRECOMMIT, A), voted(ME, PRECOMMIT, B, view=1)
    say(made, first, BACKING)
    say(made, second, BACKING)
    assert [said.backing for said in made.remembered(RUN, 1)] == [(), BACKING]


def test_of_a_long_round_the_newest_words_are_remembered_and_the_lock() -> None:
    made = voice()
    lock = voted(ME, PRECOMMIT, A, view=1)
    say(made, lock, BACKING)
    votes = [voted(ME, PRECOMMIT, NOTHING, view=view) for view in range(2, SAID_MAX + 100)]
    for vote in votes:
        say(made, vote)
    expected = [signed(vote).envelope for vote in (lock, *votes[1 - SAID_MAX :])]
    assert [said.envelope for said in made.remembered(RUN, 1)] == expected
    assert within_bounds(made.limits())


def test_the_bytes_that_back_our_words_are_counted_as_they_come_and_go() -> None:
    made, name = voice(), "bytes that back what we said"
    for view, manifest in enumerate((A, B)):
        say(made, voted(ME, PRECOMMIT, manifest, view=view), BACKING)
    for view in range(2, SAID_MAX + 100):
        say(made, voted(ME, PRECOMMIT, NOTHING, view=view))
    assert made.limits()[name][0] == 0, "those of the current round have a bound of their own"
    made.enter(branch(1), 1)
    assert made.limits()[name][0] == sum(map(len, BACKING))
    made.enter(RUN, 2)
    assert made.limits()[name][0] == 0


def test_what_backs_the_words_of_left_branches_has_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_module, "BACKING_BYTES_MAX", 2_500)
    made = voice()
    for number in range(10):
        made.enter(branch(number), 1)
        say(made, voted(ME, PRECOMMIT, A, branch=branch(number)), (bytes(1_000),))
        assert within_bounds(made.limits())
    made.enter(RUN, 1)
    kept = [number for number in range(10) if made.remembered(branch(number), 1)[0].backing]
    assert kept == [8, 9]
    assert BACKING_BYTES_MAX > 2_500


def test_of_many_attempts_to_regroup_only_the_newest_is_remembered() -> None:
    made = voice()
    say(made, voted(ME, PREVOTE, A))
    for attempt in range(2 * PLACES_MAX):
        say(made, signed_set((ME, KEYS[2]), ME, attempt))
    newest = signed(signed_set((ME, KEYS[2]), ME, 2 * PLACES_MAX - 1)).envelope
    assert [said.envelope for said in made.remembered(RUN, 1)] == [newest, signed(voted(ME, PREVOTE, A)).envelope]
    assert made.may_speak(RUN, 1)
    assert within_bounds(made.limits())


def test_a_node_is_never_silenced_where_it_is_by_all_that_it_said_elsewhere() -> None:
    made = voice(RUN, 2)
    for number in (1, 2):
        say(made, voted(ME, PREVOTE, A, number=number))
    for number in range(PLACES_MAX + 10):
        say(made, voted(ME, PREVOTE, A, branch=branch(number)))
    assert (made.may_speak(RUN, 1), made.may_speak(RUN, 2)) == (False, True)
    assert (made.may_speak(branch(0), 1), made.may_speak(branch(PLACES_MAX + 9), 1)) == (False, True)
    assert len(made.remembered(RUN, 2)) == 1
    assert within_bounds(made.limits())


def test_a_branch_that_a_node_left_is_not_forgotten_over_the_many_rounds_of_the_next() -> None:
    """From a simulated swarm: one of seven went on elsewhere for 80 rounds, came back, and could not vote where it
    had left."""
    made = voice(branch(1), 5)
    for number in (4, 5):
        say(made, voted(ME, PREVOTE, A, branch=branch(1), number=number))
    for number in range(5, 5 + 2 * PLACES_MAX):
        made.enter(branch(2), number)
        say(made, voted(ME, PREVOTE, A, branch=branch(2), number=number))
    made.enter(branch(1), 5)
    assert made.may_speak(branch(1), 5)
    assert len(made.remembered(branch(1), 5)) == 1
    assert not made.may_speak(branch(1), 4)
    assert within_bounds(made.limits())


def test_where_a_node_is_silent_it_stays_so_however_many_branches_there_are() -> None:
    made = voice(RUN, 2)
    made.keep_silent(RUN, 3)
    for number in range(2 * SILENT_BRANCHES_MAX):
        made.keep_silent(branch(number), 1)
    assert not made.may_speak(RUN, 3)
    assert len(made.silent) == SILENT_BRANCHES_MAX


def test_a_member_that_is_called_for_days_may_still_speak_in_its_round() -> None:
    bench = Bench(4)
    bench.collect()
    for key in bench.others[:2]:
        bench.do(ev.PeerLost(key))
    attempt = -1
    while attempt < PLACES_MAX + 10:
        bench.tick()
        if bench.parts.regrouping.attempt > attempt:  # one calls along, and never signs
            attempt = bench.parts.regrouping.attempt
            bench.hear(Call(bench.state.branch, bench.state.head, attempt, bench.others[2]))
    assert bench.node.context.voice.may_speak(bench.state.branch, bench.state.round + 1)
    assert within_bounds(bench.node.limits())


# ---------------------------------------------------------------------------------------------------
# A round


def test_what_proposals_name_of_one_member_has_a_bound_and_the_present_ones_stay() -> None:
    bench = Bench(4, me=1)
    offers = bench.collect()
    named = [bench.available(key, offers) for key in bench.founders]
    bench.hear_all(named[0], named[2])
    here, liar = bench.parts.here, KEYS[3]
    lies = [bench.available(liar, offers, root=digest("core test", bytes([each]))) for each in range(40)]
    for lie in lies:
        here.questions.ask([name_of(lie)], [liar], is_needed=True)
        bench.hear(lie)
    kept = [received.message for received in here.available[liar]]
    assert kept == [*lies[:2], *lies[2 - OF_MEMBER_MAX :]]
    assert within_bounds(bench.node.limits())
    bench.hear(bench.proposed([*named[:2], lies[-1]], offers)[0])
    for lie in lies[2:20]:
        here.questions.ask([name_of(lie)], [liar], is_needed=True)
        bench.hear(lie)
    assert message_digest(lies[-1]) in here.availabilities
    assert within_bounds(bench.node.limits())


def test_manifests_that_nothing_stands_for_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "MANIFESTS_MAX", 3)
    bench = Bench(4, me=1)
    offers = bench.collect()
    here = bench.parts.here
    named = [bench.available(key, offers) for key in bench.founders]
    bench.hear_all(named[0], named[2], named[3])
    for seat in range(8):
        lie = bench.available(KEYS[3], offers, root=digest("core test", bytes([seat])), heard=bytes([seat + 1]))
        here.questions.ask([name_of(lie)], [KEYS[3]], is_needed=True)
        bench.hear(lie)
        digests = [message_digest(each) for each in (named[0], named[2], lie)]
        assert here._manifest(tuple(sorted(digests))) is not None
        assert len(here.manifests) <= 3
    proposal, manifest = bench.proposed([named[0], *named[2:]], offers)
    assert voted(ME, PREVOTE, manifest.digest) in published(bench.hear(proposal))
    assert bench.node.limits()["manifests"] == (len(here.manifests), 3)


def test_a_flood_of_invented_names_does_not_hold_up_a_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions_module, "QUESTIONS_MAX", 2_048)
    monkeypatch.setattr(questions_module, "UNNEEDED_MAX", 1_024)
    order = Bench(16).order()
    bench = Bench(16, me=KEYS.index(order[-1]))
    liars = [key for key in bench.others if key != order[0]][:5]
    offers = bench.collect()
    for liar in liars:
        for half in range(2):
            names = sorted(digest("junk", liar, bytes([half, each]))[:16] for each in range(256))
            bench.hear(bench.available(liar, held=tuple(names)))
    honest = [key for key in bench.others if key not in liars]
    bench.hear_all(*(bench.available(key, offers) for key in honest))
    third = bench.available(liars[0], offers, heard=b"\x01")
    named = [*(bench.available(key, offers) for key in honest[: bench.genesis.roster.quorum - 1]), third]
    effects = bench.hear(bench.proposed(named, offers)[0])
    assert any(name_of(third) in effect.names for effect in effects if isinstance(effect, ev.Ask))


def test_what_a_liar_names_leaves_room_for_what_a_proposal_needs() -> None:
    bench = Bench(4, me=3, agreement={"overlap_rounds": "auto", "staleness_rounds_max": 1})
    liar = KEYS[1]
    honest = [key for key in bench.others if key != liar]
    for number in (1, 2, 3):  # as many as are kept of anybody
        for which in (b"a", b"b"):
            bench.hear(announced(liar, number, which, base_round=0, base_root=ROOT0))
    for half in range(2):
        lies = {name_of(each): each for each in (announced(liar, 1, bytes([half, n, 0])) for n in range(256))}
        effects = bench.hear(bench.available(liar, tuple(lies.values()), root_round=0, root=ROOT0))
        for name in [name for effect in effects if isinstance(effect, ev.Ask) for name in effect.names]:
            bench.hear(lies[name], sender=liar)
    shown = announced(liar, 1, b"shown to the others", inline=True)
    bench.now = 5.0
    bench.train(1, inline=True)
    offers = [*(announced(key, 1, inline=True) for key in (*honest, bench.me)), shown]
    for offer in offers[:2]:
        bench.hear_offer(offer)
    named = [bench.available(key, tuple(offers), root_round=0, root=ROOT0) for key in honest]
    bench.hear_all(*named)
    own = bench.parts.here.mine
    assert own is not None
    assert isinstance(own.message, Availability)
    assert bench.order()[0] in honest, "the proposal is for the first view"
    proposal, _ = bench.proposed([*named, own.message], tuple(offers))
    effects = bench.hear(proposal)
    assert any(name_of(shown) in effect.names for effect in effects if isinstance(effect, ev.Ask))
    effects = bench.hear(shown, sender=honest[0], attachment=payload(liar, 1, b"shown to the others"), good=True)
    effects += bench.wait(1.0)
    assert [vote.manifest for vote in published(effects) if isinstance(vote, Vote)] == [proposal.manifest]
    assert bench.node.context.counters["useless messages"] == 0, "what was asked for costs nobody anything"


# ---------------------------------------------------------------------------------------------------
# What is observed


def test_who_says_nothing_in_a_round_is_silent_and_who_only_trains_long_is_late() -> None:
    bench = Bench(4, me=1)
    for _ in range(3):
        bench.decide()
    number = bench.state.round + 1
    bench.now += 10.0
    bench.hear_offer(announced(KEYS[0], number, inline=True, branch=bench.state.branch))
    del bench.node.context.heard_at[KEYS[3]]  # whose last vote came in the instant in which this round began
    bench.train(number)
    bench.hear(bench.hello(KEYS[2]))
    bench.wait(60.0)
    records = bench.node.context.reputation.records
    assert {key: records[key].counters for key in KEYS[2:4]} == {
        KEYS[2]: {Reason.LATE: 1},
        KEYS[3]: {Reason.SILENT: 1},
    }
    assert bench.node.view().observed == {"late": 1, "silent": 1}
    known = bench.node.view().standings()
    assert [each.peer for each in known if each.points > 0.0] == sorted(KEYS[2:4])
    assert [each.peer for each in known] == sorted([*bench.others, bench.node.view().me])
    assert sorted(bench.node.context.peers) == sorted(bench.others)
