"""A node that leaves the run."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2ptrain.core import events as ev
from p2ptrain.core.arrivals import Arrivals
from p2ptrain.core.audits import DOUBT, HARM, Conduct, Tier
from p2ptrain.core.history import BranchStart, History
from p2ptrain.core.manifest import Manifest, manifest_of
from p2ptrain.core.messages import Availability, Ballot, Leave, Proposal, Vote, message_digest
from p2ptrain.core.roster import bitmap
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    Bench,
    announced,
    certified,
    envelopes,
    line_of,
    name_of,
    root_of,
    signed,
    voted,
)

ME = KEYS[1]
PREVOTE, PRECOMMIT = Ballot.PREVOTE, Ballot.PRECOMMIT


def one_vote_before_it_is_out() -> tuple[Bench, Manifest, Vote]:
    """A leaver that lacks a single vote of the round that lets it go."""
    bench = Bench(4, me=1)
    leave = Leave(RUN, 1, ME)
    bench.do(ev.StopRequested())
    asked = {name_of(leave): bench.parts.pools.requests.request(name_of(leave))}
    offers = bench.collect()
    named = [bench.available(key, offers, requests=(name_of(leave),)) for key in KEYS[:3]]
    proposal, manifest = bench.proposed(named, offers, asked=asked)
    votes = [voted(key, ballot, manifest.digest) for ballot in Ballot for key in (KEYS[0], KEYS[2])]
    bench.hear_all(named[0], named[2], proposal, *votes[:-1])
    assert bench.state.round == 0
    return bench, manifest, votes[-1]


def leaver_of_a_round() -> Bench:
    """A node whose leave was agreed on, and that has not applied that round yet."""
    bench, _, vote = one_vote_before_it_is_out()
    bench.hear(vote)
    assert ME not in bench.state.place
    return bench


def asks_for_the_history(bench: Bench, number: int) -> None:
    """Lets another say that it is in that round already."""
    bench.hear(bench.hello(KEYS[0], round=number))
    while ev.AskHistory(KEYS[0], RUN, 0) not in bench.tick():
        assert bench.now < 20.0


def history_of(bench: Bench, manifest: Manifest, rounds: int) -> History:
    """What another knows who is so many rounds further than the one that lets the leaver go."""
    after = bench.genesis.after(manifest, bench.run)
    steps = (certified(manifest, bench.genesis), *(step for step, _ in line_of(after, bench.run, rounds)))
    return History((BranchStart(RUN, 0),), 1 + rounds, (), None, steps)


def test_a_leaver_votes_until_a_manifest_carries_its_leave() -> None:
    bench = Bench(4, me=1)
    leave = Leave(RUN, 1, ME)
    bench.now = 1.0
    assert bench.do(ev.StopRequested()) == [ev.Publish(*envelopes(leave))]
    asked = {name_of(leave): bench.parts.pools.requests.request(name_of(leave))}
    bench.now = 9.0
    offers = bench.collect()
    named = [bench.available(key, offers, requests=(name_of(leave),)) for key in KEYS[:3]]
    assert bench.parts.here.mine == signed(named[1])
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


@pytest.mark.parametrize("rounds", [0, 20, 50])
def test_a_leaver_that_learns_by_a_history_that_it_may_go_takes_in_nothing_later(rounds: int) -> None:
    bench, manifest, _ = one_vote_before_it_is_out()
    asks_for_the_history(bench, rounds + 2)
    effects = bench.do(ev.HistoryArrived(KEYS[0], history_of(bench, manifest, rounds)))
    assert (bench.state.round, [type(effect) for effect in effects if not isinstance(effect, ev.Send)]) == (
        1,
        [ev.Persist, ev.Return, ev.Apply],
    )
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == [ev.Stop("left")]


def test_a_leaver_takes_in_no_history_that_it_has_asked_for_before() -> None:
    bench, manifest, vote = one_vote_before_it_is_out()
    history = history_of(bench, manifest, 20)
    asks_for_the_history(bench, 22)
    bench.hear(vote)
    assert bench.do(ev.HistoryArrived(KEYS[0], history)) == []
    assert not [effect for _ in range(5) for effect in bench.tick() if isinstance(effect, ev.AskHistory)]
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == [ev.Stop("left")]
    assert bench.state.round == 1


@pytest.mark.parametrize("is_stranger", [True, False])
def test_who_claims_to_be_far_ahead_does_not_keep_a_leaver_from_applying(is_stranger: bool) -> None:
    bench, _, vote = one_vote_before_it_is_out()
    other = KEYS[9] if is_stranger else KEYS[0]
    bench.do(ev.PeerSeen(other))
    bench.hear(bench.hello(other, round=100))
    assert not [effect for effect in bench.hear(vote) if isinstance(effect, ev.Stop)]
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == [ev.Stop("left")]


def test_a_whole_round_that_was_held_early_is_not_decided_by_a_leaver() -> None:
    bench, manifest, vote = one_vote_before_it_is_out()
    after, others = bench.state.after(manifest, bench.run), (KEYS[0], *KEYS[2:4])
    offers = [announced(key, 2, inline=True) for key in others]
    for offer in offers:
        bench.hear_offer(offer)
    held = tuple(sorted(map(name_of, offers)))
    named = [Availability(RUN, 2, 0, ROOT0, held, (), (), bitmap(range(3)), key) for key in others]
    second = manifest_of(after, bench.run, named, {name_of(each): each for each in offers}.get, lambda name: None)
    assert isinstance(second, Manifest)
    digests = tuple(sorted(map(message_digest, named)))
    bench.hear_all(*named, Proposal(RUN, 2, 0, -1, digests, second.digest, bench.order(2, after)[0]))
    bench.hear_all(*(voted(key, ballot, second.digest, number=2) for ballot in Ballot for key in others))
    assert bench.state.round == 0
    bench.hear(vote)
    assert bench.state.round == 1


def test_a_leaver_that_cannot_apply_the_last_round_ends_all_the_same() -> None:
    bench = leaver_of_a_round()
    effects: list[ev.Effect] = []
    while ev.Stop("left") not in effects:
        effects = bench.tick()
    assert bench.now == 30.0


@pytest.mark.parametrize("trouble", ["is_quarantined", "is_astray"])
def test_a_leaver_whose_state_is_wrong_waits_for_nothing(trouble: str) -> None:
    bench, _, vote = one_vote_before_it_is_out()
    setattr(bench.parts.work, trouble, True)
    assert ev.Stop("left") in bench.hear(vote)


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


@pytest.mark.parametrize(
    "conduct",
    [Conduct(muted=16), Conduct(Tier.SUSPENDED), Conduct(failed=9), Conduct(doubt=DOUBT // 2), Conduct(harm=HARM // 2)],
    ids=["muted", "suspended", "failed", "doubted", "harmful"],
)
def test_a_leaver_whose_leave_nobody_may_carry_goes_after_a_while(conduct: Conduct) -> None:
    bench = Bench(4, me=1, start=False)
    admitted = [replace(each, conduct=conduct) if each.key == ME else each for each in bench.genesis.admitted]
    bench.genesis = replace(bench.genesis, admitted=tuple(admitted))
    bench.start()
    bench.do(ev.StopRequested())
    effects: list[ev.Effect] = []
    while not any(isinstance(effect, ev.Stop) for effect in effects):
        effects = bench.tick()
    assert (bench.now, effects[-1]) == (30.0, ev.Stop("left without being heard"))


@pytest.mark.parametrize(("round_seconds", "waited"), [(10.0, 30.0), (100.0, 200.0), (1_000.0, 600.0)])
def test_a_leaver_waits_for_two_rounds_where_these_take_long_but_not_for_ever(
    round_seconds: float, waited: float
) -> None:
    bench = Bench(4, me=1, agreement={"on_quorum_loss": "halt"})
    bench.parts.pools.arrivals.begin(0, bench.now - round_seconds)
    bench.do(ev.StopRequested())
    effects: list[ev.Effect] = []
    while not any(isinstance(effect, ev.Stop) for effect in effects):
        effects = bench.tick()
    assert (bench.now, effects[-1]) == (waited, ev.Stop("left without being heard"))


def test_a_round_takes_as_long_as_the_longest_of_the_last_three() -> None:
    arrivals = Arrivals()
    assert arrivals.round_seconds == 0.0
    for number, began in enumerate((0.0, 50.0, 51.0, 54.0, 56.0)):
        arrivals.begin(number, began)
    assert arrivals.round_seconds == 3.0


def test_a_leaver_that_lacks_many_rounds_fetches_a_state_before_it_ends() -> None:
    bench = Bench(4, me=1)
    bench.do(ev.StopRequested())
    leave = name_of(Leave(RUN, 1, ME))
    line = line_of(bench.genesis, bench.run, 40)
    state = line[-1][1]
    named = [
        Availability(RUN, 41, 40, root_of(40), (), (), (leave,), bitmap(range(4)), key) for key in state.members[:3]
    ]
    asked = {leave: bench.parts.pools.requests.request(leave)}
    manifest = manifest_of(state, bench.run, named, lambda name: None, asked.get)
    assert isinstance(manifest, Manifest)
    asks_for_the_history(bench, 43)
    steps = (*(step for step, _ in line), certified(manifest, state))
    effects = bench.do(ev.HistoryArrived(KEYS[0], History((BranchStart(RUN, 0),), 41, (), None, steps)))
    assert ME not in bench.state.place
    assert isinstance(effects[-1], ev.CatchUp)
    assert bench.do(ev.CaughtUp(40, root_of(40), effects[-1].attempt)) == [ev.Apply(manifest)]
    assert bench.do(ev.Applied(RUN, 41, root_of(41))) == [ev.Stop("left")]


@pytest.mark.parametrize("keeps_place", [True, False])
def test_who_has_stopped_does_not_take_in_even_the_trusted_history(keeps_place: bool) -> None:
    source, manifest, _ = one_vote_before_it_is_out()
    history = history_of(source, manifest, 20)
    bench = Bench(4, me=5, start=False)
    bench.do(ev.Started(bench.saved(applied_root=b""), trust=history.steps[-1].manifest.digest))
    asked = [effect for key in KEYS[:4] for effect in bench.do(ev.PeerSeen(key)) if isinstance(effect, ev.AskHistory)]
    assert any(isinstance(effect, ev.Stop) for effect in bench.do(ev.StopRequested(keeps_place=keeps_place)))
    assert bench.do(ev.HistoryArrived(asked[0].peer, history)) == []
    assert bench.state.round == 0


def test_who_is_alone_and_has_stopped_decides_no_round_any_more() -> None:
    bench = Bench(1)
    assert bench.do(ev.StopRequested()) == [ev.Stop("left")]
    assert not [effect for effect in bench.train() if isinstance(effect, ev.Apply)]
    assert bench.state.round == 0


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


def test_who_goes_away_takes_in_no_history_any_more() -> None:
    bench, manifest, _ = one_vote_before_it_is_out()
    history = history_of(bench, manifest, 20)
    asks_for_the_history(bench, 22)
    assert bench.do(ev.StopRequested(keeps_place=True)) == [ev.Stop("away")]
    assert bench.do(ev.HistoryArrived(KEYS[0], history)) == []


def test_a_leaver_trains_no_more() -> None:
    bench = Bench(4, me=1)
    bench.decide(apply=False)
    assert bench.do(ev.StopRequested()) == [ev.Publish(*envelopes(Leave(RUN, 2, ME)))]
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == []
