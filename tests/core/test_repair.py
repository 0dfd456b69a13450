"""Repair of lost messages: hellos, resent messages, and questions for missing ones."""

from __future__ import annotations

from random import Random

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core import repair as module
from p2ptrain.core.context import Context
from p2ptrain.core.messages import NOTHING, SHORT_BYTES, Availability, Ballot, Hello, Message, message_digest
from p2ptrain.core.questions import ASK_SECONDS, NAMES_MAX, QUESTIONS_MAX, SOURCES_MAX, UNNEEDED_MAX, Questions
from p2ptrain.core.repair import (
    ANSWER_SECONDS,
    ANSWERS_MAX,
    BURST_BYTES,
    HEARTBEAT_SECONDS,
    HISTORIES_A_SECOND,
    HISTORIES_BURST,
    PEERS_TOLD,
    QUESTION_BYTES,
    REFILL_BYTES_A_SECOND,
)
from p2ptrain.core.reputation import Reason
from p2ptrain.core.roster import bitmap
from p2ptrain.digest import digest
from tests.helpers.core import (
    KEYS,
    RUN,
    Bench,
    DigestSigner,
    announced,
    envelopes,
    name_of,
    published,
    run_of,
    sent,
    voted,
)

ME = KEYS[1]
PREVOTE, PRECOMMIT = Ballot.PREVOTE, Ballot.PRECOMMIT
ALL = bitmap(range(4))


def voting() -> tuple[Bench, list[Message]]:
    """A node that has all availabilities and the proposal, and all messages of the round, including its own."""
    bench = Bench(4, me=1)
    offers = bench.collect()
    named = [bench.available(key, offers) for key in bench.founders]
    bench.hear_all(*(each for each in named if each.author != ME))
    proposal, manifest = bench.proposed(named[:3], offers)
    bench.hear(proposal)
    votes = [voted(KEYS[0], PREVOTE, manifest.digest), voted(ME, PREVOTE, manifest.digest)]
    bench.hear(votes[0])
    bench.do(ev.Tick(), bench.now + 1.0)  # the hellos of this second
    return bench, [*offers, *named, proposal, *votes]


def kinds(effects: list[ev.Effect]) -> dict[bytes, list[str]]:
    found: dict[bytes, list[str]] = {}
    for peer, message in sent(effects):
        found.setdefault(peer, []).append(type(message).__name__)
    return found


# ---------------------------------------------------------------------------------------------------
# Hellos


def test_a_hello_says_what_is_held() -> None:
    bench, _ = voting()
    effects = bench.do(ev.PeerSeen(KEYS[2]))
    hello = bench.hello(ME, announced=ALL, available=ALL, prevoted=bitmap((0, 1)))
    assert effects == [ev.Send(KEYS[2], envelopes(hello))]


def test_who_waits_for_votes_tells_a_few_peers_every_second() -> None:
    bench = Bench(10, me=1)
    bench.now = 10.0
    offers = bench.collect()
    times = []
    while bench.now < 25.0:
        effects = bench.tick()
        if greeted := {peer for peer, _ in sent(effects)}:
            times.append(bench.now)
            assert len(greeted) == PEERS_TOLD
    assert len(offers) == 10
    assert times == [21.0, 22.0, 23.0, 24.0, 25.0]


def test_who_trains_is_quiet_but_for_a_heartbeat() -> None:
    bench = Bench(4, me=1)
    times = []
    while bench.now < 100.0:
        effects = bench.tick()
        assert sent(effects) == []
        times += [bench.now] * len(published(effects))
    assert times == [HEARTBEAT_SECONDS * each for each in range(1, 6)]


def test_a_hello_that_somebody_else_hands_on_is_worth_nothing() -> None:
    bench, _ = voting()
    assert bench.hear(bench.hello(KEYS[2]), sender=KEYS[3]) == []


# ---------------------------------------------------------------------------------------------------
# Handing over


def test_a_peer_gets_all_that_it_lacks() -> None:
    bench, messages = voting()
    handed = sent(bench.hear(bench.hello(KEYS[3])))
    assert {peer for peer, _ in handed} == {KEYS[3]}
    got = [message for _, message in handed]
    assert sorted(map(message_digest, got)) == sorted(map(message_digest, messages))


