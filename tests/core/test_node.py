"""A round on one node: complete lists of effects, from the start to the next training."""

from __future__ import annotations

from p2ptrain.core import events as ev
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import (
    NOTHING,
    Availability,
    Ballot,
    Leave,
    Vote,
    message_digest,
)
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import Taken
from tests.helpers.core import (
    BYTES,
    KEYS,
    ROOT0,
    RUN,
    Bench,
    announced,
    certified,
    collecting,
    envelopes,
    name_of,
    offers_of,
    payload,
    proposed,
    published,
    root_of,
    sent,
    signed,
    voted,
)

ME = KEYS[1]  # KEYS[0] proposes first in round 1
PREVOTE, PRECOMMIT = Ballot.PREVOTE, Ballot.PRECOMMIT

# ---------------------------------------------------------------------------------------------------
# The beginning


def test_a_node_that_starts_trains() -> None:
    bench = Bench(4, me=1)
    assert bench.started == [ev.Train(round=1, base_round=0, place=1, places=4)]


def test_a_peer_that_is_seen_is_told_where_we_stand() -> None:
    bench = Bench(4, me=1, peers=False)
    hello = envelopes(bench.hello(ME))
    assert bench.do(ev.PeerSeen(KEYS[2])) == [ev.Send(KEYS[2], hello)]
    assert bench.do(ev.PeerSeen(KEYS[2])) == [ev.Send(KEYS[2], hello)]
    assert bench.do(ev.PeerSeen(ME)) == []
    assert [each.peer for each in bench.node.view().standings()] == [KEYS[2]]
    assert bench.do(ev.PeerLost(KEYS[2])) == []
    assert bench.node.view().standings() == []


def test_without_news_a_node_is_heard_every_twenty_seconds() -> None:
    bench = Bench(4, me=1)
    assert bench.node.deadline == 20.0
    assert bench.do(ev.Tick(), 19.9) == []
    assert bench.tick() == [ev.Publish(*envelopes(bench.hello(ME)))]
    assert (bench.now, bench.node.deadline) == (20.0, 40.0)


def test_a_run_of_its_own_goes_on_by_itself() -> None:
    bench = Bench(1)
    offer = announced(KEYS[0])
    bench.now = 3.0
    available = bench.available(KEYS[0], (offer,))
    proposal, manifest = bench.proposed([available], (offer,))
    votes = [voted(KEYS[0], ballot, manifest.digest) for ballot in Ballot]
    entry = certified(manifest, bench.genesis)
    assert bench.train() == [
        *bench.said(offer),
        ev.Publish(*envelopes(available)),
        *bench.said(proposal),
        *bench.said(votes[0], manifest=manifest),
        *bench.said(votes[1], proposal, available, offer, votes[0]),
        ev.Persist(ev.Certified(entry, bench.genesis.after(manifest, bench.run))),
        ev.Apply(manifest),
    ]
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == [ev.Train(2, 1, 0, 1)]


# ---------------------------------------------------------------------------------------------------
# Train and announce


def test_a_contribution_is_on_the_disk_before_it_is_announced() -> None:
    bench = Bench(4, me=1)
    bench.now = 10.0
    assert bench.train() == bench.said(announced(ME))


def test_a_failed_training_is_tried_again_while_its_round_is_open() -> None:
    """Or a run whose only member, or all of whose members, failed once would stand still for good."""
    bench = Bench(1)
    assert bench.started == [ev.Train(1, 0, 0, 1)]
    for seconds in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        assert bench.do(ev.TrainingFailed(1, "no data"), bench.now) == []
        assert bench.node.deadline is not None and bench.node.deadline <= bench.now + seconds
        began = bench.now
        assert [each for each in bench.wait(seconds - 0.1) if isinstance(each, ev.Train)] == []
        assert bench.tick(began + seconds)[-1] == ev.Train(1, 0, 0, 1)
    assert bench.train() != []
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == [ev.Train(2, 1, 0, 1)]
    assert bench.do(ev.TrainingFailed(2, "no data")) == []
    assert bench.tick(bench.now + 5.0)[-1] == ev.Train(2, 1, 0, 1), "another round begins with a short wait"


