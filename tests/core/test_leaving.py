"""A node that leaves the run."""

from __future__ import annotations

from p2ptrain.core import events as ev
from p2ptrain.core.messages import Ballot, Leave
from tests.helpers.core import (
    KEYS,
    RUN,
    Bench,
    envelopes,
    name_of,
    root_of,
    signed,
    voted,
)

ME = KEYS[1]
PREVOTE, PRECOMMIT = Ballot.PREVOTE, Ballot.PRECOMMIT


def leaver_of_a_round() -> Bench:
    """A node whose leave was agreed on, and that has not applied that round yet."""
    bench = Bench(4, me=1)
    leave = Leave(RUN, 1, ME)
    bench.do(ev.StopRequested())
    asked = {name_of(leave): bench.node.context.requests.request(name_of(leave))}
    offers = bench.collect()
    named = [bench.available(key, offers, requests=(name_of(leave),)) for key in KEYS[:3]]
    proposal, manifest = bench.proposed(named, offers, asked=asked)
    bench.hear_all(named[0], named[2], proposal)
    for ballot in Ballot:
        bench.hear_all(*(voted(key, ballot, manifest.digest) for key in (KEYS[0], KEYS[2])))
    assert ME not in bench.state.place
    return bench


def test_a_leaver_votes_until_a_manifest_carries_its_leave() -> None:
    bench = Bench(4, me=1)
    leave = Leave(RUN, 1, ME)
    bench.now = 1.0
    assert bench.do(ev.StopRequested()) == [ev.Publish(*envelopes(leave))]
    asked = {name_of(leave): bench.node.context.requests.request(name_of(leave))}
    bench.now = 9.0
    offers = bench.collect()
    named = [bench.available(key, offers, requests=(name_of(leave),)) for key in KEYS[:3]]
    assert bench.node.here.mine == signed(named[1])
    proposal, manifest = bench.proposed(named, offers, asked=asked)
    assert manifest.leaves == (ME,)
    assert bench.hear_all(named[0], named[2], proposal) == bench.said(
        voted(ME, PREVOTE, manifest.digest), manifest=manifest
    )
    bench.hear_all(*(voted(key, PREVOTE, manifest.digest) for key in (KEYS[0], KEYS[2])))
    effects = bench.hear_all(*(voted(key, PRECOMMIT, manifest.digest) for key in (KEYS[0], KEYS[2])))
    assert [type(effect) for effect in effects] == [ev.Persist, ev.Return, ev.Apply]
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == [ev.Stop("left")]


def test_a_leaver_takes_in_no_round_after_the_one_that_lets_it_go() -> None:
    """Others may be many rounds further until it ends, and its log would have rounds without their payloads."""
    bench = leaver_of_a_round()
    assert bench.hear(bench.hello(KEYS[0], round=3)) == []  # another would ask for the history
    assert not [effect for _ in range(5) for effect in bench.tick() if isinstance(effect, ev.AskHistory)]
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == [ev.Stop("left")]


def test_a_leaver_that_cannot_apply_the_last_round_ends_all_the_same() -> None:
    bench = leaver_of_a_round()
    effects: list[ev.Effect] = []
    while ev.Stop("left") not in effects:
        effects = bench.tick()
    assert bench.now == 30.0


def test_a_newcomer_that_leaves_waits_for_nothing() -> None:
    bench = Bench(4, me=5)
    assert bench.do(ev.StopRequested()) == [ev.Stop("left")]


def test_a_leaver_that_nobody_hears_goes_after_a_while() -> None:
    bench = Bench(4, me=1)
    bench.do(ev.StopRequested())
    effects: list[ev.Effect] = []
    while not any(isinstance(effect, ev.Stop) for effect in effects):
        effects = bench.tick()
    assert (bench.now, effects[-1]) == (30.0, ev.Stop("left without being heard"))


def test_who_is_alone_leaves_at_once() -> None:
    bench = Bench(1)
    assert bench.do(ev.StopRequested()) == [ev.Stop("left")]


def test_who_goes_away_for_a_while_ends_at_once_and_says_nothing_of_leaving() -> None:
    bench = Bench(4, me=1)
    bench.decide(apply=False)
    assert bench.do(ev.StopRequested(keeps_place=True)) == [ev.Stop("away")]
    assert bench.do(ev.StopRequested(keeps_place=True)) == []
    assert bench.do(ev.StopRequested()) == []
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == []


def test_a_leaver_trains_no_more() -> None:
    bench = Bench(4, me=1)
    bench.decide(apply=False)
    assert bench.do(ev.StopRequested()) == [ev.Publish(*envelopes(Leave(RUN, 2, ME)))]
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == []
