"""Fetches blobs, and checks each piece as it arrives.

A tree comes from several sources at once (swarm_fetch.py). Payloads of one piece and blobs that are checked as a whole
are requested from one source after another, in the given order.

A source that sends wrong data is blamed and dropped, but its correct pieces are kept. A slow one is only dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from p2ptrain.digest import PIECE_BYTES, leaf_digest, merkle_root, piece_bytes, piece_count
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.blobs.blob import PIECES_MAX, Blob, BlobName, Check, Kind, MemorySink, Sink, all_pieces, aside
from p2ptrain.net.blobs.server import BlobRequest, FetchError, Given, Piece
from p2ptrain.net.blobs.swarm_fetch import PIPELINE, Failed, SourceError, Sources, SwarmFetch
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import Transport, TransportError

LEFT_SECONDS = 600.0  # how long the pieces of an interrupted fetch are kept; the next attempt comes sooner


class Fetcher(Sources):
    """Fetches blobs from the peers of a run."""

    def __init__(
        self,
        transport: Transport,
        run_id: bytes,
        *,
        download: TokenBucket,
        blame: Callable[[bytes, str], None],
        rng: Random | None = None,
    ) -> None:
        super().__init__(transport, run_id, download=download, blame=blame, rng=rng)
        self._open: dict[BlobName, Sink] = {}
        self._left: dict[Kind, tuple[BlobName, MemorySink, float]] = {}  # interrupted fetches, and when to drop them

    def in_progress(self, name: BlobName) -> Blob | None:
        """Returns a tree that is being fetched, so that its pieces can be served."""
        return self._open.get(name)

    async def fetch(
        self, name: BlobName, size: int, sources: Sequence[bytes], *, check: Check | None = None, failed: Failed
    ) -> MemorySink:
        """Fetches a blob into memory, as `fetch_into` does. The next call goes on where this one was broken off."""
        sink = self._left_of(name)
        try:
            await self.fetch_into(sink, name, size, sources, check=check, failed=failed)
        except (FetchError, asyncio.CancelledError):
            if sink.held:
                self._left[name.kind] = name, sink, asyncio.get_running_loop().time() + LEFT_SECONDS
            raise
        return sink

    async def fetch_into(
        self,
        sink: Sink,
        name: BlobName,
        size: int,
        sources: Sequence[bytes],
        *,
        check: Check | None = None,
        failed: Failed,
    ) -> None:
        """Fetches a blob: a payload has exactly this size, others at most. A blob that is not a tree needs a `check`.

        `failed` is called for each source that did not deliver. FetchError when no source is left, DataError if the
        sink fails. After a cancellation or a FetchError a call with the same sink resumes."""
        assert name.is_tree == (check is None), "a tree proves itself, and nothing else does"
        assert size <= PIECES_MAX * PIECE_BYTES, "larger than the protocol allows"
        wanted = [source for source in dict.fromkeys(sources) if source != self.transport.me]
        try:
            with self.transport.boundary.guard("a fetch"):
                if name.is_tree and not (name.kind == "payload" and size <= PIECE_BYTES):
                    begun = partial(self._open.__setitem__, name, sink)
                    await SwarmFetch(self, name, size, wanted, sink, failed=failed, begun=begun).run()
                else:
                    await self._fetch_whole(name, size, wanted, sink, check, failed)
        except TransportError as error:
            raise FetchError(name, dict.fromkeys(wanted, str(error))) from error
        finally:
            if self._open.get(name) is sink:
                del self._open[name]

    def _left_of(self, name: BlobName) -> MemorySink:
        """Returns a sink for a blob, with the pieces of an interrupted fetch if that was not long ago."""
        now = asyncio.get_running_loop().time()
        self._left = {kind: left for kind, left in self._left.items() if left[2] > now}
        if name.kind in self._left and self._left[name.kind][0] == name:
            return self._left.pop(name.kind)[1]
        return MemorySink()

    # -- One source after another -----------------------------------------------------------------------

    async def _fetch_whole(
        self, name: BlobName, size: int, sources: Sequence[bytes], sink: Sink, check: Check | None, failed: Failed
    ) -> None:
        failures: dict[bytes, str] = {}
        for peer in sources:
            try:
                with self.transport.boundary.guard("a source", peer):
                    data, leaves = await self._whole(peer, name, size, check)
            except (RemoteProtocolError, TransportError, TimeoutError, SourceError) as error:
                failures[peer] = str(error) or "no answer in time"
                if isinstance(error, RemoteProtocolError):
                    self.blame(peer, error.why)
                failed(peer, failures[peer])
                continue
            await aside(sink, self._keep, sink, data, leaves)
            return
        raise FetchError(name, failures)

    async def _whole(self, peer: bytes, name: BlobName, size: int, check: Check | None) -> tuple[bytes, bytes]:
        """Fetches a blob from one source; returns its checked bytes and, for a tree, the digest of its only piece."""
        async with self.opened(peer, name) as source:
            await source.ask(BlobRequest(name.kind, name.name, leaves=False))
            await source.reply()
            if source.size > size or (name.kind == "payload" and source.size != size):
                raise RemoteProtocolError(f"{name} of {source.size} bytes, expected {size}")
            if source.held != all_pieces(source.size):
                raise SourceError("has only part of it")
            data, pieces, next_index = bytearray(), piece_count(source.size), 0
            for _ in range(pieces):
                while next_index < pieces and len(source.asked) < PIPELINE:
                    if not await self.may_ask(source, piece_bytes(source.size, next_index)):
                        break
                    await source.ask(Piece(next_index, insist=True))
                    next_index += 1
                reply = await source.reply()
                if not isinstance(reply, Given):
                    raise SourceError("withholds pieces that it has")
                if len(reply.data) != piece_bytes(source.size, reply.index):
                    raise RemoteProtocolError(f"piece {reply.index} of {len(reply.data)} bytes")
                data += reply.data
                self.counters["bytes"] += len(reply.data)
        whole = bytes(data)
        leaves = b"" if check else leaf_digest(0, whole)
        is_right = await asyncio.to_thread(check, whole) if check else merkle_root([leaves], len(whole)) == name.name
        if not is_right:
            raise RemoteProtocolError(f"{name} with other contents")
        return whole, leaves

    def _keep(self, sink: Sink, data: bytes, leaves: bytes) -> None:
        sink.begin(len(data), leaves)
        for index in range(piece_count(len(data))):
            sink.write(index, data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
        sink.finish()
