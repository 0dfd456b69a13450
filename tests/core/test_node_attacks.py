"""Attacks and accidents that once worked against a node: replays, floods, and restarts at the worst moment."""

from __future__ import annotations

import msgspec
import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.history import BranchStart, History
from p2ptrain.core.manifest import JOINS_MIN
from p2ptrain.core.messages import NOTHING, Announcement, Availability, Ballot, Call, Vote, payload_digest
from p2ptrain.core.reputation import BURST, Reason
from p2ptrain.core.state import Admitted
from p2ptrain.digest import digest
from tests.helpers.core import (
    KEYS,
    RUN,
    Bench,
    MemoryStore,
    announced,
    line_of,
    name_of,
    payload,
    published,
    signed,
    voted,
)

ME, STRANGER = KEYS[1], KEYS[12]


# ---------------------------------------------------------------------------------------------------
# Old messages, said again


def test_whoever_repeats_old_messages_does_not_keep_their_author_alive() -> None:
    bench = Bench(4, me=1)
    old = [announced(KEYS[3], 1), voted(KEYS[3], Ballot.PREVOTE, NOTHING)]
    for message in old:
        bench.hear(message)
    heard = bench.node.context.heard_at[KEYS[3]]
    bench.now += 5.0
    for message in old:
        bench.hear(message, sender=STRANGER)
    assert bench.node.context.heard_at[KEYS[3]] == heard
    bench.decide()
    bench.now += 5.0
    for message in old:
        bench.hear(message, sender=STRANGER)
    assert bench.node.context.heard_at[KEYS[3]] < bench.now - 4.0


def test_payloads_are_stored_for_rounds_that_may_take_them() -> None:
    bench = Bench(4, me=1)
    bench.decide()
    taken = [n for n in range(1, 8) if bench.node.view().may_take(announced(KEYS[0], n, which=b"x", base_round=1))]
    overlap = bench.run.agreement.overlap_rounds_max
    assert taken == list(range(2, 4 + overlap))
    assert not bench.node.view().may_take(announced(KEYS[0], 2, branch=digest("core test", b"branch")))


def test_an_early_message_is_kept_once() -> None:
    bench = Bench(4, me=1)
    vote = voted(KEYS[0], Ballot.PREVOTE, digest("core test", b"x"), number=2)
    for _ in range(9):
        bench.hear(vote, sender=STRANGER)
    bench.hear(bench.available(KEYS[0], round=2))
    assert len(bench.parts.inbox.early[KEYS[0]]) == 2


def test_keys_without_a_seat_fill_no_memory_with_early_messages() -> None:
    bench = Bench(4, me=1, start=False)
    crowd = [Admitted(digest("core test", bytes([number])), 0, 0, 0) for number in range(40)]
    admitted = tuple(sorted((*bench.genesis.admitted, *crowd), key=lambda each: each.key))
    bench.genesis = msgspec.structs.replace(bench.genesis, admitted=admitted)
    bench.start()
    for each in crowd:
        bench.hear(bench.available(each.key, round=2), sender=STRANGER)
    assert len(bench.parts.inbox.early) == JOINS_MIN
    bench.hear_all(bench.available(crowd[0].key, round=2, heard=b"\x01"), bench.available(KEYS[0], round=2))
    assert len(bench.parts.inbox.early[crowd[0].key]) == 2
    assert len(bench.parts.inbox.early) == JOINS_MIN + 1, "members have room of their own"


def test_a_liar_that_votes_again_and_again_is_no_longer_heard() -> None:
    bench = Bench(4, me=1)
    for number in range(int(BURST) + 5):
        bench.hear(Vote(RUN, 1, 0, Ballot.PREVOTE, digest("core test", number.to_bytes(4, "big")), KEYS[0]))
    assert bench.node.context.counters["lies proved"] == 1
    assert bench.node.context.reputation.score(KEYS[0], bench.now) > 0.0


def started_again(bench: Bench, seconds: float) -> Bench:
    """Announces a contribution after this long, and then restarts the node from its disk."""
    store = MemoryStore(bench.genesis)
    bench.now = seconds
    store.keep(bench.train())
    bench.node = bench.make()
    bench.do(ev.Started(store.saved()), 0.0)
    return bench


# ---------------------------------------------------------------------------------------------------
# What is quiet, and what is not


def test_an_offer_that_changes_how_long_we_wait_sets_the_deadline() -> None:
    """After a restart, with the node's own contribution on offer."""
    bench = started_again(Bench(4, me=1), 1.0)
    bench.now = 2.0
    for key in bench.others[:2]:
        bench.hear_offer(announced(key, 1, inline=True))
        assert bench.parts.here.collecting.at is not None
        assert bench.node.deadline is not None
        assert bench.node.deadline <= bench.parts.here.collecting.at


