"""Strangers who send messages to one node: they cost next to nothing, and a newcomer from elsewhere is heard."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from p2ptrain.core.messages import (
    CLAIM_BYTES_MAX,
    NUMBER_MAX,
    SEATS_MAX,
    SHORT_BYTES,
    Hello,
    JoinRequest,
    encode,
)
from p2ptrain.net import mailbox
from p2ptrain.net.mailbox import (
    STRANGER_A_SECOND,
    Deliver,
    Mail,
    Mailboxes,
    MessageQuery,
    frames_of,
    messages_of_strangers,
)
from p2ptrain.net.transport import FRAME_BYTES_MAX, IsAdmitted, Stream, TransportError
from tests.helpers.costs import costs
from tests.helpers.memory_network import Network
from tests.helpers.net import at, key, skipping_time
from tests.helpers.net import until as until_true
from tests.helpers.p2pd import connected, nodes_in, until

RUN = bytes(32)
NODE, MEMBER, NEWCOMER, FIRST = (key(number) for number in range(4))
PROTOCOL = f"/p2ptrain/2/{RUN.hex()}/line"
NEAR, FAR = "198.51.100.7", "203.0.113.7"
JOIN = Deliver((b"join",))


def nothing(*_: object) -> None:
    pass


def is_member(peer: bytes) -> bool:
    return peer == MEMBER


class MessageEar:
    """A node's mailboxes, and what they heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[bytes, Mail]] = []

    def of(self, node: object, is_admitted: IsAdmitted = is_member) -> Mailboxes:
        return Mailboxes(
            node, RUN, lambda *each: self.heard.append(each), malformed=nothing, history=nothing, no_history=nothing,
            is_admitted=is_admitted, strangers=messages_of_strangers(is_admitted, node.range_of),
        )  # fmt: skip


async def flood(stream: Stream, frame: bytes) -> None:
    with suppress(TransportError):
        while True:
            await stream.send(frame)
            await asyncio.sleep(0)


@pytest.mark.parametrize("size", [100, FRAME_BYTES_MAX])
def test_a_newcomer_is_heard_while_64_keys_of_another_range_flood(size: int) -> None:
    """Its first word, and then one a second; the keys fill whatever the node takes."""
    waited: list[float] = []

    @skipping_time
    async def test() -> None:
        network, ear = Network(), MessageEar()
        node = network.transport(NODE)
        now = asyncio.get_running_loop().time
        junk = b"j" * size if size > 100 else next(frames_of(Deliver((b"junk",))))
        strangers = [key(10 + number) for number in range(64)]
        network.hosts |= dict.fromkeys(strangers, NEAR) | {NEWCOMER: FAR}
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(ear.of(node))
            tasks = []
            for each in (*strangers, NEWCOMER):
                transport = network.transport(each)
                await transport.connect(node.addresses()[0])
                if each != NEWCOMER:
                    tasks.append(asyncio.create_task(flood(await transport.open(NODE, PROTOCOL), junk)))
            await at(now() + 20)
            newcomer = await stack.enter_async_context(MessageEar().of(transport))
            for number in range(1, 11):
                newcomer.post(NODE, JOIN)
                asked_at = now()
                while sum(message == JOIN for _, message in ear.heard) < number:
                    await at(now() + 0.05)
                waited.append(now() - asked_at)
                await at(asked_at + 1.0)
            for task in tasks:
                task.cancel()
        for each in list(network.nodes.values()):
            await each.close()

    test()
    print(f"64 keys that send {size} bytes at a time: a newcomer waits {max(waited):.2f} s at most")
    assert max(waited) < 0.2


@skipping_time
async def test_a_stranger_that_waits_ends_with_its_stream_and_keeps_no_slot() -> None:
    network, ear = Network(), MessageEar()
    node, stranger = network.transport(NODE), network.transport(FIRST)
    await stranger.connect(node.addresses()[0])
    async with ear.of(node):
        for _ in range(100):  # a node keeps two of one peer, and gives up the others
            await (await stranger.open(NODE, PROTOCOL)).send(next(frames_of(JOIN)))
        await until_true(lambda: len(node.tasks) <= 3)
        assert asyncio.get_running_loop().time() < 3.0  # 100 messages would take 11 s
    for each in list(network.nodes.values()):
        await each.close()


def test_whatever_an_honest_stranger_says_fits_a_frame_of_strangers() -> None:
    numbers, seats = NUMBER_MAX - 1, b"\xff" * (SEATS_MAX // 8)
    hello = Hello(RUN, numbers, numbers, seats, seats, seats, seats, False, NEWCOMER)
    join = JoinRequest(RUN, numbers, bytes(CLAIM_BYTES_MAX), NEWCOMER)
    for message in (hello, join):
        [frame] = frames_of(Deliver((encode(message, bytes(64)),) * STRANGER_A_SECOND))
        assert len(frame) < mailbox.STRANGER_FRAME_BYTES_MAX / 3
    names = tuple(number.to_bytes(SHORT_BYTES, "big") for number in range(mailbox.NAMES_MAX))
    [frame] = frames_of(MessageQuery(names))
    assert len(frame) <= mailbox.STRANGER_FRAME_BYTES_MAX


@pytest.mark.parametrize("size", [200, 16_000, FRAME_BYTES_MAX - 64])
async def test_a_stranger_who_floods_a_real_node_costs_it_little_and_a_member_is_heard(
    size: int, tmp_path: Path
) -> None:
    seconds = 3.0
    frame = mailbox.wire.encode(Deliver(tuple(os.urandom(min(size, 900_000)) for _ in range(max(1, size // 900_000)))))
    async with nodes_in(tmp_path) as make:
        nodes = await connected(make, 3)
        ear, node = MessageEar(), nodes[0]
        member, stranger = nodes[1], nodes[2]
        async with ear.of(node, lambda peer: peer == member.me) as mailboxes:
            floods = [asyncio.create_task(flood(await stranger.open(node.me, PROTOCOL), frame)) for _ in range(2)]
            said = await member.open(node.me, PROTOCOL)
            with costs() as found:
                for _ in range(int(10 * seconds)):
                    await said.send(next(frames_of(JOIN)))
                    await asyncio.wait(floods, timeout=0.1)
            await until(lambda: sum(peer == member.me for peer, _ in ear.heard) >= 10 * seconds)
            for each in floods:
                each.cancel()
    junk = sum(peer == stranger.me for peer, _ in ear.heard)
    print(f"frames of {len(frame):,} bytes for {seconds:.0f} s: {junk} heard, {mailboxes.counters}, {found}")
    assert junk <= STRANGER_A_SECOND * (seconds + 3)
    assert found.loop_seconds < 0.2 * seconds  # with both ends; before, about a third of it and more