def test_a_peer_that_has_it_all_gets_nothing() -> None:
    bench, _ = voting()
    hello = bench.hello(KEYS[3], announced=ALL, available=ALL, prevoted=bitmap((0, 1, 3)))
    assert bench.hear(hello) == []


def test_two_halves_that_hold_as_much_but_not_the_same_hand_it_over() -> None:
    bench = Bench(4, me=1)
    bench.now = 10.0
    offers = [announced(key, inline=key != ME) for key in KEYS[:4]]
    bench.hear_offer(offers[0])
    bench.train()
    effects = bench.hear(bench.hello(KEYS[3], announced=bitmap((2, 3))))
    assert sorted(kinds(effects)[KEYS[3]]) == ["Announcement", "Announcement"]


def test_a_peer_is_answered_at_most_so_often() -> None:
    bench, _ = voting()
    start = bench.now
    assert KEYS[3] in kinds(bench.hear(bench.hello(KEYS[3])))
    bench.now = start + 0.9 * ANSWER_SECONDS
    assert kinds(bench.hear(bench.hello(KEYS[3]))) == {}
    assert KEYS[2] in kinds(bench.hear(bench.hello(KEYS[2])))
    bench.now = start + 1.1 * ANSWER_SECONDS
    assert KEYS[3] in kinds(bench.hear(bench.hello(KEYS[3])))


def test_a_peer_in_an_earlier_view_gets_the_votes_of_ours() -> None:
    bench, _ = voting()
    votes = [voted(key, PRECOMMIT, NOTHING, view=1) for key in (KEYS[0], KEYS[2])]
    bench.hear_all(*votes)
    assert bench.parts.here.agreement.view == 1
    got = [message for _, message in sent(bench.hear(bench.hello(KEYS[3], announced=ALL, available=ALL, prevoted=ALL)))]
    assert [message for message in got if message in votes] == votes


def test_a_peer_in_a_later_view_is_told_where_we_stand() -> None:
    bench, _ = voting()
    assert kinds(bench.hear(bench.hello(KEYS[3], view=2))) == {KEYS[3]: ["Hello"]}


def test_a_peer_in_an_earlier_round_is_told_where_we_stand() -> None:
    bench = Bench(4, me=1)
    bench.decide()
    bench.now += 1.0
    assert kinds(bench.hear(bench.hello(KEYS[3], round=1))) == {KEYS[3]: ["Hello"]}


def test_at_a_change_of_view_our_own_messages_are_said_again() -> None:
    bench, messages = voting()
    prevote = messages[-1]
    effects = bench.hear_all(*(voted(key, PRECOMMIT, NOTHING, view=1) for key in (KEYS[0], KEYS[2])))
    mine = bench.parts.here.mine
    assert mine is not None
    assert published(effects)[:2] == [mine.message, prevote]


def test_messages_are_handed_over_by_name() -> None:
    bench, messages = voting()
    known = [message for message in messages if type(message).__name__ in ("Announcement", "Availability")]
    names = tuple(name_of(message) for message in known)
    got = [message for _, message in sent(bench.do(ev.Asked(KEYS[3], (*names, bytes(SHORT_BYTES)))))]
    assert [message for message in got if type(message).__name__ != "Hello"] == known


def asked(bench: Bench, peer: bytes, *messages: Message) -> list[Message]:
    """The messages that a peer gets when it asks for these names."""
    effects = bench.do(ev.Asked(peer, tuple(map(name_of, messages))))
    return [message for to, message in sent(effects) if to == peer and not isinstance(message, Hello)]


def test_an_answer_holds_only_so_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDED_MAX", 2)
    bench, messages = voting()
    assert asked(bench, KEYS[3], *messages[:3]) == messages[:2]


def test_a_name_that_is_asked_twice_is_answered_once() -> None:
    bench, messages = voting()
    assert asked(bench, KEYS[3], *messages[:1] * 100) == messages[:1]


def test_who_is_not_connected_is_not_answered() -> None:
    bench, messages = voting()
    bench.do(ev.PeerLost(KEYS[3]))
    assert asked(bench, KEYS[3], *messages[:2]) == []
    assert asked(bench, KEYS[12], *messages[:2]) == []


