"""A node under faults: lies, floods, restarts, clock jumps and differing states."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2ptrain.core import events as ev
from p2ptrain.core.chain import Chain
from p2ptrain.core.history import Entry, History
from p2ptrain.core.local_work import REPLAY_ROUNDS_MAX
from p2ptrain.core.manifest import NO_BEARER, Join
from p2ptrain.core.messages import (
    NOTHING,
    NUMBER_MAX,
    Availability,
    Ballot,
    Certificate,
    Hello,
    JoinRequest,
    Leave,
    Message,
    Proposal,
    Vote,
    message_digest,
)
from p2ptrain.core.node import GAP_SECONDS
from p2ptrain.core.reputation import BURST, prove
from p2ptrain.core.roster import bitmap
from p2ptrain.core.voice import RECALL_MARGIN
from p2ptrain.digest import digest
from tests.helpers.catchup import meet, other_line
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    Bench,
    MemoryStore,
    announced,
    certified,
    envelopes,
    name_of,
    payload,
    plain_manifest,
    published,
    root_of,
    sent,
    signed,
    voted,
)

ME, STRANGER = KEYS[1], KEYS[9]
PREVOTE, PRECOMMIT = Ballot.PREVOTE, Ballot.PRECOMMIT


def store_of(bench: Bench, effects: list[ev.Effect]) -> MemoryStore:
    """The disk after these effects."""
    store = MemoryStore(bench.genesis)
    store.keep(effects)
    return store


def joined_by(keys: tuple[bytes, ...], rounds: int = 0) -> tuple[Bench, Chain]:
    """A founder that has yet to start, and its run: others joined, and have a seat unless it ended before."""
    bench = Bench(1, me=0, start=False)
    line = Chain(bench.genesis, RUN, 64)
    joins: dict[str, object] = {"joins": tuple(Join(key, NO_BEARER, 0, 0) for key in keys)}
    while line.state.round < rounds or (not rounds and len(line.state.members) <= len(keys)):
        number, state = line.state.round + 1, line.state
        offers = [announced(each.key, number) for each in state.admitted]
        manifest = plain_manifest(state, bench.run, offers, root_round=number - 1, root=root_of(number - 1))
        entry = certified(replace(manifest, **joins), state)
        joins = {}
        line.append(entry, state.after(entry.manifest, bench.run))
    return bench, line


# ---------------------------------------------------------------------------------------------------
# Lies


def test_two_announcements_for_one_round_are_told_to_everyone_once() -> None:
    bench = Bench(4, me=1)
    bench.now = 10.0
    offers = [announced(KEYS[2], which=bytes([which]), inline=True) for which in range(3)]
    bench.hear(offers[0], attachment=payload(KEYS[2], 1, b"\0"), good=True)
    proof = prove(
        *(signed(offer, payload(KEYS[2], 1, bytes([which]))).envelope for which, offer in enumerate(offers[:2]))
    )
    assert bench.hear(offers[1], attachment=payload(KEYS[2], 1, b"\1"), good=True) == [ev.Publish(*envelopes(proof))]
    assert bench.hear(offers[2], attachment=payload(KEYS[2], 1, b"\2"), good=True) == []
    assert list(bench.parts.pools.requests.by_name) == [name_of(proof)]


def test_two_votes_for_one_place_are_told_to_everyone() -> None:
    bench = Bench(4, me=1)
    first, second = voted(KEYS[2], PREVOTE, ROOT0), voted(KEYS[2], PREVOTE, NOTHING)
    assert bench.hear(first) == []
    proof = prove(*envelopes(first, second))
    assert bench.hear(second) == [ev.Publish(*envelopes(proof))]
    assert bench.hear(voted(KEYS[2], PREVOTE, RUN)) == []  # once is enough


def test_two_proposals_for_one_view_are_told_to_everyone() -> None:
    bench = Bench(4, me=1)
    first, second = (Proposal(RUN, 1, 0, -1, (each,), each, KEYS[0]) for each in (ROOT0, RUN))
    assert bench.hear(first) == bench.said(voted(ME, PREVOTE, NOTHING))  # not of a quorum of availabilities
    assert bench.hear(second) == [ev.Publish(*envelopes(prove(*envelopes(first, second))))]


def test_evidence_goes_into_the_availability_and_the_manifest_bans() -> None:
    bench = Bench(4, me=1)
    proof = prove(*(signed(announced(KEYS[3], which=which)).envelope for which in (b"a", b"b")))
    assert bench.hear(proof) == []
    offers = bench.collect()
    named = [bench.available(key, offers, requests=(name_of(proof),)) for key in KEYS[:3]]
    assert bench.parts.here.mine == signed(named[1])
    proposal, manifest = bench.proposed(
        named, offers, asked={name_of(proof): bench.parts.pools.requests.request(name_of(proof))}
    )
    assert (manifest.evidence, manifest.banned, manifest.unseated) == ((name_of(proof),), (KEYS[3],), (KEYS[3],))
    bench.hear_all(named[0], named[2], proposal)
    for ballot in Ballot:
        bench.hear_all(*(voted(key, ballot, manifest.digest) for key in (KEYS[0], KEYS[2])))
    assert (bench.state.members, bench.state.bans) == (KEYS[:3], (KEYS[3],))
    assert "crash-only: with fewer than four members, no liar is tolerated" in bench.health


def test_messages_of_keys_that_are_not_admitted_are_dropped_unread() -> None:
    bench = Bench(4, me=1)
    before = bench.node.limits()
    messages: list[Message] = [
        announced(STRANGER),
        bench.available(STRANGER),
        Proposal(RUN, 1, 0, -1, (ROOT0,), ROOT0, STRANGER),
        voted(STRANGER, PREVOTE, ROOT0),
        voted(STRANGER, PREVOTE, ROOT0, number=9),
        Leave(RUN, 1, STRANGER),
        Hello(RUN, 9, 0, b"", b"", b"", b"", False, STRANGER),
        Certificate(RUN, 1, 0, ROOT0, b"\1", (bytes(64),)),
    ]
    assert bench.hear_all(*messages) == []
    after = bench.node.limits()
    assert {name for name in before if before[name] != after[name]} == {"peers remembered"}
    assert bench.node.context.counters["useless messages"] == len(messages)


def test_a_member_without_a_seat_is_heard_only_for_what_it_offers() -> None:
    bench = Bench(4, me=1, admission={"seats_max": 4})
    assert bench.hear(voted(KEYS[5], PREVOTE, ROOT0)) == []
    assert bench.parts.here.agreement.views[0].prevotes == {}


def test_a_flood_costs_the_flooder_its_connection_and_nobody_else_anything() -> None:
    bench = Bench(4, me=1)
    bench.now = 1.0
    flood: list[Message] = [voted(KEYS[3], ballot, ROOT0, view) for ballot in Ballot for view in range(2)]
    flood *= 200
    flood += [announced(KEYS[3], which=bytes([which])) for which in range(200)]
    flood += [bench.available(KEYS[3], heard=bitmap((which,))) for which in range(200)]
    flood += [bench.available(KEYS[3], round=2, heard=bitmap((which,))) for which in range(200)]
    disconnected = []
    for place, message in enumerate(flood * 2):
        bench.now = 1.0 + place / 100.0
        disconnected += [effect for effect in bench.hear(message) if isinstance(effect, ev.Disconnect)]
    assert {effect.peer for effect in disconnected} == {KEYS[3]}
    assert {name: limit for name, limit in bench.node.limits().items() if limit[0] > limit[1]} == {}
    bench.do(ev.PeerLost(KEYS[3]))
    offers = tuple(announced(key, inline=key != ME) for key in KEYS[:3])
    for offer in (offers[0], offers[2]):
        bench.hear_offer(offer)
    bench.train()
    while bench.parts.here.mine is None:
        bench.tick()
    named = [bench.available(key, offers) for key in KEYS[:3]]
    proposal, manifest = bench.proposed(named, offers)
    bench.hear_all(named[0], named[1], named[2], proposal)
    for ballot in Ballot:
        bench.hear_all(*(voted(key, ballot, manifest.digest) for key in (KEYS[0], KEYS[2])))
    assert bench.state.head == manifest.digest


def test_a_flooder_that_takes_no_part_in_the_run_is_disconnected_once_a_second() -> None:
    """Its connection is open, but it does not say that it takes part, and so is no peer."""
    bench = Bench(4, me=1)
    bench.do(ev.PeerLost(KEYS[3]))
    effects = []
    for place in range(30 * 400):
        bench.now = place / 400.0
        heard = bench.hear(Leave(bytes(32), 1, KEYS[3]))  # of another run
        effects += [effect for effect in heard if isinstance(effect, ev.Disconnect)]
    greylisted_at = 10.0
    assert set(effects) == {ev.Disconnect(KEYS[3], "its messages are useless")}
    assert len(effects) == pytest.approx(30.0 - greylisted_at, abs=2.0)


def test_more_useless_messages_than_a_hand_over_brings_count_as_a_flood() -> None:
    bench = Bench(4, me=1)
    bench.hear(voted(KEYS[3], PREVOTE, ROOT0))
    bench.hear_all(*[voted(KEYS[3], PREVOTE, ROOT0)] * int(BURST))
    reputation = bench.node.context.reputation
    assert reputation.score(KEYS[3], bench.now) == 0.0
    bench.hear(voted(KEYS[3], PREVOTE, ROOT0))
    assert reputation.score(KEYS[3], bench.now) == 2.0


def test_whoever_talks_nonsense_is_disconnected() -> None:
    bench = Bench(4, me=1)
    effects = [bench.do(ev.MalformedReceived(KEYS[3], "not a message")) for _ in range(20)]
    assert effects == [[]] * 19 + [[ev.Disconnect(KEYS[3], "its messages are useless")]]
    assert bench.do(ev.MalformedReceived(KEYS[3], "not a message")) == []  # once, whatever is still to be read
    bench.do(ev.PeerSeen(KEYS[3]))
    assert bench.do(ev.MalformedReceived(KEYS[3], "not a message")) == effects[-1]


# ---------------------------------------------------------------------------------------------------
# Coming and going


def test_a_newcomer_asks_to_be_admitted_and_again_after_twice_the_time() -> None:
    bench = Bench(4, me=9, peers=False)
    assert bench.started == []
    request = JoinRequest(RUN, 1, b"", STRANGER)
    assert bench.do(ev.PeerSeen(KEYS[0])) == [
        ev.Send(KEYS[0], envelopes(bench.hello(STRANGER))),
        ev.Send(KEYS[0], envelopes(request)),
    ]
    times = []
    while bench.now < 60.0:
        if ev.Send(KEYS[0], envelopes(request)) in bench.tick():
            times.append(bench.now)
    assert times == [5.0, 15.0, 35.0]


def test_a_newcomer_shows_its_invitation() -> None:
    bench = Bench(4, me=9, start=False)
    assert bench.start(claim=b"claim") == []
    shown = ev.Send(KEYS[0], envelopes(JoinRequest(RUN, 1, b"claim", STRANGER)))
    assert shown in bench.do(ev.PeerSeen(KEYS[0]))


def test_a_newcomer_is_admitted_contributes_and_gets_a_seat() -> None:
    bench = Bench(4, me=1, admission={"probation_rounds": 1})
    request = JoinRequest(RUN, 1, b"", STRANGER)
    assert bench.hear(request) == []
    named_requests = {name_of(request): bench.parts.pools.requests.request(name_of(request))}
    offers = bench.collect()
    named = [bench.available(key, offers, requests=(name_of(request),)) for key in KEYS[:3]]
    proposal, manifest = bench.proposed(named, offers, asked=named_requests)
    bench.hear_all(named[0], named[2], proposal)
    for ballot in Ballot:
        bench.hear_all(*(voted(key, ballot, manifest.digest) for key in (KEYS[0], KEYS[2])))
    assert [entry.key for entry in bench.state.admitted] == sorted((*KEYS[:4], STRANGER))
    assert bench.parts.pools.requests.by_name == {}
    bench.do(ev.Applied(RUN, 1, root_of(1)))
    theirs = announced(STRANGER, 2, inline=True)
    bench.hear_offer(theirs)
    offers = (*bench.collect(), theirs)
    named = [bench.available(key, offers) for key in KEYS[:3]]
    proposal, manifest = bench.proposed(named, offers)
    assert manifest.seated == (STRANGER,)
    assert bench.parts.here.mine == signed(named[1])


# ---------------------------------------------------------------------------------------------------
# Restarts


def test_a_node_that_starts_again_says_the_same_again() -> None:
    bench = Bench(4, me=1)
    bench.now = 10.0
    said = bench.train()
    offers = tuple(announced(key, inline=key != ME) for key in KEYS[:4])
    for offer in (offers[0], offers[2]):
        bench.hear_offer(offer)
    named = [bench.available(key, offers) for key in KEYS[:4]]
    bench.hear_offer(offers[3])
    proposal, manifest = bench.proposed(named[:3], offers)
    said += bench.hear_all(named[0], named[2], proposal)
    said += bench.hear_all(*(voted(key, PREVOTE, manifest.digest) for key in (KEYS[0], KEYS[2])))
    store = store_of(bench, said)
    votes = [voted(ME, ballot, manifest.digest) for ballot in Ballot]

    again = Bench(4, me=1, start=False)
    effects = again.do(ev.Started(store.saved()), 100.0)
    assert published(effects) == [*votes, announced(ME)]
    fetched = [effect for effect in effects if isinstance(effect, ev.Fetch)]
    others = sorted((offers[place] for place in (0, 2, 3)), key=message_digest)
    assert fetched == [ev.Fetch(each.payload, each.payload_bytes, (each.author,)) for each in others]
    assert [record for record in effects if isinstance(record, ev.Persist) and isinstance(record.record, ev.Said)] == []
    agreement = again.parts.here.agreement
    assert (agreement.locked, agreement.locked_view, agreement.valid_view) == (manifest.digest, 0, 0)
    assert again.hear(proposal) == []


def test_after_a_restart_a_locked_manifest_is_proposed_again_from_the_disk_alone() -> None:
    test = Bench(4, me=2)  # proposes in view 2
    test.now = 10.0
    said = test.train()
    offers = tuple(announced(key, inline=key != test.me) for key in KEYS[:4])
    for offer in (offers[0], offers[1], offers[3]):
        test.hear_offer(offer)
    named = [test.available(key, offers) for key in KEYS[:4]]
    proposal, manifest = test.proposed(named[:3], offers)
    said += test.hear_all(named[0], named[1], proposal)
    said += test.hear_all(*(voted(key, PREVOTE, manifest.digest) for key in (KEYS[0], KEYS[1])))
    again = Bench(4, me=2, start=False)
    again.do(ev.Started(store_of(test, said).saved()), 100.0)
    effects = again.hear_all(*(voted(key, PRECOMMIT, NOTHING, view=2) for key in (KEYS[0], KEYS[3])))
    renewed, _ = test.proposed(named[:3], offers, view=2, valid_view=0)
    assert renewed in published(effects)
    assert [voted(key, PREVOTE, manifest.digest) for key in KEYS[:3]] == [
        message for message in published(effects) if isinstance(message, Vote) and message.view == 0
        and message.ballot is PREVOTE
    ][-3:]  # fmt: skip


def test_a_node_that_starts_again_after_a_round_goes_on_from_there() -> None:
    bench = Bench(4, me=1)
    effects = [effect for _ in range(3) for effect in bench.decide()]
    store = store_of(bench, effects)
    store.checkpoints.append((store.history[1].state.head, 2, root_of(2)))
    again = Bench(4, me=1, start=False)
    started = again.do(ev.Started(store.saved()), 0.0)
    step = store.history[2].step
    assert isinstance(step, Entry)
    third = step.manifest
    wanted = {taken.payload for taken in third.taken}
    assert {effect.payload for effect in started if isinstance(effect, ev.Fetch)} == wanted
    arrived = [again.arrives(each) for each in sorted(wanted)]
    assert arrived[-1] == [ev.Apply(third)]
    assert again.do(ev.Applied(RUN, 3, root_of(3))) == [ev.Train(4, 3, 1, 4)]


def test_an_identity_that_has_lost_its_memory_is_silent_for_the_rounds_in_which_it_may_have_spoken() -> None:
    bench = Bench(4, me=1, start=False)
    assert bench.start(forgetful=True) == [ev.Persist(ev.Silence(b"", NUMBER_MAX))]
    bench.do(ev.PeerSeen(KEYS[0]))
    assert published(bench.tick(1.0)) == []
    assert bench.hear(bench.hello(KEYS[0], round=7)) == []
    assert bench.hear(bench.hello(KEYS[2], round=5)) == []  # one may lie, and one may have slept
    known = ev.Silence(b"", 7 + RECALL_MARGIN)
    assert bench.hear(bench.hello(KEYS[3], round=5))[:1] == [ev.Persist(known)]
    assert bench.node.context.voice.silent_everywhere == 7 + RECALL_MARGIN
    assert "silent: it is unknown how this identity has voted before" in bench.health


def test_a_founder_that_has_lost_its_memory_is_silent_until_the_members_of_today_have_answered() -> None:
    """Every run begins with its founder alone, and no roster of that time knows how far it may have spoken."""
    bench, line = joined_by(KEYS[1:4])
    assert ev.Persist(ev.Silence(b"", NUMBER_MAX)) in bench.start(forgetful=True, applied_root=b"")
    voice, here = bench.node.context.voice, line.state.round + 1
    for key in KEYS[1:4]:
        bench.do(ev.PeerSeen(key))
        bench.hear(bench.hello(key, round=here))
    assert bench.state.round == 0 and voice.recalled == {}, "none of them is a member yet"
    meet(bench, line, KEYS[1])
    assert bench.state.members == line.state.members
    for key in KEYS[1:4]:
        assert voice.silent_everywhere == NUMBER_MAX
        bench.hear(bench.hello(key, round=here))
    assert voice.silent_everywhere == here + RECALL_MARGIN + bench.run.agreement.overlap_rounds_max
    assert not voice.may_speak(RUN, here)


def test_a_founder_alone_with_a_newcomer_without_a_seat_asks_that() -> None:
    bench, line = joined_by((STRANGER,), rounds=1)
    bench.start(forgetful=True, applied_root=b"")
    bench.do(ev.PeerSeen(STRANGER))
    meet(bench, line, STRANGER)
    assert bench.state.members == (KEYS[0],)
    bench.hear(bench.hello(STRANGER, round=2))
    assert bench.node.context.voice.silent_everywhere == 2 + RECALL_MARGIN


def test_who_was_in_no_roster_yet_asks_none() -> None:
    bench = Bench(1, me=1, start=False)
    bench.start(forgetful=True, applied_root=b"")
    bench.do(ev.PeerSeen(KEYS[0]))
    bench.hear(bench.hello(KEYS[0], round=1))  # it has lost its memory as well, and stands at the beginning
    assert bench.node.context.voice.recalled == {}


# ---------------------------------------------------------------------------------------------------
# Clocks


def test_a_clock_that_goes_back_is_taken_as_having_stood_still() -> None:
    bench = Bench(4, me=1)
    assert bench.do(ev.Tick(), 12.0) == []
    assert bench.do(ev.Tick(), 2.0) == []
    assert bench.node.deadline == 10.0  # eight seconds were left
    assert published(bench.tick()) == [bench.hello(ME)]


def test_after_a_clock_has_gone_back_a_deadline_is_still_met() -> None:
    """Adding and subtracting the shift must not round to just before the deadline."""
    bench = Bench(4, me=1)
    bench.do(ev.Tick(), 0.3)
    bench.hear(bench.hello(KEYS[0], round=2))  # we wait half a second, and then ask
    bench.do(ev.Tick(), -99.7)
    effects = bench.tick()
    assert [effect for effect in effects if isinstance(effect, ev.AskHistory)] == [ev.AskHistory(KEYS[0], RUN, 0)]


def test_time_in_which_a_machine_slept_is_no_time() -> None:
    bench = Bench(4, me=1)
    bench.do(ev.StopRequested())
    leave = ev.Publish(*envelopes(Leave(RUN, 1, ME)))
    effects = bench.do(ev.Tick(), 1_000.0)  # due after five seconds; after thirty it would have gone
    assert [effect for effect in effects if not isinstance(effect, ev.Send)] == [leave]
    assert bench.node.deadline == 1_005.0


def test_a_machine_that_slept_asks_where_the_others_are() -> None:
    bench = Bench(4, me=1)
    deadline = bench.node.deadline
    assert deadline is not None
    effects = bench.do(ev.Tick(), deadline + GAP_SECONDS + 1.0)
    assert sorted(sent(effects)) == sorted((key, bench.hello(ME)) for key in bench.others)
    assert bench.node.context.counters["gaps"] == 1


@pytest.mark.parametrize("jump", [1_000.0, -90.0])
def test_after_a_jump_of_the_clock_a_message_of_no_use_leaves_no_deadline_behind(jump: float) -> None:
    """Once the deadline was not updated, and every further message was taken for another gap: time ran backwards."""
    bench = Bench(4, me=1)
    bench.decide()
    for peer in bench.others:
        bench.do(ev.PeerLost(peer))
    assert bench.node.deadline is not None
    ours, left = bench.node.context.now, bench.node.deadline - bench.now
    bench.now += jump
    for _ in range(2):
        bench.hear(voted(KEYS[0], Ballot.PREVOTE, NOTHING))  # of round 1, which is over
        assert 0.0 <= bench.node.deadline - bench.now <= left
    assert bench.node.context.counters["gaps"] == (jump > 0)
    assert ours <= bench.node.context.now <= ours + left


# ---------------------------------------------------------------------------------------------------
# States that differ


def astray() -> tuple[Bench, list[ev.Effect]]:
    """A node whose root after round 1 differs from the one that the others certify in round 2."""
    bench = Bench(4, me=1)
    bench.decide(apply=False)
    bench.do(ev.Applied(RUN, 1, digest("core test", b"another root")))
    at = bench.state
    offers = [announced(key, 2) for key in bench.others]
    entry = certified(plain_manifest(at, bench.run, offers, root_round=1, root=root_of(1)), at, signers=bench.others)
    bench.hear(voted(KEYS[0], PREVOTE, ROOT0, number=3))
    asked = [bench.tick() for _ in range(2)]
    assert ev.AskHistory(KEYS[0], RUN, 1) in asked[0] + asked[1]
    lineage = tuple(bench.parts.chain.lineage)
    return bench, bench.do(ev.HistoryArrived(KEYS[0], History(lineage, 2, (), None, (entry,))))


def test_a_node_whose_root_is_not_the_certified_one_catches_up_and_says_so() -> None:
    bench, effects = astray()
    found = [effect for effect in effects if isinstance(effect, ev.CatchUp)]
    roots = ((1, root_of(1)), (0, ROOT0))
    assert [(effect.roots, sorted(effect.sources)) for effect in found] == [(roots, sorted(bench.others))]
    assert ev.Train not in {type(effect) for effect in effects}
    assert bench.node.view().counters["root mismatches"] == 1
    kinds = [type(effect) for effect in effects]
    assert [effect for effect in effects if isinstance(effect, ev.NoteWrongState)] == [ev.NoteWrongState(1)]
    assert kinds.index(ev.Persist) < kinds.index(ev.NoteWrongState), "what certifies the other state is saved first"
    assert bench.health == ("quarantined: this node's state differs from the certified one",)


def test_in_quarantine_nothing_is_contributed() -> None:
    bench, _ = astray()
    assert bench.train(2) == [ev.Return(2)]
    offers = [announced(key, 3, inline=True) for key in bench.others]
    for offer in offers:
        bench.hear_offer(offer)
    while bench.parts.here.mine is None:
        bench.tick()
    mine = bench.parts.here.mine.message
    assert isinstance(mine, Availability)
    assert (mine.root_round, mine.root) == (1, root_of(1))


def test_after_catching_up_the_certified_rounds_are_applied_and_training_goes_on() -> None:
    bench, _ = astray()
    effects = bench.do(ev.CaughtUp(1, root_of(1)))
    fetched = [effect.payload for effect in effects if isinstance(effect, ev.Fetch)]
    assert len(fetched) == 3
    arrived = [bench.arrives(each) for each in fetched]
    assert [type(effect) for effect in arrived[-1]] == [ev.Apply]
    bench.train(2)
    assert bench.do(ev.Applied(RUN, 2, root_of(2))) == [ev.Train(3, 2, 1, 4)]
    assert bench.health == ()


def test_while_no_peer_has_a_newer_state_one_that_is_far_behind_goes_on_round_by_round() -> None:
    bench = Bench(4, me=1)
    effects, asked = meet(bench, other_line(bench, 2 * REPLAY_ROUNDS_MAX)), 0
    assert not any(isinstance(effect, ev.Apply) for effect in effects), "fetching the state would be cheaper"
    while bench.parts.work.applied_round < bench.state.round and bench.now < 600.0:
        effect = effects.pop(0) if effects else None
        if isinstance(effect, ev.CatchUp):
            asked += 1
            effects += bench.do(ev.CatchUpFailed("none has a newer one", effect.attempt))
        elif isinstance(effect, ev.Fetch):
            effects += bench.arrives(effect.payload)
        elif isinstance(effect, ev.Apply):
            bench.now += 0.5
            effects += bench.do(ev.Applied(RUN, effect.manifest.round, root_of(effect.manifest.round)))
        elif effect is None:
            effects += bench.wait(1.0)
    assert bench.parts.work.applied_round == bench.state.round
    assert asked > 1


def test_a_state_that_cannot_be_fetched_is_asked_for_again() -> None:
    bench, _ = astray()
    start = bench.now
    bench.do(ev.CatchUpFailed("nobody answers"))
    while not any(isinstance(effect, ev.CatchUp) for effect in bench.tick()):
        pass
    assert bench.now == start + 1.0
