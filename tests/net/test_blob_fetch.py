"""Blobs arrive complete from several sources, despite sources that lie, die or withhold pieces."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.core.wire import encode
from p2ptrain.errors import DataError
from p2ptrain.net.blobs.blob import BlobName, Kind, MemorySink
from p2ptrain.net.blobs.fetch import LEFT_SECONDS
from p2ptrain.net.blobs.server import (
    BlobRequest,
    FetchError,
    Given,
    Later,
    Nothing,
    Piece,
    Reply,
    Request,
    blob_protocol,
)
from p2ptrain.net.transport import FRAME_BYTES_MAX
from tests.helpers.blobs import (
    BLOB,
    NAME,
    PIECE,
    RUN,
    Answer,
    MemoryBlob,
    account,
    given,
    honest,
    lie,
    now,
    swarm,
    tree,
    wrong_piece,
)
from tests.helpers.net import at, key, skipping_time, some_bytes, until

# ---------------------------------------------------------------------------------------------------
# Many sources at once


@skipping_time
async def test_seven_that_fetch_from_the_author_at_once_give_most_of_it_to_one_another() -> None:
    async with swarm(8) as (network, (author, *others)):
        name, blob = tree(64 * PIECE - 5)
        author.blobs[name] = blob
        async with asyncio.TaskGroup() as group:
            fetched = [group.create_task(node.fetch(name, blob.size, author.key)) for node in others]
        assert all(task.result() == blob.data() for task in fetched)
        sent = sum(size for (sender, _), size in network.sent.items() if sender == author.key)
        assert sent < 3 * blob.size
        assert sum(network.sent.values()) < 7.2 * blob.size  # hardly anything is sent twice
        assert [node.blamed + node.failed for node in others] == [[]] * 7
        assert all(node.fetcher.in_progress(name) is None for node in others)


@skipping_time
async def test_under_an_upload_limit_the_relay_is_faster_than_the_author_alone() -> None:
    async with swarm(8, upload=10 * PIECE) as (network, (author, *others)):
        name, blob = tree(64 * PIECE)
        author.blobs[name] = blob
        async with asyncio.TaskGroup() as group:
            for node in others:
                group.create_task(node.fetch(name, blob.size, author.key))
        sent = sum(size for (sender, _), size in network.sent.items() if sender == author.key)
        assert sent < 3 * blob.size
        assert now() < 15  # the author alone would need 45 s


@skipping_time
async def test_who_comes_later_finds_the_others_through_the_author() -> None:
    async with swarm(3) as (network, (author, first, second)):
        name, blob = tree(8 * PIECE)
        author.blobs[name] = blob
        await first.fetch(name, blob.size, author.key)
        assert await second.fetch(name, blob.size, author.key) == blob.data()
        assert network.sent[first.key, second.key] > PIECE


# ---------------------------------------------------------------------------------------------------
# One source after another


@skipping_time
async def test_a_small_payload_comes_from_the_first_source_that_has_it() -> None:
    async with swarm(4) as (network, (me, a, b, c)):
        name, blob = tree(1_000)
        b.blobs[name] = c.blobs[name] = blob
        assert await me.fetch(name, 1_000, me.key, a.key, b.key, c.key) == blob.data()
        assert me.failed == [(a.key, "has nothing: not here")]
        assert me.blamed == []
        assert network.sent[c.key, me.key] == 0


@pytest.mark.parametrize("size", [1, 7, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("kind", ["payload", "state", "manifest"])
def test_blobs_of_all_sizes_arrive(size: int, kind: Kind) -> None:
    @skipping_time
    async def test() -> None:
        async with swarm(2) as (_, (a, b)):
            data = some_bytes(size)
            blob = MemoryBlob(data) if kind == "manifest" else MemoryBlob.tree(data)
            name = BlobName(kind, bytes(32) if kind == "manifest" else blob.name)
            a.blobs[name] = blob
            check = (lambda found: found == data) if kind == "manifest" else None
            limit = size if kind == "payload" else 4 * PIECE
            sink = await b.fetcher.fetch(name, limit, [a.key], check=check, failed=b.fail)
            assert sink.data() == data
            assert (b.failed, b.blamed) == ([], [])

    test()


@skipping_time
async def test_an_empty_blob_arrives() -> None:
    async with swarm(2) as (_, (a, b)):
        name = BlobName("data", bytes(32))
        a.blobs[name] = MemoryBlob(b"")
        assert (await b.fetcher.fetch(name, 10, [a.key], check=lambda data: data == b"", failed=b.fail)).data() == b""


@skipping_time
async def test_what_is_checked_as_a_whole_and_wrong_comes_from_the_next_source() -> None:
    async with swarm(3) as (_, (me, a, b)):
        right, wrong = some_bytes(3 * PIECE), some_bytes(3 * PIECE, 1)
        name = BlobName("manifest", bytes(32))
        a.blobs[name], b.blobs[name] = MemoryBlob(wrong), MemoryBlob(right)
        check = right.__eq__
        sink = await me.fetcher.fetch(name, 4 * PIECE, [a.key, b.key], check=check, failed=me.fail)
        assert sink.data() == right
        assert me.blamed == [(a.key, "manifest 0000000000000000 with other contents")]
        with pytest.raises(FetchError, match=r"manifest 0+ is not available: .*of 3145728 bytes, expected 10"):
            await me.fetcher.fetch(name, 10, [b.key], check=check, failed=me.fail)


@skipping_time
async def test_when_nobody_has_it_all_reasons_are_told() -> None:
    async with swarm(3) as (network, (me, a, b)):
        network.kill(b.key)
        for size in (100, 3 * PIECE):
            name, _ = tree(size)
            me.failed.clear()
            with pytest.raises(FetchError) as caught:
                await me.fetch(name, size, a.key, b.key)
            assert caught.value.failures == dict(me.failed)
            assert caught.value.failures[a.key] == "has nothing: not here"
            assert caught.value.failures[b.key].startswith("not connected")
            with pytest.raises(FetchError, match="nobody to ask"):
                await me.fetch(name, size)
        assert me.blamed == []


# ---------------------------------------------------------------------------------------------------
# Liars


async def short_piece(request: Request) -> Reply:
    return account(BLOB) if isinstance(request, BlobRequest) else Given(request.index, BLOB.read(request.index)[:-1])


async def other_piece(request: Request) -> Reply:
    return account(BLOB) if isinstance(request, BlobRequest) else given(BLOB, (request.index + 1) % 6)


async def account_for_a_piece(request: Request) -> Reply:
    return account(BLOB)


async def garbage(request: Request) -> bytes:
    return b"\xc1"


async def not_canonical(request: Request) -> bytes:
    return encode(account(BLOB)) + b"\0"


async def long_frame(request: Request) -> bytes:
    return bytes(FRAME_BYTES_MAX)


BLAMED: dict[str, tuple[Answer, str]] = {
    "a wrong piece": (wrong_piece, "a wrong piece"),
    "a piece that is too short": (short_piece, "a wrong piece"),
    "a piece that was not asked for": (other_piece, "an answer to another request"),
    "an account instead of a piece": (account_for_a_piece, "an answer to another request"),
    "garbage": (garbage, "not a reply"),
    "a reply with something after it": (not_canonical, "not a reply"),
    "a long frame of nothing": (long_frame, "not a reply"),
    "wrong leaves": (honest(BLOB, leaves=bytes(6 * 32)), "digests that do not prove"),
    "no leaves": (honest(BLOB, leaves=b""), "digests that do not prove"),
    "too many leaves": (honest(BLOB, leaves=BLOB.leaves + bytes(32)), "digests that do not prove"),
    "a wrong size": (honest(BLOB, size=BLOB.size + 1), "expected"),
    "a huge size": (honest(BLOB, size=60_000 * PIECE), "a list of pieces that does not match"),
    "a size beyond the protocol": (honest(BLOB, size=60_000 * PIECE + 1), "not a reply"),
    "pieces beyond the end": (honest(BLOB, held=b"\x7f"), "a list of pieces that does not match"),
    "a long list of pieces": (honest(BLOB, held=bytes(2)), "a list of pieces that does not match"),
    "counts of other pieces": (honest(BLOB, given=bytes(5)), "a list of pieces that does not match"),
    "too many holders": (honest(BLOB, holders=tuple(key(n) for n in range(17))), "not a reply"),
}


@pytest.mark.parametrize(("answer", "why"), BLAMED.values(), ids=BLAMED.keys())
def test_who_lies_about_bytes_is_blamed_and_dropped(answer: Answer, why: str) -> None:
    @skipping_time
    async def test() -> None:
        async with swarm(2, upload=PIECE) as (network, (me, good)):  # slow enough that the liar is asked too
            liar = await lie(network, 100, [me], answer)
            good.blobs[NAME] = BLOB
            with pytest.raises(FetchError, match=why):
                await me.fetch(NAME, BLOB.size, liar)
            assert await me.fetch(NAME, BLOB.size, liar, good.key) == BLOB.data()
            assert {peer for peer, _ in me.blamed} == {peer for peer, _ in me.failed} == {liar}
            assert me.blamed == me.failed
            assert why in me.blamed[0][1]

    test()


@skipping_time
async def test_a_state_that_changes_its_size_is_a_lie() -> None:
    name, blob = tree(6 * PIECE, "state")
    accounts = iter([account(blob, held=b"\0"), account(tree(7 * PIECE)[1], leaves=b"")])

    async def answer(request: Request) -> Reply:
        return next(accounts)

    async with swarm(1) as (network, (me,)):
        liar = await lie(network, 100, [me], answer)
        with pytest.raises(FetchError):
            await me.fetch(name, 10 * PIECE, liar)
        assert me.blamed == [(liar, f"a blob of {6 * PIECE} bytes that now claims {7 * PIECE}")]


async def silence(request: Request) -> None:
    return None


async def stingy(request: Request) -> Reply:
    return account(BLOB) if isinstance(request, BlobRequest) else Later(request.index)


async def mute(request: Request) -> Reply | None:
    return account(BLOB) if isinstance(request, BlobRequest) else None


async def dribble(request: Request) -> Reply:
    if isinstance(request, BlobRequest):
        return account(BLOB)
    await at(now() + 19)
    return given(BLOB, request.index)


async def empty_handed(request: Request) -> Reply:
    return account(BLOB, held=b"\0") if isinstance(request, BlobRequest) else Nothing("no")


@pytest.mark.parametrize(
    ("answer", "why", "seconds"),
    [
        (silence, "no answer in time", 20),
        (stingy, "withholds pieces that it has", 6.5),
        (mute, "no answer in time", 20),
        (empty_handed, "has none of the missing pieces", 21),
    ],
)
def test_who_keeps_things_back_is_dropped_in_time_and_not_blamed(answer: Answer, why: str, seconds: float) -> None:
    @skipping_time
    async def test() -> None:
        async with swarm(1) as (network, (me,)):
            miser = await lie(network, 100, [me], answer)
            with pytest.raises(FetchError):
                await me.fetch(NAME, BLOB.size, miser)
            assert me.failed == [(miser, why)]
            assert me.blamed == []
            assert now() <= seconds + 0.1

    test()


@pytest.mark.parametrize("answer", [silence, stingy, mute, dribble, empty_handed])
def test_beside_an_honest_source_nobody_can_hold_up_a_fetch(answer: Answer) -> None:
    @skipping_time
    async def test() -> None:
        async with swarm(2) as (network, (me, good)):
            misers = [await lie(network, 100 + number, [me], answer) for number in range(3)]
            good.blobs[NAME] = BLOB
            assert await me.fetch(NAME, BLOB.size, *misers, good.key) == BLOB.data()
            assert now() < 7  # it stalls only once

    test()


@skipping_time
async def test_a_crowd_of_false_holders_does_not_keep_the_honest_source_from_its_turn() -> None:
    async with swarm(2) as (network, (me, good)):
        crowd = [await lie(network, 100 + number, [me], silence) for number in range(12)]
        good.blobs[NAME] = BLOB
        assert await me.fetch(NAME, BLOB.size, *crowd, good.key) == BLOB.data()
        assert now() < 16  # three turns of 5 s with four silent peers each
        assert (me.failed, me.blamed) == ([], [])


@skipping_time
async def test_sources_that_have_nothing_yet_make_room_for_one_that_has() -> None:
    async with swarm(2) as (network, (me, good)):
        crowd = [await lie(network, 100 + number, [me], empty_handed) for number in range(8)]
        good.blobs[NAME] = BLOB
        assert await me.fetch(NAME, BLOB.size, *crowd, good.key) == BLOB.data()
        assert now() < 5
        assert (me.failed, me.blamed) == ([], [])


@skipping_time
async def test_holders_that_do_not_exist_cost_nothing() -> None:
    async with swarm(1) as (network, (me,)):
        source = await lie(network, 100, [me], honest(BLOB, holders=tuple(key(200 + n) for n in range(16))))
        assert await me.fetch(NAME, BLOB.size, source) == BLOB.data()
        assert (me.failed, me.blamed) == ([], [])
        assert now() < 1


@pytest.mark.parametrize("seconds", [4.5, 19])
def test_sources_that_give_little_do_not_keep_out_the_quick(seconds: float) -> None:
    @skipping_time
    async def test() -> None:
        name, blob = tree(100 * PIECE)

        async def answer(request: Request) -> Reply:
            if isinstance(request, BlobRequest):
                return account(blob)
            await at(now() + seconds)
            return given(blob, request.index)

        async with swarm(2) as (network, (me, good)):
            slow = [await lie(network, 100 + number, [me], answer) for number in range(8)]
            good.blobs[name] = blob
            assert await me.fetch(name, blob.size, *slow, good.key) == blob.data()
            assert now() < 25  # two turns until it has a slot, two until it gets what others owe
            assert (me.failed, me.blamed) == ([], [])

    test()


@skipping_time
async def test_sources_that_are_all_slow_get_the_time_they_need() -> None:
    async with swarm(9, upload=PIECE // 12) as (network, (me, *slow)):
        name, blob = tree(40 * PIECE)
        for each in slow:
            each.blobs[name] = blob
        assert await me.fetch(name, blob.size, *(each.key for each in slow)) == blob.data()
        assert now() < 150  # four at a time deliver a piece every 3 s, after each has spent its burst of one
        assert sum(network.sent.values()) < 50 * PIECE
        assert (me.failed, me.blamed) == ([], [])


@pytest.mark.parametrize("takers", [2, 6])
def test_holders_that_took_it_first_and_keep_silent_cost_seconds(takers: int) -> None:
    @skipping_time
    async def test() -> None:
        async with swarm(2) as (network, (author, me)):
            name, blob = tree(16 * PIECE)
            author.blobs[name] = blob
            for number in range(takers):
                taker = await lie(network, 100 + number, [author, me], silence)
                stream = await network.nodes[taker].open(author.key, blob_protocol(RUN))
                await stream.send(encode(BlobRequest("payload", name.name, False)))
                for index in range(16):
                    await stream.receive(FRAME_BYTES_MAX)
                    await stream.send(encode(Piece(index, True)))
                await stream.receive(FRAME_BYTES_MAX)
                stream.abort()
            start = now()
            assert await me.fetch(name, blob.size, author.key) == blob.data()
            assert now() - start < 4

    test()


# ---------------------------------------------------------------------------------------------------
# Interruptions


@skipping_time
async def test_a_source_that_dies_in_the_middle_is_replaced_by_others() -> None:
    async with swarm(3, upload=4 * PIECE) as (network, (me, dying, other)):
        name, blob = tree(30 * PIECE)
        dying.blobs[name] = other.blobs[name] = blob
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(me.fetch(name, blob.size, dying.key, other.key))
            await until(lambda: network.sent[dying.key, me.key] > 5 * PIECE)
            network.kill(dying.key)
        assert fetching.result() == blob.data()
        assert me.failed == [(dying.key, "the peer is gone")]
        assert network.sent[dying.key, me.key] + network.sent[other.key, me.key] < 36 * PIECE


@skipping_time
async def test_a_fetch_that_was_broken_off_goes_on_where_it_was() -> None:
    async with swarm(2, upload=4 * PIECE) as (network, (me, other)):
        name, blob = tree(20 * PIECE)
        other.blobs[name] = blob
        sink = MemorySink()
        fetching = asyncio.create_task(me.fetcher.fetch_into(sink, name, blob.size, [other.key], failed=me.fail))
        await until(lambda: sink.held.bit_count() >= 10)
        partial = me.fetcher.in_progress(name)
        assert partial is sink
        fetching.cancel()
        await asyncio.wait([fetching])
        assert me.fetcher.in_progress(name) is None
        before = network.sent[other.key, me.key]
        held = sink.held.bit_count()
        await me.fetcher.fetch_into(sink, name, blob.size, [other.key], failed=me.fail)
        assert sink.data() == blob.data()
        assert network.sent[other.key, me.key] - before < (20 - held + 1) * PIECE
        assert me.failed == []


@skipping_time
async def test_what_came_before_a_fetch_failed_is_there_for_the_next_attempt() -> None:
    async with swarm(3, upload=4 * PIECE) as (network, (me, dying, other)):
        name, blob = tree(20 * PIECE, "state")
        dying.blobs[name] = other.blobs[name] = blob
        fetching = asyncio.create_task(me.fetch(name, blob.size, dying.key))
        await until(lambda: network.sent[dying.key, me.key] > 10 * PIECE)
        network.kill(dying.key)
        with pytest.raises(FetchError):
            await fetching
        before = me.fetcher.counters["bytes"]
        assert await me.fetch(name, blob.size, other.key) == blob.data()
        assert before >= 9 * PIECE
        assert me.fetcher.counters["bytes"] == blob.size  # nothing was sent twice


@skipping_time
async def test_what_is_kept_for_the_next_attempt_is_not_much_and_not_for_long() -> None:
    async with swarm(1) as (network, (me,)):
        for kind, seed in (("state", 10), ("payload", 11), ("payload", 12)):
            name, blob = tree(6 * PIECE, kind, seed)

            async def half(request: Request, blob: MemoryBlob = blob) -> Reply:
                return account(blob, held=b"\x07") if isinstance(request, BlobRequest) else given(blob, request.index)

            with pytest.raises(FetchError):
                await me.fetch(name, blob.size, await lie(network, seed, [me], half))
        kept = {kind: (left, sink.held) for kind, (left, sink, _) in me.fetcher._left.items()}
        assert kept == {"state": (tree(6 * PIECE, "state", 10)[0], 7), "payload": (name, 7)}
        await at(now() + LEFT_SECONDS)
        with pytest.raises(FetchError):
            await me.fetch(NAME, BLOB.size)
        assert me.fetcher._left == {}


@skipping_time
async def test_a_sink_that_takes_nothing_is_our_own_trouble() -> None:
    class Full(MemorySink):
        def write(self, index: int, piece: bytes) -> None:
            raise DataError("the disk is full")

    async with swarm(2) as (_, (me, other)):
        other.blobs[NAME] = BLOB
        with pytest.raises(DataError, match="the disk is full"):
            await me.fetcher.fetch_into(Full(), NAME, BLOB.size, [other.key], failed=me.fail)
        assert (me.failed, me.blamed) == ([], [])


async def insisted(request: Request) -> Reply:
    """Gives a piece only to who insists on it."""
    if isinstance(request, BlobRequest):
        return account(BLOB)
    return given(BLOB, request.index) if request.insist else Later(request.index)


@skipping_time
async def test_a_piece_that_was_put_off_is_not_paid_for() -> None:
    async with swarm(1, download=PIECE) as (network, (node,)):
        source = await lie(network, 1, [node], insisted)
        assert await node.fetch(NAME, BLOB.size, source) == BLOB.data()
        assert now() < 6 + 1, "a second for each piece but the first, and one before it insists"


@skipping_time
async def test_a_piece_that_another_source_has_sent_meanwhile_is_not_paid_for() -> None:
    async with swarm(3, download=PIECE) as (_, (node, *sources)):
        for seed in range(8):
            name, blob = tree(3 * PIECE, seed=seed)
            await node.download.take(PIECE)
            start = now()
            for each in sources:
                each.blobs[name] = blob
            await node.fetch(name, blob.size, *(each.key for each in sources))
            assert now() - start < 3.5