def test_a_training_that_its_round_did_not_wait_for_is_no_failure() -> None:
    bench = Bench(1)
    bench.do(ev.TrainingFailed(1, "it passed while the device rested", has_passed=True))
    counters = bench.node.context.counters
    assert (counters["rounds let pass"], counters["trainings failed"]) == (1, 0)


def test_a_small_payload_rides_along() -> None:
    bench = Bench(4, me=1)
    bench.now = 10.0
    received = signed(announced(ME, inline=True), payload(ME, 1))
    said = [ev.Persist(ev.Said(received.envelope, (), (announced(ME).payload,))), ev.Publish(received.envelope)]
    assert bench.train(inline=True) == said


def test_what_nobody_asked_for_is_not_announced() -> None:
    bench = Bench(4, me=1)
    assert bench.train(2) == []
    assert bench.train(1) != []
    assert bench.train(1) == []


def test_a_large_payload_is_fetched_from_its_author() -> None:
    bench = Bench(4, me=1)
    bench.now = 10.0
    offer = announced(KEYS[2])
    assert bench.hear(offer) == [ev.Fetch(offer.payload, BYTES, (KEYS[2],))]
    assert bench.hear(offer) == []
    assert bench.arrives(offer.payload) == []
    assert bench.parts.pools.payloads.is_good(offer.payload)


def test_a_payload_that_nobody_wanted_is_not_taken_for_held() -> None:
    bench = Bench(4, me=1)
    assert bench.arrives(announced(KEYS[2]).payload) == []
    assert bench.parts.pools.payloads.held == {}


def test_whoever_holds_a_payload_is_asked_when_its_author_fails() -> None:
    bench = Bench(4, me=1)
    offer = announced(KEYS[2])
    bench.hear(offer)
    bench.hear(bench.available(KEYS[3], (offer,)))
    assert bench.do(ev.FetchFailed(offer.payload, KEYS[2], "gone"), 1.0) == []
    assert bench.tick() == [ev.Fetch(offer.payload, BYTES, (KEYS[2], KEYS[3]))]
    assert bench.now == 2.0


# ---------------------------------------------------------------------------------------------------
# Collect and avail


def test_collecting_ends_when_every_member_s_contribution_is_held() -> None:
    bench, offers = collecting()
    assert bench.train() == [*bench.said(announced(ME)), ev.Publish(*envelopes(bench.available(ME, offers)))]


def test_collecting_ends_with_the_last_payload_that_is_fetched() -> None:
    bench = Bench(4, me=1)
    bench.now = 10.0
    offers = [announced(key) for key in bench.founders]
    bench.hear_all(*(offers[place] for place in (0, 2, 3)))
    bench.train()
    for place in (0, 2):
        assert bench.arrives(offers[place].payload) == []
    available = bench.available(ME, tuple(offers))
    assert bench.arrives(offers[3].payload) == [ev.Publish(*envelopes(available))]


def test_a_bad_payload_is_refused_and_not_held() -> None:
    bench = Bench(4, me=1)
    bench.now = 10.0
    offers = offers_of(bench)
    for place, good in ((0, True), (3, True), (2, False)):
        bench.hear_offer(offers[place], good=good)
    bench.train()
    effects = bench.tick()
    available = bench.available(ME, tuple(offers[place] for place in (0, 1, 3)), refused=(name_of(offers[2]),))
    assert effects[:1] == [ev.Publish(*envelopes(available))]
    assert bench.node.context.counters["bad payloads"] == 1


