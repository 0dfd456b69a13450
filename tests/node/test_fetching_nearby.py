"""A far author's contribution: of the members near one another one is drawn to fetch it, and the others wait for it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from p2ptrain.core.messages import KEY_BYTES, authored, payload_digest
from p2ptrain.net.address_book import KnownPeer
from p2ptrain.net.blobs.blob import BlobName
from p2ptrain.net.blobs.server import FetchError, blob_protocol
from p2ptrain.net.transport import Stream
from p2ptrain.node.fetching import (
    FETCHES_KNOWN,
    PASSED_OVER_SECONDS,
    PATIENCE_SECONDS_MIN,
    PATIENCE_TIMES,
    USUAL_SECONDS,
)
from tests.helpers.blobs import BlobNode, MemoryBlob
from tests.helpers.core import KEYS
from tests.helpers.driver import PAYLOAD_BYTES, DriverBench, bench
from tests.helpers.net import at, skipping_time, some_bytes

ME, PEER, OTHER, THIRD = KEYS[:4]
NEAR, AFAR = 0.001, 0.2  # round trips
PATIENCE = PATIENCE_SECONDS_MIN + PATIENCE_TIMES * USUAL_SECONDS  # while nothing was fetched from afar


def now() -> float:
    return asyncio.get_running_loop().time()


def set_latency(each: DriverBench, seconds: float, *peers: bytes) -> None:
    for peer in peers:
        each.edges.connections.known.setdefault(peer, KnownPeer()).answered_in.append(seconds)


def payloads_for(drawn: bytes, count: int) -> list[tuple[bytes, bytes]]:
    """Returns names and bytes of payloads of PEER's which, of ME, OTHER and THIRD, `drawn` is to fetch."""
    found = []
    for seed in range(100 * count):
        body = authored(PEER, some_bytes(PAYLOAD_BYTES - KEY_BYTES, seed))
        name = payload_digest(body)
        if max((ME, OTHER, THIRD), key=lambda key: hashlib.sha256(name + key).digest()) == drawn:
            found.append((name, body))
    return found[:count]


@dataclass
class FarAway:
    """A node, two near members, and contributions of a far author."""

    each: DriverBench
    author: BlobNode
    other: BlobNode
    third: BlobNode
    payloads: list[tuple[bytes, bytes]]
    failed: list[bytes] = field(default_factory=list)

    async def seconds(self, number: int = 0) -> float:
        """Returns how long it takes to get a contribution."""
        began, (name, body) = now(), self.payloads[number]

        def failed(peer: bytes, why: str) -> None:
            self.failed.append(peer)

        assert await self.each.edges.fetching.payload(name, PAYLOAD_BYTES, [PEER], failed) == body
        return now() - began

    def gets_it_after(self, seconds: float, peer: BlobNode) -> None:
        name, body = self.payloads[0]
        blob, tree = BlobName("payload", name), MemoryBlob.tree(body)
        asyncio.get_running_loop().call_later(seconds, peer.blobs.__setitem__, blob, tree)


@asynccontextmanager
async def far_away(tmp_path: Path, drawn: bytes, count: int = 1) -> AsyncIterator[FarAway]:
    async with bench(tmp_path) as each:
        author, other, third = [await each.serve(peer) for peer in (PEER, OTHER, THIRD)]
        payloads = payloads_for(drawn, count)
        author.blobs.update({BlobName("payload", name): MemoryBlob.tree(body) for name, body in payloads})
        set_latency(each, AFAR, PEER)
        set_latency(each, NEAR, OTHER, THIRD)
        each.edges.connections.members = frozenset({PEER, OTHER, THIRD})
        yield FarAway(each, author, other, third, payloads)


@skipping_time
async def test_who_is_drawn_asks_the_author_at_once(tmp_path: Path) -> None:
    async with far_away(tmp_path, ME) as made:
        assert await made.seconds() < 0.1
        assert (len(made.author.asked), made.other.asked, made.third.asked) == (1, [], [])


