"""Strangers who use what a mailbox does for them: a question, a queue, a history. Others have theirs all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from p2ptrain.core.wire import encode
from p2ptrain.net.mailbox import (
    HISTORY_BYTES_LEAST,
    PART_BYTES,
    QUESTION_SECONDS,
    QUEUED_BYTES_MAX,
    QUEUED_TOTAL_BYTES_MAX,
    STRANGER_A_SECOND,
    STRANGER_QUEUED_BYTES_MAX,
    Deliver,
    HistoryBegins,
    HistoryPart,
    Mail,
    Mailboxes,
    MessageQuery,
    frames_of,
    messages_of_strangers,
)
from p2ptrain.net.transport import Stream, TransportError
from tests.helpers import memory_network
from tests.helpers.memory_network import Network
from tests.helpers.net import at, key, skipping_time, until

RUN = bytes(32)
NODE, MEMBER, NEWCOMER, BAD = (key(number) for number in range(4))
PROTOCOL = f"/p2ptrain/2/{RUN.hex()}/line"
JOIN = Deliver((b"join",))


def nothing(*_: object) -> None:
    pass


def is_member(peer: bytes) -> bool:
    return peer == MEMBER


def now() -> float:
    return asyncio.get_running_loop().time()


class HistoryEar:
    """What a node's mailboxes heard, and whose histories came or did not."""

    def __init__(self) -> None:
        self.heard: list[tuple[bytes, Mail]] = []
        self.histories: list[tuple[bytes, bytes]] = []
        self.none: list[tuple[bytes, str]] = []

    def of(self, node: object) -> Mailboxes:
        return Mailboxes(
            node, RUN, lambda *each: self.heard.append(each), malformed=nothing,
            history=lambda *each: self.histories.append(each), no_history=lambda *each: self.none.append(each),
            is_admitted=is_member, strangers=messages_of_strangers(is_member, node.range_of),
        )  # fmt: skip


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Network, Mailboxes, HistoryEar]]:
    """Yields the mailboxes of a node that others are connected to, the newcomer from another range than the rest."""
    network, ear = Network(), HistoryEar()
    network.hosts |= {NEWCOMER: "203.0.113.7"}
    node = network.transport(NODE)
    async with ear.of(node) as mailboxes:
        for each in (MEMBER, NEWCOMER, BAD):
            await network.transport(each).connect(node.addresses()[0])
        yield network, mailboxes, ear
    for each in list(network.nodes.values()):
        await each.close()


async def flood(stream: Stream, frame: bytes, end: float) -> None:
    with suppress(TransportError):
        while now() < end:
            await stream.send(frame)
            await asyncio.sleep(0)


# ---------------------------------------------------------------------------------------------------
# Who is asked for a history


@pytest.mark.parametrize("size", [1, 1_500_000])
@pytest.mark.parametrize("wait", [0.0, QUESTION_SECONDS + 1.0])
def test_a_stranger_that_is_asked_for_a_history_says_no_more_than_others_and_keeps_out_nobody(
    wait: float, size: int
) -> None:
    """It says that it is ahead, is asked, begins to answer, and sends something else instead: while the question is
    open, and when it has been given up."""

    @skipping_time
    async def test() -> None:
        junk = next(frames_of(Deliver((b"j" * size if size == 1 else bytes(900_000),))))
        async with listening() as (network, mailboxes, ear):
            mailboxes.ask_history(BAD, bytes(32), 1)
            stream = await network.nodes[BAD].open(NODE, PROTOCOL)
            await stream.send(encode(HistoryBegins(2 * PART_BYTES)))
            await stream.send(encode(HistoryPart(bytes(PART_BYTES))))
            await at(now() + wait)
            began = now()
            floods = [asyncio.create_task(flood(stream, junk, began + 5.0))]
            floods.append(asyncio.create_task(flood(await network.nodes[BAD].open(NODE, PROTOCOL), junk, began + 5.0)))
            await at(began + 4.0)
            async with HistoryEar().of(network.nodes[NEWCOMER]) as newcomer:
                newcomer.post(NODE, JOIN)
                await until(lambda: (NEWCOMER, JOIN) in ear.heard)
            assert now() - began < 5.0
            assert sum(peer == BAD for peer, _ in ear.heard) <= STRANGER_A_SECOND * 5 + 2
            for each in floods:
                each.cancel()

    test()


@skipping_time
async def test_the_stream_of_a_stranger_whose_history_stops_coming_ends_with_the_question() -> None:
    async with listening() as (network, mailboxes, ear):
        mailboxes.ask_history(BAD, bytes(32), 1)
        stream = await network.nodes[BAD].open(NODE, PROTOCOL)
        await stream.send(encode(HistoryBegins(2 * PART_BYTES)))
        await stream.send(encode(HistoryPart(bytes(PART_BYTES))))
        with pytest.raises(TransportError):
            await stream.receive(1)
        assert ear.none == [(BAD, f"no answer after {PART_BYTES} of {2 * PART_BYTES} bytes")]
        assert mailboxes.incoming == []


@skipping_time
async def test_what_a_stranger_says_between_the_parts_of_its_history_is_heard() -> None:
    async with listening() as (network, mailboxes, ear):
        mailboxes.ask_history(NEWCOMER, bytes(32), 1)
        stream = await network.nodes[NEWCOMER].open(NODE, PROTOCOL)
        said = MessageQuery((bytes(16),))
        for frame in (
            HistoryBegins(2 * PART_BYTES),
            HistoryPart(bytes(PART_BYTES)),
            said,
            HistoryPart(bytes(PART_BYTES)),
        ):
            await stream.send(encode(frame))
        await until(lambda: bool(ear.histories))
        assert (ear.heard, ear.none) == ([(NEWCOMER, said)], [])
        assert ear.histories == [(NEWCOMER, bytes(2 * PART_BYTES))]


# ---------------------------------------------------------------------------------------------------
# Who does not read


@pytest.mark.parametrize("keys", [1, 200])
def test_strangers_who_read_nothing_take_no_room_from_members(keys: int) -> None:
    answer = Deliver((bytes(2**19),) * 2)

    @skipping_time
    async def test() -> None:
        async with listening() as (_, mailboxes, _):
            strangers = [key(10 + number) for number in range(keys)]
            for _ in range(32):
                for each in strangers:
                    mailboxes.post(each, answer)
            queued = sum(each.size for each in mailboxes.outgoing.values())
            assert queued <= min(keys * STRANGER_QUEUED_BYTES_MAX, QUEUED_TOTAL_BYTES_MAX // 4)
            assert queued >= 2**20
            for _ in range(QUEUED_BYTES_MAX // 2**20 - 1):
                assert mailboxes.post(MEMBER, answer)

    test()


def test_a_history_that_nobody_reads_takes_none_from_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_network.Pipe, "is_full", lambda pipe, size: size > 1_000)

    @skipping_time
    async def test() -> None:
        async with listening() as (_, mailboxes, _):
            assert mailboxes.tell_history(BAD, bytes(2**23))
            assert not mailboxes.tell_history(BAD, bytes(2**23))
            await at(1.0)
            assert mailboxes._history_limits.seconds_until(NEWCOMER, HISTORY_BYTES_LEAST) == 0.0

    test()