def test_collecting_ends_at_a_multiple_of_the_median_though_somebody_is_silent() -> None:
    bench = Bench(4, me=1)
    offers = offers_of(bench)
    for place, at in ((0, 9.0), (2, 10.0)):
        bench.now = at
        bench.hear_offer(offers[place])
    bench.now = 11.0
    bench.train()
    bench.do(ev.Tick(), 20.0)
    assert bench.parts.here.closed_at is None  # of a stranger we wait three times the median
    bench.now = 26.0
    assert bench.node.deadline == 30.0
    heard = bitmap((0, 1, 2))
    available = bench.available(ME, (offers[0], offers[1], offers[2]), heard=heard)
    assert bench.tick() == [ev.Publish(*envelopes(available))]
    assert bench.now == 30.0


def test_collecting_ends_when_an_honest_member_has_ended_it() -> None:
    bench = Bench(4, me=1)
    bench.now = 10.0
    offers = offers_of(bench)
    bench.hear_offer(offers[0])
    assert bench.hear(bench.available(KEYS[0], offers[:1])) == []
    effects = bench.hear(bench.available(KEYS[2], offers[:1]))
    assert effects == [ev.Publish(*envelopes(bench.available(ME, offers[:1], heard=bitmap((0, 1, 2)))))]


def test_an_availability_of_one_liar_ends_nothing() -> None:
    bench = Bench(4, me=1)
    assert bench.hear_all(*(bench.available(KEYS[0], heard=bitmap(range(each))) for each in (1, 2, 3))) == []
    assert bench.parts.here.closed_at is None


def test_a_round_without_a_contribution_waits() -> None:
    bench = Bench(4, me=1)
    effects = [bench.tick() for _ in range(20)]
    assert bench.now == 400.0
    assert {type(message) for each in effects for message in published(each)} == {type(bench.hello(ME))}


def test_a_round_without_a_contribution_closes_for_a_request_once_a_minute() -> None:
    bench = Bench(4, me=1)
    request = Leave(RUN, 1, KEYS[2])
    bench.now = 10.0
    assert bench.hear(request) == []
    effects = [bench.tick() for _ in range(3)][-1]
    available = bench.available(ME, requests=(name_of(request),), heard=bitmap((1,)))
    assert bench.now == 60.0
    assert effects[0] == ev.Publish(*envelopes(available))


def test_an_availability_says_whom_we_heard_in_this_round_and_the_last() -> None:
    bench = Bench(7, me=1)
    proposing = {bench.order(number)[0] for number in (1, 2, 3)}
    silent = max(seat for seat in range(2, 7) if KEYS[seat] not in proposing)
    bench.hear(bench.hello(KEYS[silent]))  # the last that is heard of it
    bench.others = tuple(key for key in bench.others if key != KEYS[silent])
    heard = []
    for _ in range(3):
        offers = bench.collect()
        while (mine := bench.parts.here.mine) is None:
            bench.tick()
        assert isinstance(mine.message, Availability)
        heard.append(mine.message.heard)
        bench.agree(offers)
    assert heard == [bitmap(range(7)), bitmap(range(7)), bitmap({*range(7)} - {silent})]


# ---------------------------------------------------------------------------------------------------
# Vote


def test_a_proposal_that_is_held_is_prevoted() -> None:
    bench, _, named, proposal, manifest = proposed()
    assert bench.hear_all(named[0], named[2], named[3]) == []
    assert bench.hear(proposal) == bench.said(voted(ME, PREVOTE, manifest.digest), manifest=manifest)


def test_a_manifest_is_all_that_a_quorum_attests() -> None:
    _, offers, named, _, manifest = proposed()
    bench = Bench(4, me=1)
    assert manifest == Manifest(
        branch=RUN,
        round=1,
        parent=RUN,
        state=bench.genesis.digest,
        root_round=0,
        root=ROOT0,
        taken=tuple(
            Taken(each.author, 1, 0, each.payload, each.payload_bytes, each.steps, each.content) for each in offers
        ),
        refused=(),
        evidence=(),
        joins=(),
        leaves=(),
        banned=(),
        absent=b"",
        seated=(),
        unseated=(),
    )
    assert len(named) == 4


