"""Reads, hashes and encodes blobs for replies: once for all who ask, in threads, and kept for a while.

So the event loop never waits for it, and a piece is in memory once, however many peers are being sent it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from p2ptrain.errors import DataError
from p2ptrain.net.blobs.blob import BlobName

KEPT_BYTES = 2**25  # 32 MiB: the pieces of a round's payloads that several peers are fetching now
THREADS = 2  # of our own: a slow disk holds up nobody who uses asyncio's

Part: TypeAlias = tuple[BlobName, int | None]  # the frame with a piece; None: the digests of all pieces


class Shared:
    """Parts of blobs, made in threads. They never change, because a blob's name is its digest."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "blobs")
        self._making: dict[Part, asyncio.Future[bytes]] = {}
        self._kept: OrderedDict[Part, bytes] = OrderedDict()  # the least recently used first
        self._bytes = 0
        self._is_closed = False

    async def get(self, part: Part, make: Callable[[], bytes]) -> bytes:
        """Returns a part, made by `make` if it is not here. Raises what `make` raises."""
        if (kept := self._kept.get(part)) is not None:
            self._kept.move_to_end(part)
            return kept
        making = self._making.get(part)
        if making is None:
            if self._is_closed:
                raise DataError("the node is stopping")
            making = self._making[part] = asyncio.get_running_loop().run_in_executor(self._threads, make)
            making.add_done_callback(partial(self._made, part))
        return await asyncio.shield(making)  # one who gives up does not end it for the others

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _made(self, part: Part, making: asyncio.Future[bytes]) -> None:
        del self._making[part]
        if making.cancelled() or making.exception() is not None:
            return
        made = making.result()
        self._kept[part] = made
        self._bytes += len(made)
        while self._bytes > KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped)
