"""The blobs that this node serves: payloads, states, frozen weights, data with manifest and tokenizer, origins."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from time import monotonic

from p2ptrain.config import RunConfig
from p2ptrain.core.origin import ORIGIN_BYTES_MAX, decode_origin, succeed
from p2ptrain.data.dataset import MANIFEST_BYTES_MAX, MANIFEST_NAME, TOKENIZER_NAME, TokenDataset, manifest_digest
from p2ptrain.data.tokenizer import tokenizer_digest
from p2ptrain.digest import leaf_digests
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.models.adapters import FrozenBase
from p2ptrain.net import questions
from p2ptrain.net.blobs.blob import Blob, BlobName, Check, TreeFile, WholeFile, all_pieces
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.store.checkpoints import STATE_NAME, Checkpoint
from p2ptrain.store.payloads import PayloadStore
from p2ptrain.store.store import ORIGIN_NAME, Store

STATES_SERVED = 64  # states whose leaves are in memory: in a fast run many are made between two prunings
PAUSE_SECONDS = 30.0  # between two pieces of a state, until a fetch counts as broken off
FETCH_SECONDS = 1_800.0  # 1.8 GB at 1 MB/s

log = logging.getLogger("p2ptrain.node")


class SavedStates:
    """The checkpoints whose states this node serves."""

    def __init__(self) -> None:
        self._offered: dict[bytes, StateBlob] = {}  # by root; replaced, never changed: another thread may be reading it

    def offer(self, checkpoint: Checkpoint, leaves: bytes) -> None:
        """Adds a checkpoint and drops pruned ones. May run in any thread, but only one at a time."""
        offered = {root: blob for root, blob in self._offered.items() if blob.is_there and root != checkpoint.root}
        offered[checkpoint.root] = StateBlob(checkpoint, leaves)
        self._offered = dict(list(offered.items())[-STATES_SERVED:])

    def places(self) -> tuple[tuple[int, bytes], ...]:
        """Returns round and root of each state, newest first."""
        offered = self._offered.items()
        found = sorted(((blob.checkpoint.round, root) for root, blob in offered if blob.is_there), reverse=True)
        return tuple(found[: questions.STATES_MAX])

    def fetched(self) -> list[Path]:
        """Returns the checkpoints that peers are fetching. One that is fetched for too long counts no more."""
        now = monotonic()
        going = [each for each in self._offered.values() if each.read_at > now - PAUSE_SECONDS and each.is_there]
        return [each.checkpoint.path for each in going if each.begun_at > now - FETCH_SECONDS]

    def find(self, root: bytes) -> StateBlob | None:
        blob = self._offered.get(root)
        return blob if blob is not None and blob.is_there else None


class ServedBlobs:
    """The catalog of a node: finds the blobs that peers ask for."""

    def __init__(
        self,
        run: RunConfig,
        store: Store,
        states: SavedStates,
        dataset: TokenDataset,
        fetcher: Fetcher,
        base: FrozenBase | None = None,
        follows: Collection[bytes] = (),
    ) -> None:
        """follows: the ids of the runs before this one"""
        self._follows = follows
        self._base = None if base is None else TreeFile(base.path, base.size, base.leaves)
        self.run, self.store, self.states, self.dataset, self.fetcher = run, store, states, dataset, fetcher
        self._files: dict[Path, tuple[int, WholeFile]] = {}  # each with the time of its last change
        self._data_sets: dict[str, Path] = {}  # others that are here and that motions name, by manifest

    def find(self, name: BlobName, peer: bytes) -> Blob | None:
        found: Blob | None = None
        match name.kind:
            case "payload":
                found = self._payload(name.name) or self.fetcher.in_progress(name)
            case "state":
                found = self.states.find(name.name)
            case "base" if name.name.hex() == self.run.adapt.base:
                found = self._base
            case "origin" if name.name in {self.run.id, *self._follows}:  # whole: a path has the first digits
                found = self._origin(name.name)
            case "data" if (size := self.dataset.piece_size(name.name)) is not None:
                found = DataPiece(self.dataset, name.name, size)
            case "manifest" if (manifest := name.name.hex()) in {self.run.data.manifest, *self._data_sets}:
                directory = self._data_sets.get(manifest)
                found = self._file(MANIFEST_NAME, lambda whole: manifest_digest(whole) == manifest, directory)
            case "tokenizer" if name.name.hex() == self.run.tokenizer.digest:
                found = self._file(TOKENIZER_NAME, lambda whole: tokenizer_digest(whole) == self.run.tokenizer.digest)
        return found

    def offer_manifest(self, manifest: str, directory: Path) -> None:
        """Serves the manifest of another data set from now on: members look whether somebody has it."""
        self._data_sets[manifest] = directory

    def _origin(self, run_id: bytes) -> Blob | None:
        """Returns where a run of this disk comes from."""

        def is_right(encoded: bytes) -> bool:
            try:
                return succeed(decode_origin(encoded))[0].id == run_id
            except RemoteProtocolError:
                return False

        directory = self.store.directory.parent / run_id.hex()[:16]
        return self._file(ORIGIN_NAME, is_right, directory, ORIGIN_BYTES_MAX)

    def _file(
        self, name: str, is_right: Check, directory: Path | None = None, bytes_max: int = MANIFEST_BYTES_MAX
    ) -> Blob | None:
        """Returns a file of the data set, or of another directory, if it is there."""
        path = (directory or self.dataset.directory) / name
        try:
            found = path.stat()
        except OSError:
            return None
        changed_at, known = self._files.get(path, (-1, None))
        if known is None or (changed_at, known.size) != (found.st_mtime_ns, found.st_size):
            if found.st_size > bytes_max:
                return None
            known = WholeFile(path, found.st_size, is_right)
            self._files[path] = found.st_mtime_ns, known
        return known

    def _payload(self, name: bytes) -> Blob | None:
        try:
            size = self.store.payloads.size(name)
        except DataError as error:
            log.error("%s", error)
            return None
        return None if size is None else PayloadBlob(self.store.payloads, name, size)


class PayloadBlob:
    """A contribution, in memory or on the disk. If its file is damaged, the receiver rejects it."""

    def __init__(self, payloads: PayloadStore, name: bytes, size: int) -> None:
        self._payloads, self._name, self.size = payloads, name, size
        self.held = all_pieces(size)

    @cached_property
    def leaves(self) -> bytes:
        """The digests of the pieces. The server keeps them for later requests (net/blobs/server.py)."""
        content = self._payloads.get(self._name)
        if content is None:
            raise DataError(f"payload {self._name.hex()} is no longer here")
        return b"".join(leaf_digests(content))

    def read(self, index: int) -> bytes:
        piece = self._payloads.read_piece(self._name, index)
        if piece is None:
            raise DataError(f"payload {self._name.hex()} is no longer here")
        return piece


class DataPiece:
    """A piece of the training data, checked each time it is read."""

    leaves, held = b"", 1

    def __init__(self, dataset: TokenDataset, name: bytes, size: int) -> None:
        self._dataset, self._name, self.size = dataset, name, size

    def read(self, index: int) -> bytes:
        piece = self._dataset.piece(self._name)
        if piece is None:
            raise DataError(f"piece {self._name.hex()} of the training data is missing or damaged")
        return piece


class StateBlob(TreeFile):
    """The agreed weights of a checkpoint, whose files are not verified before they are served."""

    def __init__(self, checkpoint: Checkpoint, leaves: bytes) -> None:
        super().__init__(checkpoint.path / STATE_NAME, checkpoint.state_bytes, leaves)
        self.checkpoint = checkpoint
        self.begun_at, self.read_at = math.inf, -math.inf  # its first piece, and its last

    def read(self, index: int) -> bytes:
        self.read_at = monotonic()
        self.begun_at = min(self.begun_at, self.read_at)
        return super().read(index)

    @property
    def is_there(self) -> bool:
        """Whether the checkpoint has not been pruned."""
        return self.checkpoint.path.exists()