def test_a_thousand_questions_at_once_are_answered_as_far_as_the_budget_goes() -> None:
    bench, messages = voting()
    wanted = next(message for message in messages if isinstance(message, Availability))
    size = QUESTION_BYTES + len(envelopes(wanted)[0])
    answers = sum(len(asked(bench, KEYS[3], wanted)) for _ in range(10_000))
    assert answers == BURST_BYTES // size
    assert asked(bench, KEYS[2], wanted) == [wanted]
    bench.do(ev.Tick(), bench.now + 0.5)
    again = sum(len(asked(bench, KEYS[3], wanted)) for _ in range(1_000))
    assert 0 <= again - REFILL_BYTES_A_SECOND * 0.5 // size <= 1
    assert bench.node.limits()["peers with a budget"] == (2, ANSWERS_MAX)


def test_what_is_handed_over_comes_out_of_the_same_budget() -> None:
    bench, _ = voting()
    hello = bench.hello(KEYS[3])
    bench.do(ev.Tick(), bench.now + 1.0)
    (handed,) = [effect for effect in bench.hear(hello) if isinstance(effect, ev.Send)]
    assert bench.parts.repair.budgets[KEYS[3]].size == BURST_BYTES - sum(map(len, handed.envelopes))
    bench.parts.repair.budgets[KEYS[3]].size = -REFILL_BYTES_A_SECOND * 1.0
    bench.do(ev.Tick(), bench.now + 0.5)
    assert handed not in bench.hear(hello)
    bench.do(ev.Tick(), bench.now + 4.0)
    assert handed in bench.hear(hello)


def test_budgets_are_remembered_of_so_many_peers() -> None:
    bench, _ = voting()
    repair = bench.parts.repair
    for number in range(ANSWERS_MAX + 10):
        assert repair.may_send(digest("core test", number.to_bytes(4, "big")), 1)
    assert repair.limits()["peers with a budget"] == (ANSWERS_MAX, ANSWERS_MAX)


def test_histories_are_told_a_few_a_second_and_not_to_the_greylisted() -> None:
    bench, _ = voting()
    repair, context = bench.parts.repair, bench.node.context
    assert sum(repair.may_tell_history(KEYS[3]) for _ in range(200)) == HISTORIES_BURST
    assert repair.may_tell_history(KEYS[2])
    context.now += 1.0
    assert sum(repair.may_tell_history(KEYS[3]) for _ in range(200)) == HISTORIES_A_SECOND
    for _ in range(60):
        context.reputation.note(KEYS[0], Reason.MALFORMED, context.now)
    assert not repair.may_tell_history(KEYS[0])


# ---------------------------------------------------------------------------------------------------
# Questions


def questions() -> Questions:
    return Questions(Context(run_of(), RUN, ME, DigestSigner(ME), Random(0)))


def emitted(made: Questions) -> list[ev.Effect]:
    effects, made.context.effects = made.context.effects, []
    return effects


NAMES = tuple(bytes([number]) * SHORT_BYTES for number in range(4))


def test_each_name_is_asked_once_of_the_first_source() -> None:
    made = questions()
    made.ask(NAMES[:2], [ME, KEYS[2], KEYS[3]])
    made.ask(NAMES[:3], [KEYS[4]])
    assert emitted(made) == [ev.Ask(KEYS[2], NAMES[:2]), ev.Ask(KEYS[4], NAMES[2:3])]


def test_what_was_not_answered_is_asked_of_the_next_after_twice_the_time() -> None:
    made = questions()
    made.ask(NAMES[:1], [KEYS[2], KEYS[3]])
    emitted(made)
    asked = []
    for _ in range(4):
        assert made.deadline is not None
        made.context.now = made.deadline
        made.tick(lambda name: False)
        asked += [(made.context.now, effect) for effect in emitted(made)]
    peers = (KEYS[3], KEYS[2], KEYS[3], KEYS[2])
    times = (1.0, 3.0, 7.0, 15.0)
    assert asked == [(time * ASK_SECONDS, ev.Ask(peer, NAMES[:1])) for time, peer in zip(times, peers, strict=True)]


def peers_asked(made: Questions, tries: int, sources: list[bytes] = []) -> list[bytes]:  # noqa: B006
    """The peers that are asked when none answers and the same names are asked for again in between."""
    found = []
    for _ in range(tries):
        assert made.deadline is not None
        made.context.now = made.deadline
        made.tick(lambda name: False)
        found += [effect.peer for effect in emitted(made) if isinstance(effect, ev.Ask)]
        made.ask(NAMES[:1], sources, is_needed=True)
    return found


