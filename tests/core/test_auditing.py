"""A node's own audits: paid from its training, drawn by it alone, and said once."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.core import auditing as module
from p2ptrain.core import events as ev
from p2ptrain.core.auditing import BACK_MAX, OTHERS, sequences_of
from p2ptrain.core.audits import Conduct, Measured, Tier
from p2ptrain.core.manifest import Request
from p2ptrain.core.messages import AuditReport, decode, read
from p2ptrain.core.state import Admitted, Taken
from p2ptrain.share import Share
from tests.helpers.core import KEYS, RUN, Bench, DigestSigner, announced, run_of
from tests.helpers.manifest import admitting

LOCAL = {"name": "local", "local_steps": 10, "sequences_per_pass": 8}
SEQUENCES, ROUND = 32, 80


@pytest.fixture(autouse=True)
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHANCE", 1.0)


def bench_of(share: float = 1.0, **settings: Any) -> Bench:
    bench = Bench(4, me=1, start=False, **({"recipe": LOCAL, "agreement": {"overlap_rounds": 0}} | settings))
    bench.do(ev.Started(bench.saved(), audit_share=share))
    return bench


def ordered(effects: list[ev.Effect]) -> list[ev.Audit]:
    return [each for each in effects if isinstance(each, ev.Audit)]


def reports(effects: list[ev.Effect]) -> list[AuditReport]:
    published = [decode(each.envelope, DigestSigner()) for each in effects if isinstance(each, ev.Publish)]
    return [read(each, AuditReport) for each in published if isinstance(each.message, AuditReport)]


def test_an_audit_names_what_it_takes_to_repeat_it() -> None:
    bench = bench_of()
    [order] = ordered(bench.decide())
    manifest = order.manifest
    assert (manifest.round, order.since, order.sequences) == (1, (manifest,), SEQUENCES)
    assert order.taken in manifest.taken
    assert order.taken.author != bench.me
    place = bench.founders.index(order.taken.author)
    assert order.share == Share(1, place, 4)


def test_what_was_measured_is_said_and_counts() -> None:
    bench = bench_of()
    [order] = ordered(bench.decide())
    key = order.taken.author
    effects = bench.do(ev.Audited(1, key, 1_234, 980))
    strength = 980 + module.ALLOWANCE  # these say one step of ten
    expected = AuditReport(bench.state.branch, 1, key, 1_234, strength, False, bench.me)
    assert reports(effects) == [expected]
    request = bench.parts.pools.requests
    assert [each.request for each in request.by_name.values()] == [
        Request(measured=Measured(bench.me, key, 1, 1_234, strength, False))
    ]
    assert reports(bench.do(ev.Audited(1, key, 1_234, 980))) == [], "once"
    assert bench.node.context.counters["audits"] == 1


def test_little_work_is_not_asked_for_as_much_strength() -> None:
    run = run_of(recipe=LOCAL)
    taken = Taken(KEYS[2], 5, 4, bytes(32), 1, 10, bytes(16))
    assert module.is_whole(taken, 5, run)
    assert not module.is_whole(replace(taken, steps=5), 5, run)
    assert module.is_whole(replace(taken, steps=6), 5, run)
    assert not module.is_whole(replace(taken, base_round=2), 5, run)
    assert not module.is_whole(taken, 5, run_of(recipe={"name": "distro", "sequences_per_pass": 64}))
    bench = bench_of()
    [order] = ordered(bench.decide())
    little = replace(order, taken=replace(order.taken, steps=5))
    bench.parts.work.auditing.doing = module.Doing(little, RUN, is_summoned=False)
    [told] = reports(bench.do(ev.Audited(1, order.taken.author, 1_234, 500)))
    assert told.strength == 1_600


def test_one_audit_at_a_time_and_a_dropped_one_is_not_repeated() -> None:
    bench = bench_of()
    [order] = ordered(bench.decide())
    assert ordered(bench.decide()) == []
    assert reports(bench.do(ev.Audited(1, order.taken.author, why="too few sequences"))) == []
    assert bench.node.context.counters["audits dropped"] == 1
    [second] = ordered(bench.decide())
    assert second.manifest.round == 3


@pytest.mark.parametrize(("share", "rounds"), [(1.0, 1), (0.1, 8), (0.035, 23)])
def test_audits_cost_the_share_of_the_training_that_the_owner_gives(share: float, rounds: int) -> None:
    bench, seen = bench_of(share), list[int]()
    for number in range(1, 60):
        for order in ordered(bench.decide()):
            seen.append(number)
            bench.do(ev.Audited(number, order.taken.author, 0, 0))
    assert seen[0] == 1, "it begins with one"
    assert (seen[-1] - seen[0]) / (len(seen) - 1) == pytest.approx(rounds, abs=1.0)
    cost = OTHERS * SEQUENCES * (len(seen) - 1) / (ROUND * seen[-1])
    assert cost <= max(share, OTHERS * SEQUENCES / ROUND) + 0.01


@pytest.mark.parametrize(
    "changes", [{"share": 0.0}, {"recipe": LOCAL | {"sequences_per_pass": 3}}], ids=["nothing", "small rounds"]
)
def test_a_node_that_may_not_or_cannot_measures_nothing(changes: dict[str, Any]) -> None:
    bench = bench_of(**changes)
    assert [order for _ in range(5) for order in ordered(bench.decide())] == []


def test_a_summons_is_answered_whatever_is_saved_and_with_more_sequences() -> None:
    bench = bench_of(0.0001)
    [order] = ordered(bench.decide())
    bench.do(ev.Audited(1, order.taken.author, why="dropped"))
    victim = next(key for key in bench.others if key != bench.others[0])
    for accuser in (bench.others[0], bench.others[2]):
        bench.hear(AuditReport(bench.state.branch, 1, victim, -2_000, -8_000, False, accuser))
    [summoned] = ordered(bench.decide(asked=True))
    assert [each.key for each in bench.state.summons] == [victim]
    assert (summoned.manifest.round, summoned.taken.author, summoned.sequences) == (1, victim, ROUND)
    effects = bench.do(ev.Audited(1, victim, 1_800, 1_000))
    assert [each.is_summoned for each in reports(effects)] == [True]


def test_an_audit_that_is_asked_for_says_why_it_cannot_be_done() -> None:
    bench = bench_of(0.0)
    for _ in range(3):
        bench.decide()
    view, other = bench.node.view(), bench.others[0]
    order = view.audit_of(2, other)
    assert isinstance(order, ev.Audit)
    assert (order.sequences, [each.round for each in order.since]) == (ROUND, [2, 3])
    assert "round 9 is not kept here" in str(view.audit_of(9, other))
    assert "no contribution of this key" in str(view.audit_of(2, KEYS[9]))
    for _ in range(BACK_MAX + 1):
        bench.decide()
    assert "too long ago" in str(view.audit_of(2, other))


def test_keys_on_trial_are_measured_more_often_and_first_who_may_be_found_working_soon() -> None:
    """A crowd of keys without work keeps nobody waiting who works, and who counts since lately is looked at."""
    conducts = [
        *[Conduct(Tier.ON_TRIAL, doubt=900)] * 3,
        Conduct(Tier.ON_TRIAL),
        Conduct(Tier.ON_TRIAL, doubt=900, passed_by=(KEYS[1],)),
        Conduct(Tier.ON_TRIAL, passed_by=(KEYS[0],)),
        Conduct(since=50),
        Conduct(since=8),
        Conduct(),
    ]
    entries = [Admitted(key, 0, 0, 0, 0, each) for key, each in zip(KEYS[:9], conducts, strict=True)]
    state, rng = admitting(*entries, size=3, round=100), Random(0)
    apart = {key: key.hex() for key in KEYS}
    drawn = Counter(module.draw(state, KEYS[0], KEYS[:9], apart, rng) for _ in range(9_000))
    usual = (1 - module.TRIAL_CHANCE) * 3_000  # of those who are not on trial
    new = module.TRIAL_CHANCE * (1 - module.RANKED_CHANCE) * 9_000 / 6
    best = module.TRIAL_CHANCE * module.RANKED_CHANCE * 9_000 / 2
    expected = [new] * 4 + [new + best, 0, usual + new + best, usual, usual]
    assert [drawn[key] for key in KEYS[:9]] == pytest.approx(expected, rel=0.15)
    again = [Conduct(Tier.SUSPENDED), Conduct(Tier.SUSPENDED, passed_by=(KEYS[1],))]
    entries[7:] = [Admitted(key, 0, 0, 0, 0, each) for key, each in zip(KEYS[7:9], again, strict=True)]
    again_state = admitting(*entries, size=3, round=100)
    some = Counter(module.draw(again_state, KEYS[0], KEYS[5:9], apart, rng) for _ in range(1_000))
    assert some[KEYS[7]] < some[KEYS[8]], "who is suspended is looked for once somebody has found its work"
    untried = tuple(key for key in KEYS[:4])
    drawn = Counter(module.draw(state, KEYS[0], untried, apart, rng) for _ in range(9_000))
    assert drawn[KEYS[3]] > drawn[KEYS[0]] * 2


def test_a_crowd_in_one_range_of_addresses_is_measured_as_often_as_one_newcomer() -> None:
    crowd, newcomers = KEYS[4:12], KEYS[12:14]
    state = admitting(*(Admitted(key, 0, 0, 0, 0, Conduct(Tier.ON_TRIAL)) for key in (*crowd, *newcomers)), round=100)
    ranges = {**dict.fromkeys(crowd, "10.1"), **{key: key.hex() for key in newcomers}}
    rng = Random(0)
    drawn = Counter(module.draw(state, KEYS[0], KEYS[:14], ranges, rng) for _ in range(6_000))
    assert [drawn[key] for key in newcomers] == pytest.approx([1_000, 1_000], rel=0.15)
    assert sum(drawn[key] for key in crowd) == pytest.approx(1_000, rel=0.15)
    assert drawn[KEYS[1]] == pytest.approx(750, rel=0.15)


def test_who_one_member_found_working_does_not_keep_all_others_of_its_range_from_being_measured() -> None:
    praised, newcomer = KEYS[4:6]
    conducts = {praised: Conduct(Tier.ON_TRIAL, passed_by=(KEYS[1],)), newcomer: Conduct(Tier.ON_TRIAL)}
    state = admitting(*(Admitted(key, 0, 0, 0, 0, each) for key, each in conducts.items()), round=100)
    rng = Random(0)
    drawn = Counter(module.draw(state, KEYS[0], KEYS[:6], dict.fromkeys(KEYS, "10.1"), rng) for _ in range(8_000))
    expected = 8_000 * module.TRIAL_CHANCE * (1 - module.RANKED_CHANCE) / 2
    assert drawn[newcomer] == pytest.approx(expected, rel=0.15)


def test_so_many_sequences_are_read() -> None:
    sizes = {(8, False): 32, (8, True): 80, (32, False): 32, (32, True): 320, (64, False): 64, (64, True): 320}
    for (batch, is_summoned), count in sizes.items():
        run = run_of(recipe=LOCAL | {"sequences_per_pass": batch})
        assert sequences_of(run, is_summoned=is_summoned) == count


def test_the_data_of_a_contribution_is_certain_whoever_joins_meanwhile() -> None:
    """With overlap an author may have begun from either of two states; both say the same share."""
    bench = bench_of(0.0, agreement={"overlap_rounds": 1, "staleness_rounds_max": 1})
    bench.decide()
    chain, run, author = bench.parts.chain, bench.run, bench.others[0]
    before = module.share_of(chain, RUN, author, 2, run)
    entry = Admitted(bytes(32), 1, 0, 0)
    changed = replace(bench.state, admitted=(entry, *bench.state.admitted))
    chain.steps[-1] = replace(chain.steps[-1], state=changed)
    assert before is not None
    assert bench.state.place[author] != before.place
    assert module.share_of(chain, RUN, author, 2, run) == before
    assert module.share_of(chain, RUN, entry.key, 2, run) == Share(2, 0, 5), (
        "a newcomer has one from when it is admitted"
    )
    assert module.share_of(chain, RUN, KEYS[9], 2, run) is None


def test_a_contribution_from_the_round_that_takes_it_is_none() -> None:
    """Its weights would be those that it led to."""
    bench = bench_of(0.0)
    offer = announced(bench.others[0], 1, base_round=1)
    assert not bench.state.may_take(offer, 64)


def test_a_summons_is_answered_once_and_on_a_new_branch_too() -> None:
    bench = bench_of(0.0001)
    [order] = ordered(bench.decide())
    bench.do(ev.Audited(1, order.taken.author, why="dropped"))
    victim = bench.others[1]
    bench.hear(AuditReport(bench.state.branch, 1, victim, -2_000, -8_000, False, bench.others[0]))
    bench.hear(AuditReport(bench.state.branch, 1, victim, -2_000, -8_000, False, bench.others[2]))
    [summoned] = ordered(bench.decide(asked=True))
    assert len(reports(bench.do(ev.Audited(1, victim, 1_800, 1_000)))) == 1
    assert ordered(bench.decide()) == [], "it waits for a manifest, and is not measured again"
    assert summoned.taken.author == victim
