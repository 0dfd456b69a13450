"""The blobs that this node serves to peers: payloads, states, frozen weights, training data, its manifest and the
tokenizer."""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import cached_property

from p2ptrain.config import RunConfig
from p2ptrain.data.dataset import MANIFEST_BYTES_MAX, MANIFEST_NAME, TOKENIZER_NAME, TokenDataset, manifest_digest
from p2ptrain.data.tokenizer import tokenizer_digest
from p2ptrain.digest import is_piece, leaf_digests
from p2ptrain.errors import DataError
from p2ptrain.models.adapters import FrozenBase
from p2ptrain.net import questions
from p2ptrain.net.blobs.blob import Blob, BlobName, Check, TreeFile, WholeFile, all_pieces
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.store.checkpoints import Checkpoint
from p2ptrain.store.payloads import PayloadStore
from p2ptrain.store.store import Store

STATES_SERVED = 8  # states whose leaves are kept in memory
LEAVES_KEPT = 1_024  # payloads whose leaves are kept, 32 bytes per MiB: those of the last few rounds

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
    ) -> None:
        self._base = None if base is None else TreeFile(base.path, base.size, base.leaves)
        self.run, self.store, self.states, self.dataset, self.fetcher = run, store, states, dataset, fetcher
        self._leaves: OrderedDict[bytes, bytes] = (
            OrderedDict()
        )  # of payloads; several threads use it, in single atomic operations
        self._files: dict[str, tuple[int, WholeFile]] = {}  # each with the time of its last change

    def find(self, name: BlobName, peer: bytes) -> Blob | None:
        match name.kind:
            case "payload":
                return self._payload(name.name) or self.fetcher.in_progress(name)
            case "state" | "base":
                return self._weights(name)
            case "data":
                size = self.dataset.piece_size(name.name)
                return None if size is None else DataPiece(self.dataset, name.name, size)
            case "manifest" if name.name.hex() == self.run.data.manifest:
                return self._file(MANIFEST_NAME, lambda whole: manifest_digest(whole) == self.run.data.manifest)
            case "tokenizer" if name.name.hex() == self.run.tokenizer.digest:
                return self._file(TOKENIZER_NAME, lambda whole: tokenizer_digest(whole) == self.run.tokenizer.digest)
            case _:
                return None

    def _weights(self, name: BlobName) -> Blob | None:
        if name.kind == "state":
            return self.states.find(name.name)
        return self._base if name.name.hex() == self.run.adapt.base else None

    def _file(self, name: str, is_right: Check) -> Blob | None:
        """Returns a file of the data set, if it is there."""
        path = self.dataset.directory / name
        try:
            found = path.stat()
        except OSError:
            return None
        changed_at, known = self._files.get(name, (-1, None))
        if known is None or (changed_at, known.size) != (found.st_mtime_ns, found.st_size):
            if found.st_size > MANIFEST_BYTES_MAX:
                return None
            known = WholeFile(path, found.st_size, is_right)
            self._files[name] = found.st_mtime_ns, known
        return known

    def _payload(self, name: bytes) -> Blob | None:
        try:
            size = self.store.payloads.size(name)
        except DataError as error:
            log.error("%s", error)
            return None
        return None if size is None else PayloadBlob(self.store.payloads, name, size, self._leaves)


class PayloadBlob:
    """A contribution, in memory or on the disk. If its file is damaged, the receiver rejects it."""

    def __init__(self, payloads: PayloadStore, name: bytes, size: int, leaves: OrderedDict[bytes, bytes]) -> None:
        self._payloads, self._name, self.size, self._known = payloads, name, size, leaves
        self.held = all_pieces(size)

    @cached_property
    def leaves(self) -> bytes:
        """The digests of the pieces, computed once and shared by later requests."""
        known = self._known.get(self._name)
        if known is None:
            content = self._payloads.get(self._name)
            if content is None:
                raise DataError(f"payload {self._name.hex()} is no longer here")
            known = self._known[self._name] = b"".join(leaf_digests(content))
            if len(self._known) > LEAVES_KEPT:
                self._known.popitem(last=False)
        return known

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


class StateBlob:
    """The agreed weights of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, leaves: bytes) -> None:
        self.checkpoint, self.leaves = checkpoint, leaves
        self.size = checkpoint.state_bytes
        self.held = all_pieces(self.size)

    @property
    def is_there(self) -> bool:
        """Whether the checkpoint has not been pruned."""
        return self.checkpoint.path.exists()

    def read(self, index: int) -> bytes:
        """Reads a piece and checks its digest, since the checkpoint's files are not verified before they are served."""
        piece = self.checkpoint.read_piece(index)
        if piece is None:
            raise DataError(f"the state of round {self.checkpoint.round} is no longer there")
        if not is_piece(self.leaves, self.size, index, piece):
            raise DataError(f"the saved state of round {self.checkpoint.round} is damaged: piece {index}")
        return piece