def test_the_last_availability_that_a_decision_waits_for_decides_at_once() -> None:
    bench = Bench(7, me=1)
    offers = bench.collect()
    quorum = bench.genesis.roster.quorum
    named = [bench.available(key, offers) for key in bench.others]
    proposal, manifest = bench.proposed(named[:quorum], offers)
    bench.hear_all(*named[2:5])
    bench.hear(proposal, sender=proposal.author)
    for ballot in Ballot:
        bench.hear_all(*(voted(key, ballot, manifest.digest) for key in bench.others[:quorum]))
    assert (bench.parts.here.agreement.decided is not None, bench.state.round) == (True, 0)
    bench.hear_all(*named[:2])
    assert bench.state.round == 1


def test_our_own_time_does_not_go_back_when_the_tick_after_a_quiet_message_is_late() -> None:
    bench = Bench(4, me=1)
    assert bench.node.deadline is not None
    late = bench.node.deadline + 4.0
    bench.do(ev.MessageReceived(KEYS[0], signed(voted(KEYS[0], Ballot.PREVOTE, NOTHING))), late)
    ours = bench.node.context.now
    bench.do(ev.Tick(), late + 60.0)
    assert bench.node.context.now >= ours


def test_our_own_time_does_not_go_back_by_rounding() -> None:
    bench = Bench(4, me=0)
    bench.do(ev.Tick(), 0.3)
    bench.do(ev.Tick(), -99.7)
    assert bench.node.context.now >= 0.3


# ---------------------------------------------------------------------------------------------------
# Bad moments


def test_what_is_being_applied_when_the_branch_is_left_is_not_built_upon() -> None:
    bench = Bench(5)
    for key in bench.others:
        bench.do(ev.PeerLost(key))
    bench.do(ev.PeerSeen(STRANGER))
    bench.now = 10.0
    bench.train(1)
    applying: list[ev.Apply] = []
    while not applying and bench.now < 3_000.0:
        effects = bench.tick()
        for effect in effects:
            if isinstance(effect, ev.Train):
                name = payload_digest(payload(bench.me, effect.round))
                effects = effects + bench.do(ev.TrainingFinished(effect.round, name, 40), bench.now + 1.0)
        applying += [effect for effect in effects if isinstance(effect, ev.Apply)]
    assert bench.state.members == (bench.me,), "it went on alone, and its first round is being applied"
    peer = bench.others[0]
    bench.do(ev.PeerSeen(peer))
    steps = tuple(entry for entry, _ in line_of(bench.genesis, bench.run, 1, signers=tuple(bench.others)))
    bench.hear(bench.hello(peer, branch=RUN, round=2))
    bench.wait(1.0)
    history = History((BranchStart(RUN, 0),), 1, (), None, steps)
    effects = []
    while bench.state.branch != RUN and (asked := bench.parts.catching_up.asked) is not None:
        effects = bench.do(ev.HistoryArrived(asked.peer, history))
    assert bench.state.branch == RUN
    assert [type(effect) for effect in effects if isinstance(effect, ev.Apply | ev.CatchUp)] == [ev.CatchUp]
    assert bench.parts.work.is_astray


def test_a_restart_after_the_contribution_was_announced_does_not_wait_for_ever() -> None:
    """The other of two machines never comes back."""
    bench = started_again(Bench(2), 10.0)
    bench.wait(3_600.0)
    assert bench.state.members == (bench.me,)


def test_after_a_restart_nobody_waits_for_what_it_has_announced_itself() -> None:
    """Each of two members waited for both: the round stood still until the quorum counted as lost."""
    bench = started_again(Bench(2), 10.0)
    assert bench.parts.here.closed_at is None
    bench.hear_offer(announced(bench.others[0], 1, inline=True))
    assert bench.parts.here.closed_at is not None


@pytest.mark.parametrize(("names_its_own", "closes"), [(False, True), (True, False)])
def test_after_a_restart_nobody_waits_for_who_lets_the_round_pass(names_its_own: bool, closes: bool) -> None:
    """The other's availability names only our contribution, or also its own, which is yet to come."""
    bench = started_again(Bench(2), 10.0)
    (mine,) = [offer.announcement for offer in bench.parts.pools.offers.by_name.values()]
    other = bench.others[0]
    bench.hear(bench.available(other, (mine, announced(other, 1)) if names_its_own else (mine,)))
    assert (bench.parts.here.closed_at is not None) is closes