def test_a_proposal_of_another_manifest_than_its_availabilities_lead_to_gets_a_vote_for_nothing() -> None:
    bench, offers, named, _, _ = proposed()
    bench.hear_all(*(named[place] for place in (0, 2, 3)))
    wrong, _ = bench.proposed(named[:3], offers, manifest=ROOT0)
    assert bench.hear(wrong) == bench.said(voted(ME, PREVOTE, NOTHING))


def test_a_proposal_of_fewer_availabilities_than_a_quorum_gets_a_vote_for_nothing() -> None:
    bench, offers, named, _, _ = proposed()
    bench.hear_all(*(named[place] for place in (0, 2, 3)))
    assert bench.hear(bench.proposed(named[:2], offers)[0]) == bench.said(voted(ME, PREVOTE, NOTHING))


def test_a_proposal_that_names_one_member_twice_gets_a_vote_for_nothing() -> None:
    bench, offers, named, _, _ = proposed()
    double = bench.available(KEYS[2], offers, heard=b"\1")
    bench.hear_all(named[0], named[2], double)
    wrong, _ = bench.proposed([named[0], named[2], double], offers)
    assert bench.hear(wrong) == bench.said(voted(ME, PREVOTE, NOTHING))


def test_availabilities_that_we_lack_are_asked_of_the_proposer() -> None:
    bench, _, named, proposal, manifest = proposed()
    assert bench.hear(proposal) == [ev.Ask(KEYS[0], tuple(sorted(name_of(named[place]) for place in (0, 2))))]
    assert bench.hear(named[0], sender=KEYS[3]) == []
    assert bench.hear(named[2], sender=KEYS[3]) == bench.said(voted(ME, PREVOTE, manifest.digest), manifest=manifest)


def test_announcements_that_we_lack_are_asked_of_those_who_attest_them() -> None:
    late = announced(KEYS[3], which=b"late")
    bench = Bench(4, me=1)
    bench.now = 10.0
    offers = offers_of(bench)
    for offer in (offers[0], offers[2]):
        bench.hear_offer(offer)
    bench.train()
    every = (offers[0], offers[1], offers[2], late)
    named = [bench.available(key, every) for key in bench.founders]
    effects = bench.hear_all(named[0], named[2])
    assert effects[:1] == [ev.Ask(KEYS[0], (name_of(late),))]
    proposal, manifest = bench.proposed([named[0], named[2], named[3]], every)
    bench.hear_all(named[3], proposal)
    fetch = ev.Fetch(late.payload, BYTES, (KEYS[3],))
    assert bench.hear(late, sender=KEYS[0]) == [fetch]
    assert bench.arrives(late.payload) == bench.said(voted(ME, PREVOTE, manifest.digest), manifest=manifest)


def test_a_quorum_of_prevotes_is_precommitted_with_all_that_it_takes_to_propose_it_again() -> None:
    bench, offers, named, proposal, manifest = proposed()
    bench.hear_all(named[0], named[2], named[3], proposal)
    votes = [voted(key, PREVOTE, manifest.digest) for key in bench.founders]
    assert bench.hear(votes[0]) == []
    small = [signed(offer, payload(offer.author, 1) if offer.author != ME else b"") for offer in offers]
    backing = (
        *envelopes(proposal, *sorted(named[:3], key=message_digest)),
        *(each.envelope for each in sorted(small, key=lambda each: each.digest)),
        *envelopes(votes[0], votes[1], votes[3]),
    )
    precommit = signed(voted(ME, PRECOMMIT, manifest.digest))
    effects = bench.hear(votes[3])
    assert effects[:2] == [ev.Persist(ev.Said(precommit.envelope, backing)), ev.Publish(precommit.envelope)]
    assert [type(effect) for effect in effects[2:]] == [ev.Send]


def test_whoever_precommits_shows_one_peer_how_another_member_has_prevoted() -> None:
    shown = set()
    for seed in range(30):
        bench = Bench(7, me=1, seed=seed)
        offers = bench.collect()
        named = [bench.available(key, offers) for key in bench.founders]
        proposal, manifest = bench.proposed(named[:5], offers)
        bench.hear_all(*(each for each in named if each.author != ME), proposal)
        others = [key for key in bench.others if key != KEYS[6]]
        effects = bench.hear_all(*(voted(key, PREVOTE, manifest.digest) for key in others[:-1]))
        (place,) = [(peer, vote) for peer, vote in sent(effects) if isinstance(vote, Vote)]
        assert place[0] in bench.others
        assert place[1].author in set(others[:-1]) - {place[0]}
        shown.add((place[0], place[1].author))
    assert len(shown) > 10, "any of them"