PEERS = [digest("core test", b"peer", bytes([number])) for number in range(31)]
LIARS = PEERS[:10]


def test_liars_that_come_first_do_not_keep_a_question_from_all_others() -> None:
    for seed in range(50):
        made = questions()
        made.context.rng.seed(seed)
        made.ask(NAMES[:1], PEERS, is_needed=True)
        assert emitted(made) == [ev.Ask(PEERS[0], NAMES[:1])]
        assert set(peers_asked(made, SOURCES_MAX)) - set(LIARS)


def test_who_has_the_best_record_is_asked_after_the_first() -> None:
    made = questions()
    for peer in PEERS[1:-1]:
        made.context.reputation.note(peer, Reason.SILENT, 0.0)
    made.ask(NAMES[:1], PEERS, is_needed=True)
    emitted(made)
    assert peers_asked(made, 1) == [PEERS[-1]]


def test_whoever_was_asked_in_vain_makes_way_for_others() -> None:
    made = questions()
    made.ask(NAMES[:1], LIARS, is_needed=True)
    emitted(made)
    made.ask(NAMES[:1], PEERS, is_needed=True)
    assert set(made.open[NAMES[0]].sources) < set(LIARS), "nobody was asked in vain yet"
    found = peers_asked(made, 2 * SOURCES_MAX, PEERS)
    assert set(found[:7]) < set(LIARS)
    assert len(set(found) - set(LIARS)) >= 3
    assert len(made.open[NAMES[0]].sources) == SOURCES_MAX


def test_what_has_come_by_itself_is_asked_no_more() -> None:
    made = questions()
    made.ask(NAMES, [KEYS[2]])
    emitted(made)
    made.close(NAMES[3])
    made.context.now = 1.0
    made.tick(lambda name: name == NAMES[0])
    assert emitted(made) == [ev.Ask(KEYS[2], NAMES[1:3])]
    assert list(made.open) == list(NAMES[1:3])


def test_questions_and_names_stay_within_their_bounds() -> None:
    made = questions()
    numbered = [number.to_bytes(SHORT_BYTES, "big") for number in range(QUESTIONS_MAX + 10)]
    made.ask(numbered, [KEYS[2]], is_needed=True)
    sizes = [len(effect.names) for effect in emitted(made) if isinstance(effect, ev.Ask)]
    assert sizes == [NAMES_MAX] * (QUESTIONS_MAX // NAMES_MAX)
    assert list(made.open) == numbered[:QUESTIONS_MAX]
    made.ask(numbered[-1:], [KEYS[3]], is_needed=True)
    assert list(made.open) == [*numbered[1:QUESTIONS_MAX], numbered[-1]]
    assert made.limits() == {
        "questions": (QUESTIONS_MAX, QUESTIONS_MAX),
        "questions for what no proposal needs": (0, UNNEEDED_MAX),
    }


def test_what_nobody_needs_leaves_room_for_what_a_proposal_needs() -> None:
    made = questions()
    invented = [number.to_bytes(SHORT_BYTES, "big") for number in range(QUESTIONS_MAX)]
    made.ask(invented, [KEYS[2]])
    emitted(made)
    assert (list(made.open), made.unneeded) == (invented[:UNNEEDED_MAX], UNNEEDED_MAX)
    made.ask(NAMES[1:2], [KEYS[3]], is_needed=True)
    assert emitted(made) == [ev.Ask(KEYS[3], NAMES[1:2])]
    made.close(invented[0])
    made.context.now = 1.0
    made.tick(lambda name: name == invented[1])
    assert made.unneeded == UNNEEDED_MAX - 2


def test_what_a_proposal_needs_is_asked_anew_and_first_of_who_needs_it() -> None:
    made = questions()
    for liar in KEYS[2:12]:
        made.ask(NAMES[:1], [liar])
    emitted(made)
    made.ask(NAMES[:1], [KEYS[12]], is_needed=True)
    made.ask(NAMES[:1], [KEYS[12]], is_needed=True)
    assert emitted(made) == [ev.Ask(KEYS[12], NAMES[:1])]
    assert (made.open[NAMES[0]].sources[0], made.unneeded) == (KEYS[12], 0)
