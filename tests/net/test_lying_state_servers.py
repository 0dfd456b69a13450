"""A newcomer to whom fifteen of sixteen servers lie ends with the right state or with none, never with a wrong one.

The fetching code is the daemon's, over the in-memory network: it asks all peers for their states, takes pieces from
several at once, checks each and writes it to a file. The behaviour of the liars is drawn from a seed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from p2ptrain.core.reputation import GREYLISTED_FROM, Reason, Reputation
from p2ptrain.core.wire import encode
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.net import questions
from p2ptrain.net.blobs.blob import BlobName, verified
from p2ptrain.net.blobs.server import (
    BlobRequest,
    Given,
    Have,
    Later,
    Nothing,
    Reply,
    Request,
    blob_protocol,
    decode_request,
)
from p2ptrain.net.transport import Stream, TransportError
from p2ptrain.node.driver import CATCH_UP_SECONDS
from tests.helpers.blobs import PIECE, MemoryBlob, account, given
from tests.helpers.driver import DriverBench, bench, root_of
from tests.helpers.net import at, key, skipping_time, some_bytes

LIARS = 15
SEEDS = 12
PIECES = 6
STATE = some_bytes(PIECES * PIECE - 100, seed=7)
ROOT, ROUND = root_of(STATE), 40
NEWER_ROOT, NEWER = bytes(32), 41  # certified, but nobody has its state
BLOB = MemoryBlob.tree(STATE)
OTHER = MemoryBlob.tree(some_bytes(len(STATE), seed=8))  # a state too, but not the right one
LARGER = MemoryBlob.tree(some_bytes(len(STATE) + PIECE, seed=9))
SMALLER = MemoryBlob.tree(STATE[:-PIECE])


@dataclass
class LyingServer:
    """A lying server, with a record of the requests it got and the rules it broke."""

    number: int
    rng: Random
    name: bytes = b""  # the state it was last asked for
    lies: Counter[bytes] = field(default_factory=Counter)  # rules broken, by state
    asked_again: int = 0  # requests for a state about which it had lied
    given: int = 0  # pieces sent in this stream

    @property
    def key(self) -> bytes:
        return key(100 + self.number)


Way = Callable[[LyingServer, Request], Awaitable[Reply | bytes | None]]


def lie(liar: LyingServer, reply: Reply | bytes) -> Reply | bytes:
    liar.lies[liar.name] += 1
    return reply


async def wrong_pieces(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return account(BLOB) if isinstance(request, BlobRequest) else lie(liar, given(OTHER, request.index))


async def one_wrong_piece_after_right_ones(liar: LyingServer, request: Request) -> Reply | bytes | None:
    if isinstance(request, BlobRequest):
        return account(BLOB)
    liar.given += 1
    return given(BLOB, request.index) if liar.given < 3 else lie(liar, given(OTHER, request.index))


async def one_bit_of_a_piece(liar: LyingServer, request: Request) -> Reply | bytes | None:
    if isinstance(request, BlobRequest):
        return account(BLOB)
    piece = bytearray(BLOB.read(request.index))
    piece[liar.rng.randrange(len(piece))] ^= 1
    return lie(liar, Given(request.index, bytes(piece)))


async def a_shorter_piece(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return account(BLOB) if isinstance(request, BlobRequest) else lie(liar, Given(request.index, b""))


async def another_piece_than_asked(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return account(BLOB) if isinstance(request, BlobRequest) else lie(liar, given(BLOB, (request.index + 1) % PIECES))


async def another_state(liar: LyingServer, request: Request) -> Reply | bytes | None:
    """Sends a state that is consistent in itself but does not have the root."""
    return lie(liar, account(OTHER)) if isinstance(request, BlobRequest) else given(OTHER, request.index)


async def a_larger_state(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return lie(liar, account(LARGER)) if isinstance(request, BlobRequest) else given(LARGER, request.index)


async def a_smaller_state(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return lie(liar, account(SMALLER)) if isinstance(request, BlobRequest) else given(SMALLER, request.index)


async def right_digests_of_another_size(liar: LyingServer, request: Request) -> Reply | bytes | None:
    if isinstance(request, BlobRequest):
        return lie(liar, account(BLOB, size=BLOB.size - 1))
    return given(BLOB, request.index)


async def pieces_that_there_are_not(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return lie(liar, account(BLOB, held=b"\xff\xff")) if isinstance(request, BlobRequest) else None


async def junk(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return lie(liar, b"\xc1" + liar.rng.randbytes(20))


async def silence(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return None


async def silence_after_its_account(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return account(BLOB) if isinstance(request, BlobRequest) else None


async def a_trickle(liar: LyingServer, request: Request) -> Reply | bytes | None:
    await at(asyncio.get_running_loop().time() + 15.0)
    return account(BLOB) if isinstance(request, BlobRequest) else given(BLOB, request.index)


async def a_break_in_the_middle(liar: LyingServer, request: Request) -> Reply | bytes | None:
    if isinstance(request, BlobRequest):
        return account(BLOB)
    liar.given += 1
    if liar.given > 1:
        raise TransportError("it goes away")
    return given(BLOB, request.index)


async def nothing(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return Nothing("not here")


async def later_for_ever(liar: LyingServer, request: Request) -> Reply | bytes | None:
    return account(BLOB) if isinstance(request, BlobRequest) else Later(request.index)


async def an_empty_hand(liar: LyingServer, request: Request) -> Reply | bytes | None:
    """Has no pieces, and names many unknown peers as holders."""
    strangers = tuple(liar.rng.randbytes(32) for _ in range(16))
    return account(BLOB, held=bytes(1), holders=strangers) if isinstance(request, BlobRequest) else Later(request.index)


WAYS: tuple[Way, ...] = (
    wrong_pieces, one_wrong_piece_after_right_ones, one_bit_of_a_piece, a_shorter_piece, another_piece_than_asked,
    another_state, a_larger_state, a_smaller_state, right_digests_of_another_size, pieces_that_there_are_not, junk,
    silence, silence_after_its_account, a_trickle, a_break_in_the_middle, nothing, later_for_ever, an_empty_hand,
)  # fmt: skip


async def tell(each: DriverBench, liar: LyingServer, way: Way) -> None:
    """Connects a liar, which offers the states that are wanted and serves them in its way."""
    transport = each.network.transport(liar.key)

    async def serve(stream: Stream) -> None:
        is_new = True
        try:
            while True:
                request = decode_request(await stream.receive(128))
                if isinstance(request, BlobRequest) and is_new:
                    is_new = False
                    liar.name, liar.given = request.name, 0
                    liar.asked_again += liar.lies[request.name]
                reply = await way(liar, request)
                if reply is not None:
                    await stream.send(reply if isinstance(reply, bytes) else encode(reply))
                if liar.name == NEWER_ROOT and isinstance(reply, Have) and not liar.lies[NEWER_ROOT]:
                    lie(liar, reply)  # it has no digests of that state
        except (TransportError, RemoteProtocolError):
            stream.abort()

    await transport.serve(blob_protocol(each.edges.run_id), serve)
    await questions.serve(transport, lambda peer, question: questions.States(((NEWER, NEWER_ROOT), (ROUND, ROOT))))
    await each.transport.connect(transport.addresses()[0])


async def be_honest(each: DriverBench, peer: bytes) -> None:
    node = await each.serve(peer)
    node.blobs[BlobName("state", ROOT)] = BLOB
    await questions.serve(node.transport, lambda asker, question: questions.States(((ROUND, ROOT),)))


async def state(each: DriverBench, sources: list[bytes]) -> tuple[int, bytes, bytes]:
    async with asyncio.timeout(CATCH_UP_SECONDS):
        roots = [(NEWER, NEWER_ROOT), (ROUND, ROOT)]
        async with each.edges.fetching.state(roots, sources, len(STATE)) as (number, root, found):
            return number, root, b"".join(verified(found))


def check_blame(each: DriverBench, liars: list[LyingServer], honest: bytes) -> None:
    """Checks that senders of wrong data are blamed once and not asked again, and that slow ones are not blamed."""
    blamed = Counter(peer for peer, _ in each.blamed)
    assert blamed[honest] == 0
    for liar in liars:
        assert blamed[liar.key] == len(liar.lies), liar
        assert liar.asked_again == 0, liar


async def mixed(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    ways = [rng.choice(WAYS) for _ in range(LIARS)] if seed else [WAYS[0]] * LIARS
    async with bench(tmp_path) as each:
        liars = [LyingServer(number, Random(f"{seed} {number}")) for number in range(LIARS)]
        for liar, way in zip(liars, ways, strict=True):
            await tell(each, liar, way)
        honest = key(200)
        await be_honest(each, honest)
        sources = [*(liar.key for liar in liars), honest]
        rng.shuffle(sources)
        number, root, found = await state(each, sources)
        assert (number, root) == (ROUND, ROOT)
        assert found == STATE
        assert list((tmp_path / "fetching").iterdir()) == []
        check_blame(each, liars, honest)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_one_honest_server_among_sixteen_is_enough(tmp_path: Path, seed: int) -> None:
    skipping_time(mixed)(tmp_path, seed)


async def all_of_a_kind(tmp_path: Path, way: Way) -> None:
    async with bench(tmp_path) as each:
        liars = [LyingServer(number, Random(number)) for number in range(LIARS)]
        for liar in liars:
            await tell(each, liar, way)
        honest = key(200)
        await be_honest(each, honest)
        number, root, found = await state(each, [*(liar.key for liar in liars), honest])
        assert (number, root, root_of(found)) == (ROUND, ROOT, ROOT)
        check_blame(each, liars, honest)


@pytest.mark.parametrize("way", WAYS)
def test_fifteen_that_lie_alike_do_not_keep_out_the_honest_one(tmp_path: Path, way: Way) -> None:
    skipping_time(all_of_a_kind)(tmp_path, way)


@pytest.mark.parametrize("seed", range(4))
def test_without_an_honest_server_there_is_no_state_rather_than_a_wrong_one(tmp_path: Path, seed: int) -> None:
    liars_only = [
        way for way in WAYS if way not in (a_trickle, one_wrong_piece_after_right_ones, a_break_in_the_middle)
    ]

    async def only_liars(path: Path) -> None:
        rng = Random(seed)
        async with bench(path) as each:
            liars = [LyingServer(number, Random(f"{seed} {number}")) for number in range(LIARS + 1)]
            for liar in liars:
                await tell(each, liar, rng.choice(liars_only))
            with pytest.raises((DataError, TimeoutError)):
                await state(each, [liar.key for liar in liars])

    skipping_time(only_liars)(tmp_path)


def test_a_peer_that_goes_on_sending_wrong_pieces_is_kept_away() -> None:
    """Each wrong piece is only our own observation: pieces are not signed, so they prove nothing to others."""
    reputation, peer = Reputation(), key(1)
    for number in range(int(GREYLISTED_FROM) + 1):
        assert reputation.is_greylisted(peer, 60.0 * number) is False or number >= GREYLISTED_FROM
        reputation.note(peer, Reason.MALFORMED, 0.0)
    assert reputation.is_greylisted(peer, 0.0)