@skipping_time
async def test_the_others_fetch_from_who_is_drawn_and_ask_nobody_far_away(tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        made.gets_it_after(1.0, made.other)
        assert 1.0 < await made.seconds() < 1.5
        assert (made.author.asked, made.third.asked, made.failed) == ([], [], [])


@skipping_time
async def test_a_near_member_that_does_not_get_it_is_waited_for_once_and_then_ever_more_rarely(tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        made.gets_it_after(0.0, made.third)  # who is the next to be drawn, once the first is passed over
        assert PATIENCE < await made.seconds() < PATIENCE + 0.5
        assert made.failed == [], "nobody is to blame who was not said to have it"
        asked = len(made.other.asked)
        assert await made.seconds() < 0.5
        assert len(made.other.asked) == asked
        await at(now() + PASSED_OVER_SECONDS)
        assert await made.seconds() > PATIENCE, "it is drawn again"
        await at(now() + PASSED_OVER_SECONDS)
        asked = len(made.other.asked)
        assert await made.seconds() < 0.5
        assert len(made.other.asked) == asked
        await at(now() + PASSED_OVER_SECONDS)
        made.gets_it_after(0.0, made.other)
        assert await made.seconds() < 0.5
        assert len(made.other.asked) == asked + 1
        assert made.each.edges.fetching.neighbours == {}


@skipping_time
async def test_a_neighbour_that_answers_just_in_time_is_not_given_more_than_twice_what_we_take(tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        fetching = made.each.edges.fetching
        made.each.edges.connections.members = frozenset({PEER})
        for _ in range(FETCHES_KNOWN):
            assert await made.seconds() < 0.1
        made.each.edges.connections.members = frozenset({PEER, OTHER})
        made.gets_it_after(3.0, made.other)
        assert PATIENCE_SECONDS_MIN < await made.seconds() < PATIENCE_SECONDS_MIN + 0.5
        assert list(fetching.neighbours) == [OTHER]


@skipping_time
async def test_a_silent_neighbour_delays_many_contributions_no_longer_than_one(tmp_path: Path) -> None:
    async def hang(stream: Stream) -> None:
        await asyncio.get_running_loop().create_future()

    async with far_away(tmp_path, OTHER, count=9) as made:
        made.other.transport.handlers[blob_protocol(made.each.edges.run_id)] = hang
        took = await asyncio.gather(*(made.seconds(number) for number in range(9)))
        assert max(took) < PATIENCE + 0.5
        assert [each.times for each in made.each.edges.fetching.neighbours.values()] == [1]


@skipping_time
async def test_a_neighbour_that_sends_something_else_is_asked_once(tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        name, body = made.payloads[0]
        made.other.blobs[BlobName("payload", name)] = MemoryBlob.tree(body[:-1] + b"x")
        assert await made.seconds() < 0.5
        assert len(made.other.asked) == 1
        assert [peer for peer, _ in made.each.blamed] == [OTHER]


@skipping_time
async def test_a_neighbour_that_goes_is_not_waited_for(tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        asyncio.get_running_loop().call_later(1.0, made.each.edges.connections.linked.pop, OTHER)
        assert 1.0 < await made.seconds() < 2.0


@skipping_time
async def test_a_neighbour_is_not_passed_over_for_what_its_author_has_withdrawn(tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        made.author.blobs.clear()
        with pytest.raises(FetchError):
            await made.seconds()
        assert (made.failed, made.each.edges.fetching.neighbours) == ([PEER], {})


@skipping_time
@pytest.mark.parametrize("change", ["author near", "author unknown", "no member", "unknown", "gone"])
async def test_the_author_is_asked_where_nobody_is_nearer(change: str, tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        connections = made.each.edges.connections
        match change:
            case "author near":
                connections.known[PEER].answered_in.extend([0.02] * 5)
            case "author unknown":
                del connections.known[PEER]
            case "no member":
                connections.members = frozenset({PEER})
            case "unknown":
                del connections.known[OTHER], connections.known[THIRD]
            case "gone":
                del connections.linked[OTHER], connections.linked[THIRD]
        assert await made.seconds() < 0.1
        assert (len(made.author.asked), made.other.asked, made.third.asked) == (1, [], [])