def test_without_a_proposal_nothing_is_prevoted_when_the_view_ends() -> None:
    bench, _, named, _, _ = proposed()
    bench.hear_all(named[0], named[2], named[3])
    bench.do(ev.Tick(), 11.9)
    assert bench.parts.here.agreement.said == {}
    assert bench.do(ev.Tick(), 12.0)[:2] == bench.said(voted(ME, PREVOTE, NOTHING))


# ---------------------------------------------------------------------------------------------------
# Decide and apply


def decided() -> tuple[Bench, Manifest, list[ev.Effect]]:
    bench, _, named, proposal, manifest = proposed()
    bench.hear_all(named[0], named[2], named[3], proposal)
    bench.hear_all(*(voted(key, PREVOTE, manifest.digest) for key in bench.others))
    precommits = [voted(key, PRECOMMIT, manifest.digest) for key in bench.others]
    assert bench.hear(precommits[0]) == []
    return bench, manifest, bench.hear(precommits[1])


def test_a_decision_is_kept_with_its_certificate_and_then_applied() -> None:
    bench, manifest, effects = decided()
    entry = certified(manifest, bench.genesis, signers=KEYS[:3])
    after = bench.genesis.after(manifest, bench.run)
    assert effects == [ev.Persist(ev.Certified(entry, after)), ev.Apply(manifest)]
    assert bench.state == after
    assert bench.node.view().phase == "apply"


def test_what_was_applied_is_trained_on() -> None:
    bench, _, _ = decided()
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == [ev.Train(round=2, base_round=1, place=1, places=4)]
    assert bench.do(ev.Applied(RUN, 1, root_of(1))) == []


def test_with_overlap_the_next_training_does_not_wait_for_agreement() -> None:
    bench = Bench(4, me=1, agreement={"overlap_rounds": 1, "staleness_rounds_max": 1})
    bench.now = 10.0
    assert bench.train() == [
        *bench.said(announced(ME)),
        ev.Train(round=2, base_round=0, place=1, places=4, unsettled=(1,)),
    ]


def test_a_vote_that_comes_after_the_decision_changes_nothing() -> None:
    bench, manifest, _ = decided()
    assert bench.hear(voted(KEYS[3], PRECOMMIT, manifest.digest)) == []  # it was on its way
    bench.wait(2.0)
    assert bench.hear(voted(KEYS[3], PRECOMMIT, manifest.digest)) == [ev.Send(KEYS[3], envelopes(bench.hello(ME)))]


def test_messages_of_the_next_round_wait_for_it() -> None:
    bench, _, named, proposal, manifest = proposed()
    bench.hear_all(named[0], named[2], named[3], proposal)
    bench.hear_all(*(voted(key, PREVOTE, manifest.digest) for key in bench.others))
    after = bench.genesis.after(manifest, bench.run)
    early = Availability(RUN, 2, 0, ROOT0, (), (), (), bitmap(range(4)), KEYS[0])
    assert bench.hear(early) == []
    bench.hear_all(*(voted(key, PRECOMMIT, manifest.digest) for key in bench.others[:2]))
    assert bench.state == after
    assert list(bench.parts.here.available) == [KEYS[0]]


def test_rounds_follow_one_another() -> None:
    bench = Bench(4, me=1)
    for number in range(1, 6):
        effects = bench.decide()
        assert [type(effect) for effect in effects] == [ev.Persist, ev.Apply, ev.Train]
        assert (bench.state.round, bench.state.root_round) == (number, number - 1)
    assert bench.node.context.counters["contributions taken"] == 5
    assert bench.health == ()