def test_whoever_may_not_speak_does_not_call_in_a_loop() -> None:
    bench = Bench(4, me=1, agreement={"stall_seconds": 10, "settle_seconds": 2})
    bench.collect()
    while bench.parts.regrouping.attempt < 0:
        bench.tick()
    bench.hear(Call(RUN, bench.state.head, 0, KEYS[3]))  # and never signs
    bench.node.context.voice.keep_silent(RUN, 5)
    began, ticks = bench.now, 0
    while bench.now < began + 3_600.0:
        bench.tick()
        ticks += 1
        assert ticks < 10_000
    assert bench.state.branch == RUN


def test_lies_about_where_the_swarm_is_do_not_silence_one_that_has_lost_its_memory_for_ever() -> None:
    bench = Bench(4, me=1, start=False)
    bench.start(forgetful=True)
    for _ in range(10):  # the liar is asked for proof now and then, in vain
        for key, number in ((KEYS[0], 2**40), (KEYS[2], 9), (KEYS[3], 4)):
            bench.hear(bench.hello(key, round=number))
        bench.wait(20.0)
    kept = bench.run.agreement.history_rounds
    assert 9 < bench.node.context.voice.silent_everywhere <= 9 + kept + 2


def test_a_halt_outlives_a_restart() -> None:
    bench = Bench(4, me=1, start=False)
    (first, _), *_ = line_of(bench.genesis, bench.run, 1)
    (second, _), *_ = line_of(bench.genesis, bench.run, 1, which=b"other")
    bench.start(halted=ev.Halted(first, second))
    assert bench.node.context.voice.is_halted
    assert bench.parts.catching_up.proof_of_lies == ev.Halted(first, second)
    assert "halted: two certificates exist for one round, so more than f members lie" in bench.health
    assert not bench.node.context.voice.may_speak(RUN, 1)


def test_whoever_asks_for_histories_without_end_gets_a_few() -> None:
    bench = Bench(4, me=1)
    bench.decide()
    answers = [bench.do(ev.HistoryAsked(KEYS[0], RUN, 0)) for _ in range(1_000)]
    told = [effect for effects in answers for effect in effects if isinstance(effect, ev.SendHistory)]
    assert 2 <= len(told) <= 64
    bench.now += 10.0
    assert any(isinstance(effect, ev.SendHistory) for effect in bench.do(ev.HistoryAsked(KEYS[0], RUN, 0)))


# ---------------------------------------------------------------------------------------------------
# False lengths


def with_false_length(author: bytes, of: Announcement) -> Announcement:
    return msgspec.structs.replace(of, author=author, payload_bytes=of.payload_bytes + 1)


def refused_by(effects: list[ev.Effect]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    (said,) = [message for message in published(effects) if isinstance(message, Availability)]
    return said.held, said.refused


def test_an_announcement_of_another_s_payload_with_a_false_length_is_not_held_and_refused() -> None:
    """In each case: fetched before or after that announcement, attached to the true one, or our own payload."""
    for way in ("fetched", "fetched before", "came along", "ours"):
        bench = Bench(4, me=1)
        bench.now = 10.0
        true = announced(ME if way == "ours" else KEYS[2], 1, inline=way == "came along")
        lie = with_false_length(KEYS[0], true)
        match way:
            case "fetched":
                bench.hear_all(true, lie)
                bench.do(ev.PayloadArrived(true.payload, True, true.author, true.payload_bytes))
            case "fetched before":
                bench.hear(true)
                bench.do(ev.PayloadArrived(true.payload, True, true.author, true.payload_bytes))
                bench.hear(lie)
            case "came along":
                bench.hear(lie)
                bench.hear_offer(true)
            case _:
                bench.train()
                bench.hear(lie)
        if way != "ours":
            bench.train()
        held, refused = refused_by(bench.wait(120.0))  # two of four never contribute
        assert name_of(true) in held
        assert refused == (name_of(lie),)
        assert bench.node.context.reputation.records[KEYS[0]].counters[Reason.MALFORMED] == 1


def test_a_false_length_that_others_attest_all_the_same_stops_nobody() -> None:
    """They may not know the length; the payload that the manifest needs is here."""
    bench = Bench(4, me=1)
    bench.now = 10.0
    true = announced(KEYS[2])
    lie = with_false_length(KEYS[0], true)
    bench.hear_all(true, lie)
    bench.do(ev.PayloadArrived(true.payload, True, true.author, true.payload_bytes))
    named = [bench.available(key, (lie,)) for key in bench.others]
    bench.hear_all(*named)
    proposal, manifest = bench.proposed(named, (lie,))
    said = [message for message in published(bench.hear(proposal)) if isinstance(message, Vote)]
    assert [each.manifest for each in said] == [manifest.digest]
    assert [each.author for each in manifest.taken] == [KEYS[0]]
