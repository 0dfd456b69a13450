"""A node's own messages: by stream to all who are connected, by gossip to the others; and a flooded topic is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2ptrain.core import events as ev
from p2ptrain.net.connections import topic_of
from p2ptrain.net.mailbox import Deliver
from p2ptrain.net.transport import STRANGERS
from p2ptrain.node.edges import (
    CALM_SECONDS,
    FLOOD_A_SECOND,
    LOOK_SECONDS,
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    USED_SECONDS,
    Topic,
)
from tests.helpers.core import KEYS
from tests.helpers.driver import DriverBench, bench, doing
from tests.helpers.net import at, skipping_time, until

ME, PEER, OTHER, THIRD, FAR = KEYS[:5]


def link(each: DriverBench, *peers: bytes) -> None:
    each.edges.connections.linked.update(dict.fromkeys(peers))


def posts(data: bytes, *peers: bytes) -> list[tuple[Any, ...]]:
    return [("post", peer, Deliver((data,))) for peer in peers]


@skipping_time
async def test_our_messages_go_once_to_each_admitted_peer_and_not_into_the_topic(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        link(each, PEER, FAR, OTHER, THIRD)
        assert each.edges.tell(b"vote")
    assert each.done == posts(b"vote", PEER, OTHER, THIRD)


@skipping_time
async def test_our_messages_are_gossiped_as_well_while_an_admitted_peer_is_out_of_reach(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        link(each, PEER, OTHER)
        doing(each, ev.Publish(b"vote"))
        async with each.running():
            await until(lambda: len(each.done) == 3)
    assert each.done == [*posts(b"vote", PEER, OTHER), ("publish", b"vote")]


@skipping_time
async def test_what_waits_for_connected_peers_at_the_end_goes_out_first(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        link(each, PEER, OTHER, THIRD)
        each.edges.mailboxes.queued_frames = 3  # type: ignore[misc]
        async with each.running() as life:
            doing(each, ev.Publish(b"leave"), ev.Stop("left"))
            await at(0.5)
            assert not life.done()
            each.edges.mailboxes.queued_frames = 0  # type: ignore[misc]
            await until(life.done)
    assert asyncio.get_running_loop().time() < 1.0


@skipping_time
async def test_nobody_gossips_for_a_member_that_no_one_has_heard_for_two_rounds(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        link(each, PEER, OTHER)
        for absent, reaches in ((1, False), (2, True)):
            admitted = tuple(
                msgspec.structs.replace(entry, absent=absent) if entry.key == THIRD else entry
                for entry in each.genesis.admitted
            )
            each.node.seen.state = msgspec.structs.replace(each.genesis, admitted=admitted)
            assert each.edges.tell(b"vote") is reaches


@skipping_time
async def test_a_message_that_finds_no_room_in_a_mailbox_is_gossiped(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        link(each, PEER, OTHER, THIRD)
        each.edges.mailboxes.full.add(PEER)  # type: ignore[attr-defined]
        assert not each.edges.tell(b"vote")
    assert each.done == posts(b"vote", OTHER, THIRD)


# ---------------------------------------------------------------------------------------------------
# Floods


@asynccontextmanager
async def in_topic(each: DriverBench) -> AsyncIterator[None]:
    await each.transport.subscribe(topic_of(each.edges.run_id), each.driver.intake.hear)
    each.node.seen.has_started = True
    watching = asyncio.create_task(Topic(each.edges).watch())
    await at(LOOK_SECONDS / 2)
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def flood(each: DriverBench, seconds: float) -> float:
    """Floods the topic, as long as the node is in it, and returns the seconds in which it was."""
    begins, passed, step = asyncio.get_running_loop().time(), 0.0, 0.25
    while (now := asyncio.get_running_loop().time()) < begins + seconds:
        if not each.transport.left:
            each.transport.counted[STRANGERS] += int(1_000 * step)
            passed += step
        await at(now + step)
    return passed


@skipping_time
async def test_a_flooded_topic_is_left_and_looked_at_again_ever_more_rarely_until_the_flood_is_over(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as each, in_topic(each):
        link(each, PEER, OTHER, THIRD)
        inside = [await flood(each, 600.0) for _ in range(4)]
        assert 3 * LOOK_SECONDS < inside[0] < 10 * LOOK_SECONDS
        assert all(seconds < 5 * LOOK_SECONDS for seconds in inside[1:])
        await at(2_400.0 + 1.5 * PAUSE_SECONDS_MAX + 2 * LOOK_SECONDS)
        assert not each.transport.left
        await at(asyncio.get_running_loop().time() + CALM_SECONDS)
        await flood(each, 3 * LOOK_SECONDS)
        assert each.transport.left
        await at(asyncio.get_running_loop().time() + 1.5 * PAUSE_SECONDS + LOOK_SECONDS)
        assert not each.transport.left  # the next flood begins with a short pause


@skipping_time
async def test_a_node_that_is_out_of_a_flooded_topic_leaves_it_as_any_other(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        async with in_topic(each):
            link(each, PEER, OTHER, THIRD)
            await flood(each, 3 * LOOK_SECONDS)
            assert each.transport.left
        each.transport.leave(topic_of(each.edges.run_id))


@skipping_time
async def test_a_flooded_topic_is_not_left_while_a_member_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as each, in_topic(each):
        link(each, PEER, OTHER)
        with monkeypatch.context() as patch:
            patch.setattr(each.transport, "leave", lambda topic: pytest.fail("left, for a moment"))
            assert await flood(each, 100.0) == 100.0
        link(each, THIRD)
        await flood(each, 3 * LOOK_SECONDS)
        assert each.transport.left
        del each.edges.connections.linked[OTHER]
        await flood(each, 2 * LOOK_SECONDS)
        assert not each.transport.left


@skipping_time
async def test_a_flooded_topic_is_not_left_while_members_gossip(tmp_path: Path) -> None:
    """They are not connected to everyone, and may need us to pass on what they say."""
    async with bench(tmp_path) as each, in_topic(each):
        link(each, PEER, OTHER, THIRD)
        for _ in range(4):
            each.transport.counted["gossip received"] += 1
            assert await flood(each, USED_SECONDS - LOOK_SECONDS) == USED_SECONDS - LOOK_SECONDS
        await flood(each, 3 * LOOK_SECONDS)
        assert each.transport.left


@skipping_time
async def test_a_topic_with_a_little_junk_is_not_left(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, in_topic(each):
        link(each, PEER, OTHER, THIRD)
        for second in range(60):
            each.transport.counted[STRANGERS] += FLOOD_A_SECOND - 1
            await at(second + 1.0)
        assert not each.transport.left
