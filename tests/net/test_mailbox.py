"""Small messages and histories to one peer arrive, are bounded, and survive broken streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from p2ptrain.core.history import HISTORY_BYTES_MAX
from p2ptrain.net import mailbox
from p2ptrain.net.mailbox import (
    Deliver,
    HistoryBegins,
    HistoryPart,
    HistoryQuery,
    Mail,
    Mailboxes,
    MessageQuery,
    messages_of_strangers,
)
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import FRAME_BYTES_MAX, IsAdmitted, Stream, TransportError, everyone
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import at, key, skipping_time, some_bytes, until

A, B, C = (key(number) for number in range(3))
RUN = bytes(32)
PROTOCOL = f"/p2ptrain/2/{RUN.hex()}/line"
NAME = bytes(16)


class Ear:
    """Records the messages and histories that a node receives."""

    def __init__(self) -> None:
        self.heard: list[tuple[bytes, Mail]] = []
        self.wrong: list[tuple[bytes, str]] = []
        self.histories: list[tuple[bytes, bytes]] = []
        self.none: list[tuple[bytes, str]] = []

    def mailboxes(
        self,
        transport: MemoryTransport,
        upload: TokenBucket | None = None,
        download: TokenBucket | None = None,
        is_admitted: IsAdmitted = everyone,
    ) -> Mailboxes:
        return Mailboxes(
            transport,
            RUN,
            lambda *each: self.heard.append(each),
            malformed=lambda *each: self.wrong.append(each),
            history=lambda *each: self.histories.append(each),
            no_history=lambda *each: self.none.append(each),
            upload=upload,
            download=download,
            is_admitted=is_admitted,
            strangers=messages_of_strangers(is_admitted, transport.range_of),
        )


@asynccontextmanager
async def pair(network: Network) -> AsyncIterator[tuple[Mailboxes, Mailboxes, Ear, Ear]]:
    a, b = network.transport(A), network.transport(B)
    await a.connect(b.addresses()[0])
    ear_a, ear_b = Ear(), Ear()
    async with ear_a.mailboxes(a) as mailboxes_a, ear_b.mailboxes(b) as mailboxes_b:
        yield mailboxes_a, mailboxes_b, ear_a, ear_b
    for node in list(network.nodes.values()):
        await node.close()


def is_past(moment: float) -> bool:
    return asyncio.get_running_loop().time() > moment


def encode(frame: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(frame)


@skipping_time
async def test_messages_arrive_in_order_over_one_stream() -> None:
    network = Network(latency_seconds=0.002)
    async with pair(network) as (mailboxes, _, _, ear):
        said: list[Mail] = [
            Deliver((b"one", b"two")),
            MessageQuery((NAME, bytes(range(16)))),
            HistoryQuery(bytes(32), 7),
        ]
        for message in said * 20:
            assert mailboxes.post(B, message)
        await until(lambda: len(ear.heard) == 60)
        assert ear.heard == [(A, message) for message in said * 20]
        assert (mailboxes.counters, mailboxes.queued_frames) == ({"sent": 60}, 0)
        assert len(network.nodes[A].streams) == 1


@skipping_time
async def test_envelopes_that_fill_more_than_a_frame_go_in_several() -> None:
    async with pair(Network()) as (mailboxes, _, _, ear):
        envelopes = tuple(some_bytes(size, size) for size in (1_000_000, 999_999, 1_000_000, 7, 97_000, 97_200, 1))
        assert mailboxes.post(B, Deliver(envelopes))
        await until(lambda: sum(len(each.envelopes) for _, each in ear.heard if isinstance(each, Deliver)) == 7)
        assert tuple(e for _, each in ear.heard if isinstance(each, Deliver) for e in each.envelopes) == envelopes
        assert 2 <= len(ear.heard) <= 3
        many = Deliver(tuple(bytes([n % 256]) for n in range(mailbox.ENVELOPES_MAX + 1)))
        assert [len(mailbox.decode_frame(frame).envelopes) for frame in mailbox.frames_of(many)] == [
            mailbox.ENVELOPES_MAX,
            1,
        ]  # type: ignore[union-attr]


@skipping_time
async def test_many_envelopes_of_one_frame_are_handed_on_a_few_at_a_time_and_others_are_heard_between() -> None:
    network = Network()
    async with pair(network) as (mailboxes, _, _, ear):
        c = network.transport(C)
        await c.connect(network.address(B))
        async with Ear().mailboxes(c) as other:
            many = tuple(bytes([number]) for number in range(1, mailbox.ENVELOPES_MAX + 1))
            for sender in (mailboxes, other):
                assert sender.post(B, Deliver(many))
            await until(lambda: len(ear.heard) == 2 * mailbox.ENVELOPES_MAX // mailbox.ENVELOPES_AT_ONCE)
        said: dict[bytes, list[bytes]] = {A: [], C: []}
        for peer, each in ear.heard:
            assert isinstance(each, Deliver) and len(each.envelopes) <= mailbox.ENVELOPES_AT_ONCE
            said[peer] += each.envelopes
        assert said == {A: [*many], C: [*many]}
        senders = [peer for peer, _ in ear.heard]
        assert senders != sorted(senders) and senders != sorted(senders, reverse=True)


@pytest.mark.parametrize("sizes", [[1_000_000, 1_000_000, 97_000], [2_047] * 1_024, [1] * 1_024, [1_000_000] * 5])
def test_no_frame_is_longer_than_a_frame_may_be(sizes: list[int]) -> None:
    frames = list(mailbox.frames_of(Deliver(tuple(map(bytes, sizes)))))
    assert max(map(len, frames)) <= FRAME_BYTES_MAX
    assert len(encode(HistoryPart(bytes(mailbox.PART_BYTES)))) <= FRAME_BYTES_MAX


@skipping_time
async def test_what_does_not_fit_the_queue_is_dropped_and_counted() -> None:
    network = Network()
    async with pair(network) as (mailboxes, _, _, ear):
        assert all(mailboxes.post(B, MessageQuery((NAME,))) for _ in range(mailbox.QUEUED_MAX))
        assert not any(mailboxes.post(B, MessageQuery((NAME,))) for _ in range(2))
        assert (mailboxes.counters, mailboxes.queued_frames) == ({"dropped": 2}, mailbox.QUEUED_MAX)
        await until(lambda: len(ear.heard) == mailbox.QUEUED_MAX)
        big = Deliver((bytes(1_000_000),))
        taken = [mailboxes.post(B, big) for _ in range(20)]
        assert taken == [True] * 16 + [False] * 4
        assert mailboxes.counters["dropped"] == 6
        await until(lambda: len(ear.heard) == mailbox.QUEUED_MAX + 16)


@skipping_time
async def test_a_stream_that_breaks_is_opened_again_and_nothing_that_waits_is_lost() -> None:
    network = Network()
    async with pair(network) as (mailboxes, _, _, ear):
        mailboxes.post(B, MessageQuery((NAME,)))
        await until(lambda: len(ear.heard) == 1)
        network.cut(A, B)
        mailboxes.post(B, Deliver((b"later",)))
        await until(lambda: mailboxes.counters.get("broken", 0) >= 2)
        network.heal()
        await network.nodes[A].connect(network.address(B))
        await until(lambda: len(ear.heard) == 2)
        assert ear.heard[1] == (A, Deliver((b"later",)))


@skipping_time
async def test_what_waits_for_a_peer_that_does_not_come_back_is_dropped_after_a_while() -> None:
    network = Network()
    async with pair(network) as (mailboxes, _, _, _ear):
        network.kill(B)
        mailboxes.post(B, Deliver((b"lost",)))
        await until(lambda: mailboxes.queued_frames == 0)
        assert mailboxes.counters == {"broken": mailbox.TRIES_MAX, "dropped": 1}
        assert mailboxes.outgoing == {}


@skipping_time
async def test_a_stream_with_nothing_to_say_is_closed() -> None:
    network = Network()
    async with pair(network) as (mailboxes, other, _, ear):
        mailboxes.post(B, MessageQuery((NAME,)))
        await until(lambda: len(ear.heard) == 1)
        assert (len(mailboxes.outgoing), len(other.incoming)) == (1, 1)
        start = asyncio.get_running_loop().time()
        await until(lambda: not mailboxes.outgoing and not other.incoming)
        assert asyncio.get_running_loop().time() - start == pytest.approx(mailbox.IDLE_SECONDS, abs=1)
        mailboxes.post(B, MessageQuery((NAME,)))
        await until(lambda: len(ear.heard) == 2)
        assert ear.wrong == []


@skipping_time
async def test_of_more_than_two_streams_of_a_peer_the_newest_stay() -> None:
    network = Network()
    async with pair(network) as (_, other, _, ear):
        streams = [await network.nodes[A].open(B, PROTOCOL) for _ in range(6)]
        for stream in streams[:4]:
            with pytest.raises(TransportError):
                await stream.receive(1)
        assert [each.peer for each in other.incoming] == [A, A]
        for stream in streams[4:]:
            await stream.send(encode(MessageQuery((NAME,))))
        await until(lambda: len(ear.heard) == 2)


@skipping_time
async def test_a_peer_that_nobody_has_room_for_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PEERS_MAX", 1)
    network = Network()
    async with pair(network) as (mailboxes, other, _, ear):
        mailboxes.post(B, MessageQuery((NAME,)))
        assert not mailboxes.post(C, MessageQuery((NAME,)))
        await until(lambda: len(ear.heard) == 1)
        c = network.transport(C)
        await c.connect(network.address(B))
        stream = await c.open(B, PROTOCOL)
        with pytest.raises(TransportError):
            await stream.receive(1)
        assert [each.peer for each in other.incoming] == [A]


MALFORMED = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "an unknown kind": msgspec.msgpack.encode(["gossip", 1]),
    "no envelopes": msgspec.msgpack.encode(["deliver", []]),
    "an empty envelope": msgspec.msgpack.encode(["deliver", [b""]]),
    "too long an envelope": msgspec.msgpack.encode(["deliver", [bytes(1_000_001)]]),
    "a short name": msgspec.msgpack.encode(["ask", [bytes(15)]]),
    "too many names": msgspec.msgpack.encode(["ask", [NAME] * 1_025]),
    "a field too many": msgspec.msgpack.encode(["ask", [NAME], 1]),
    "bytes after it": msgspec.msgpack.encode(["ask", [NAME]]) + b"\0",
    "a round below zero": msgspec.msgpack.encode(["ask history", bytes(32), -1]),
    "an integer in nine bytes": msgspec.msgpack.encode(["ask history", bytes(32), 7])[:-1] + b"\xcf" + (7).to_bytes(8),
    "an empty history": msgspec.msgpack.encode(["history", 0]),
    "too long a history": msgspec.msgpack.encode(["history", HISTORY_BYTES_MAX + 1]),
    "a part without a history": encode(HistoryPart(b"x")),
    "deep nesting": b"\x91" * 100_000,
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_is_reported_and_its_stream_ends(frame: bytes) -> None:
    @skipping_time
    async def test() -> None:
        network = Network()
        async with pair(network) as (_, _, _, ear):
            stream = await network.nodes[A].open(B, PROTOCOL)
            await stream.send(frame)
            with pytest.raises(TransportError):
                await stream.receive(1)
            assert [peer for peer, _ in ear.wrong] == [A]
            assert ear.heard == []

    test()


# ---------------------------------------------------------------------------------------------------
# Histories


async def asked(ear: Ear) -> None:
    await until(lambda: any(isinstance(message, HistoryQuery) for _, message in ear.heard))


@skipping_time
async def test_a_long_history_arrives_whole_and_a_vote_does_not_wait_for_it() -> None:
    async with pair(Network(latency_seconds=0.002)) as (mailboxes, other, ear_a, ear_b):
        mailboxes.ask_history(B, bytes(32), 3)
        await asked(ear_b)
        assert ear_b.heard == [(A, HistoryQuery(bytes(32), 3))]
        history = some_bytes(20 * 2**20 + 17)
        assert other.tell_history(A, history)
        assert not other.tell_history(A, history)  # one history at a time
        other.post(A, Deliver((b"before",)))
        await until(lambda: other.outgoing[A].history_sent > 2**22)
        other.post(A, Deliver((b"between",)))
        await until(lambda: len(ear_a.heard) == 2)
        assert ear_a.histories == []
        await until(lambda: bool(ear_a.histories))
        assert ear_a.histories == [(B, history)]
        assert (ear_a.none, ear_a.wrong) == ([], [])
        mailboxes.ask_history(B, bytes(32), 4)
        await until(lambda: len(ear_b.heard) == 2)
        other.tell_history(A, b"short")
        await until(lambda: len(ear_a.histories) == 2)
        assert ear_a.histories[1] == (B, b"short")


@skipping_time
async def test_a_task_that_cannot_be_started_leaves_no_queue_and_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by injection: a node was mute to a peer for good."""
    async with pair(Network()) as (mailboxes, _, _, ear):

        def broken(*_: object) -> None:
            raise IndexError

        with monkeypatch.context() as patch:
            patch.setattr(mailboxes, "_start", broken)
            with pytest.raises(IndexError):
                mailboxes.post(B, Deliver((b"lost",)))
            with pytest.raises(IndexError):
                mailboxes.ask_history(B, bytes(32), 3)
        assert mailboxes.post(B, Deliver((b"heard",)))
        mailboxes.ask_history(B, bytes(32), 3)
        await until(lambda: len(ear.heard) == 2)


