"""What is made once for all who ask for it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DataError
from p2ptrain.net.blobs.blob import BlobName
from p2ptrain.net.blobs.server import KEPT_BYTES, Shared

NAME = BlobName("payload", bytes(32))


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    made.close()


class Maker:
    """Makes parts and counts them; `go` lets it."""

    def __init__(self) -> None:
        self.made: Counter[int] = Counter()
        self.threads: set[int] = set()
        self.go = threading.Event()
        self.go.set()

    def of(self, index: int, size: int = 10) -> Callable[[], bytes]:
        def make() -> bytes:
            self.go.wait(10)
            self.made[index] += 1
            self.threads.add(threading.get_ident())
            return bytes([index]) * size

        return make


async def test_what_many_ask_for_at_once_or_again_is_made_once_in_a_thread(shared: Shared) -> None:
    maker = Maker()
    maker.go.clear()
    asking = [asyncio.create_task(shared.get((NAME, 1), maker.of(1))) for _ in range(100)]
    await asyncio.sleep(0)
    maker.go.set()
    parts = [*await asyncio.gather(*asking), await shared.get((NAME, 1), maker.of(1))]
    assert all(part is parts[0] for part in parts)
    assert maker.made == {1: 1}
    assert threading.get_ident() not in maker.threads


async def test_no_more_is_kept_than_the_limit_and_what_was_used_last_stays(shared: Shared) -> None:
    maker, count = Maker(), KEPT_BYTES // PIECE_BYTES
    for index in range(count):
        await shared.get((NAME, index), maker.of(index, PIECE_BYTES))
    await shared.get((NAME, 0), maker.of(0, PIECE_BYTES))
    await shared.get((NAME, count), maker.of(count, PIECE_BYTES))
    await shared.get((NAME, 0), maker.of(0, PIECE_BYTES))
    await shared.get((NAME, 1), maker.of(1, PIECE_BYTES))
    assert (maker.made[0], maker.made[1]) == (1, 2)
    assert sum(map(len, shared._kept.values())) == shared._bytes <= KEPT_BYTES


async def test_who_gives_up_does_not_end_it_for_others_and_an_error_is_not_kept(shared: Shared) -> None:
    maker = Maker()
    maker.go.clear()
    first, second = (asyncio.create_task(shared.get((NAME, 1), maker.of(1))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    maker.go.set()
    assert await second == bytes([1]) * 10

    def damaged() -> bytes:
        raise DataError("damaged")

    with pytest.raises(DataError, match="damaged"):
        await shared.get((NAME, 2), damaged)
    assert await shared.get((NAME, 2), maker.of(2)) == bytes([2]) * 10


async def test_after_the_end_nothing_is_made(shared: Shared) -> None:
    shared.close()
    with pytest.raises(DataError, match="the node is stopping"):
        await shared.get((NAME, 1), Maker().of(1))
