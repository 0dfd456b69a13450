"""Strangers who open streams: they keep out neither members nor those who come from elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2ptrain.net.libp2p import streams
from p2ptrain.net.libp2p.streams import STREAMS_MAX, FrameStream
from tests.helpers.costs import costs
from tests.helpers.net import key
from tests.helpers.p2pd import SECONDS, connected, echo, nodes_in
from tests.helpers.streams import Incoming, listening

MEMBER, FAR, FIRST = 1, 2, 3  # the numbers of keys; strangers have those from the last one on
NEAR_RANGE, FAR_RANGE = "198.51.0.0/16", "203.0.0.0/16"


async def taken(incoming: Incoming, keys: int) -> list[FrameStream]:
    """Has this many strangers of one range take all slots."""
    incoming.streams.prefer(lambda peer: peer == key(MEMBER))
    incoming.ranges |= {key(FIRST + number): NEAR_RANGE for number in range(keys)}
    held = [await incoming.open(FIRST + number % keys) for number in range(STREAMS_MAX)]
    assert all(await asyncio.gather(*(incoming.is_answered(each) for each in held)))
    return held


@pytest.mark.parametrize("keys", [128, 250])
async def test_a_member_has_its_streams_however_many_strangers_hold_some(keys: int, tmp_path: Path) -> None:
    async with listening(tmp_path) as incoming:
        await taken(incoming, keys)
        mine = [await incoming.open(MEMBER) for _ in range(8)]
        assert [await incoming.is_answered(each) for each in mine] == [True] * 8
        for _ in range(64):
            assert not await incoming.is_answered(await incoming.open(FIRST + keys - 1))
        assert [await incoming.is_answered(each) for each in mine] == [True] * 8


async def test_a_stranger_from_elsewhere_has_its_streams_whoever_holds_all(tmp_path: Path) -> None:
    async with listening(tmp_path) as incoming:
        await taken(incoming, 250)
        incoming.ranges[key(FAR)] = FAR_RANGE
        mine = [await incoming.open(FAR) for _ in range(4)]
        assert [await incoming.is_answered(each) for each in mine] == [True] * 4
        for number in range(64):
            await incoming.is_answered(await incoming.open(FIRST + number))
        assert [await incoming.is_answered(each) for each in mine] == [True] * 4


async def test_a_stream_that_is_refused_costs_little(tmp_path: Path) -> None:
    async with listening(tmp_path) as incoming:
        await taken(incoming, 250)
        with costs() as cost:
            for number in range(200):
                assert not await incoming.is_answered(await incoming.open(FIRST + number))
        print(f"200 streams opened and refused, with both ends: {cost}")
        assert cost.loop_seconds / 200 < 0.003  # with the cost of opening it, about half


async def test_a_member_has_its_streams_from_a_real_p2pd_that_a_stranger_has_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STREAMS_MAX", 8)
    async with nodes_in(tmp_path) as make:
        node, member, stranger = await connected(make, 3)
        await node.serve("/echo/1", echo)
        node.prefer(lambda peer: peer == member.me)
        held = [await stranger.open(node.me, "/echo/1") for _ in range(8)]
        for each in held:
            await each.send(b"?")
            assert await each.receive(10) == b"?"
        await node.peers()
        assert node.range_of(stranger.me) == "127.0.0.0/16"
        for _ in range(6):
            mine = await member.open(node.me, "/echo/1")
            await mine.send(b"?")
            assert await asyncio.wait_for(mine.receive(10), SECONDS) == b"?"
        assert node.counters()["streams given up"] == 6