@skipping_time
async def test_a_question_that_cannot_be_sent_ends_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or no other would ever be put to that peer."""
    async with pair(Network()) as (mailboxes, _, ear, _):

        def broken(*_: object) -> bool:
            raise IndexError

        with monkeypatch.context() as patch, pytest.raises(IndexError):
            patch.setattr(mailboxes, "post", broken)
            mailboxes.ask_history(B, bytes(32), 3)
        await until(lambda: bool(ear.none))
        mailboxes.ask_history(B, bytes(32), 3)
        await until(lambda: len(ear.none) == 2)


@skipping_time
async def test_a_question_without_an_answer_ends_after_eight_seconds() -> None:
    async with pair(Network()) as (mailboxes, _, ear, other_ear):
        mailboxes.ask_history(B, bytes(32), 3)
        mailboxes.ask_history(B, bytes(32), 3)
        start = asyncio.get_running_loop().time()
        await until(lambda: bool(ear.none))
        assert asyncio.get_running_loop().time() - start == pytest.approx(mailbox.QUESTION_SECONDS, abs=0.1)
        assert ear.none == [(B, "no answer at all")]
        assert len(other_ear.heard) == 1


@skipping_time
async def test_an_answer_that_nobody_asked_for_or_that_is_late_ends_with_its_stream() -> None:
    async with pair(Network()) as (mailboxes, other, ear, _):
        other.tell_history(A, some_bytes(2**20))
        other.post(A, Deliver((b"x",)))
        await until(lambda: mailboxes.counters.get("unasked", 0) == 1)
        other.post(A, Deliver((b"y",)))
        await until(lambda: len(ear.heard) == 2)  # on another stream
        assert (ear.histories, ear.wrong, ear.none) == ([], [], [])
        assert mailboxes.history_bytes["received"] < mailbox.PART_BYTES


@skipping_time
async def test_what_a_history_takes_of_the_limits_other_things_wait_for() -> None:
    network, limits = Network(), (TokenBucket(2**20), TokenBucket(2**20))
    a, b = network.transport(A), network.transport(B)
    await a.connect(b.addresses()[0])
    ear_a, ear_b = Ear(), Ear()
    async with ear_a.mailboxes(a, download=limits[0]) as mailboxes, ear_b.mailboxes(b, upload=limits[1]) as other:
        mailboxes.ask_history(B, bytes(32), 3)
        await until(lambda: bool(ear_b.heard))
        other.tell_history(A, some_bytes(8 * 2**20))
        await until(lambda: bool(ear_a.histories))
        began = asyncio.get_running_loop().time()
        assert began < 2.0, "it did not wait itself"
        for limit in limits:
            assert limit.take_now(2**20)  # refilled meanwhile
        await asyncio.gather(*(limit.take(2**20) for limit in limits))
        assert asyncio.get_running_loop().time() - began == pytest.approx(2.0, rel=0.05)  # at half the rate
    for node in (a, b):
        await node.close()


@skipping_time
async def test_a_history_that_stops_coming_is_given_up_with_its_stream() -> None:
    network = Network()
    async with pair(network) as (mailboxes, _, ear, _):
        mailboxes.ask_history(B, bytes(32), 3)
        stream = await network.nodes[B].open(A, PROTOCOL)
        await stream.send(encode(HistoryBegins(2 * mailbox.PART_BYTES)))
        await stream.send(encode(HistoryPart(bytes(mailbox.PART_BYTES))))
        await until(lambda: bool(ear.none))
        assert ear.none == [(B, "no answer after 524288 of 1048576 bytes")]
        with pytest.raises(TransportError):
            await stream.receive(1)
        assert (ear.histories, ear.wrong, mailboxes.incoming) == ([], [], [])


@skipping_time
async def test_a_history_that_dribbles_is_given_up_after_a_minute() -> None:
    network = Network()
    async with pair(network) as (mailboxes, _, ear, _):
        mailboxes.ask_history(B, bytes(32), 3)
        stream = await network.nodes[B].open(A, PROTOCOL)
        start = asyncio.get_running_loop().time()
        await stream.send(encode(HistoryBegins(100 * mailbox.PART_BYTES)))
        for number in range(9):
            await until(partial(is_past, start + 7 * number))
            await stream.send(encode(HistoryPart(bytes(mailbox.PART_BYTES))))
        await until(lambda: bool(ear.none))
        assert asyncio.get_running_loop().time() - start == pytest.approx(mailbox.ANSWER_SECONDS, abs=0.1)


@skipping_time
async def test_the_rest_of_a_history_does_not_follow_on_another_stream() -> None:
    network = Network(latency_seconds=0.002)
    async with pair(network) as (mailboxes, other, ear_a, ear_b):
        mailboxes.ask_history(B, bytes(32), 3)
        await asked(ear_b)
        other.tell_history(A, some_bytes(20 * 2**20))
        await until(lambda: other.outgoing[A].history_sent > 2**22)
        mailboxes.incoming[0].abort()
        await until(lambda: bool(ear_a.none))
        other.post(A, Deliver((b"after",)))
        await until(lambda: bool(ear_a.heard))
        assert (ear_a.histories, ear_a.wrong, ear_a.heard) == ([], [], [(B, Deliver((b"after",)))])


@skipping_time
async def test_a_history_that_breaks_off_is_no_history() -> None:
    network = Network()
    async with pair(network) as (mailboxes, _, ear, _):
        mailboxes.ask_history(B, bytes(32), 3)
        stream = await network.nodes[B].open(A, PROTOCOL)
        await stream.send(encode(HistoryBegins(10)))
        await until(lambda: mailboxes._questions[B].stream is not None)
        stream.abort()
        start = asyncio.get_running_loop().time()
        await until(lambda: bool(ear.none))
        assert asyncio.get_running_loop().time() - start < 1


def frames_that_lie(parts: list[int], size: int) -> list[bytes]:
    return [encode(HistoryBegins(size)), *(encode(HistoryPart(bytes(part))) for part in parts)]


@pytest.mark.parametrize(
    "frames",
    [
        frames_that_lie([5], 10),
        frames_that_lie([11], 10),
        frames_that_lie([mailbox.PART_BYTES, mailbox.PART_BYTES - 1], 3 * mailbox.PART_BYTES),
        frames_that_lie([mailbox.PART_BYTES], 2 * mailbox.PART_BYTES) + frames_that_lie([], 1),
    ],
)
def test_a_history_of_wrong_parts_is_malformed(frames: list[bytes]) -> None:
    @skipping_time
    async def test() -> None:
        network = Network()
        async with pair(network) as (mailboxes, _, ear, _):
            mailboxes.ask_history(B, bytes(32), 3)
            stream: Stream = await network.nodes[B].open(A, PROTOCOL)
            for frame in frames:
                await stream.send(frame)
            await until(lambda: bool(ear.none))
            assert [peer for peer, _ in ear.wrong] == [B]
            assert ear.histories == []

    test()


@skipping_time
async def test_only_so_many_histories_are_asked_for_at_once() -> None:
    network = Network()
    async with pair(network) as (mailboxes, _, ear, _):
        for number in range(mailbox.QUESTIONS_MAX + 1):
            mailboxes.ask_history(key(100 + number), bytes(32), 3)
        await until(lambda: len(ear.none) == 1)
        assert ear.none == [(key(100 + mailbox.QUESTIONS_MAX), "too many requests are open already")]


@skipping_time
async def test_what_waits_for_a_peer_is_forgotten_with_it() -> None:
    network = Network()
    async with pair(network) as (mailboxes, _, _, ear):
        mailboxes.post(B, Deliver((b"one",)))
        mailboxes.forget(B)
        mailboxes.post(B, Deliver((b"two",)))
        await until(lambda: bool(ear.heard))
        assert ear.heard == [(A, Deliver((b"two",)))]
        mailboxes.forget(C)


@skipping_time
async def test_an_idle_stream_of_a_stranger_is_closed_early_and_what_it_sends_later_arrives() -> None:
    network, ear = Network(), Ear()
    a, b, c = (network.transport(each) for each in (A, B, C))
    for each in (b, c):
        await each.connect(a.addresses()[0])
    is_member = lambda peer: peer == B  # noqa: E731
    mine = ear.mailboxes(a, is_admitted=is_member)
    async with mine as mailboxes, Ear().mailboxes(b) as member, Ear().mailboxes(c) as stranger:
        for each in (member, stranger):
            each.post(A, MessageQuery((NAME,)))
        await at(mailbox.STRANGER_IDLE_SECONDS - 1)
        assert {each.peer for each in mailboxes.incoming} == {B, C}
        await at(mailbox.STRANGER_IDLE_SECONDS + 1)
        assert {each.peer for each in mailboxes.incoming} == {B}
        stranger.post(A, MessageQuery((NAME,)))
        await until(lambda: len(ear.heard) == 3)
        assert ear.heard[-1] == (C, MessageQuery((NAME,)))
    for node in list(network.nodes.values()):
        await node.close()
