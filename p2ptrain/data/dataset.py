"""Training data on disk: content-addressed pieces of tokens, the manifest that names them, and batches.

A data set is a directory:

    manifest.json           the index: its digest is `RunConfig.data.manifest`, and covers everything else
    pieces/<hex digest>     1 MiB of tokens each, the last one of a split shorter
    fetched/<hex digest>    the same, fetched by a node that joined; it keeps as many as there is room for
    tokenizer.json          the tokenizer that made the tokens; absent if they are bytes

It holds two splits: `training`, and `held_out`, which is never trained on and has its own methods so that this cannot
happen by mistake. A piece is named by its digest: anyone may serve it, and anyone can check it. Tokens are
little-endian and one, two or four bytes wide, depending on the size of the vocabulary; a piece holds a whole number of
them. In a data set with a loss mask they are signed, and a token that is not to be learned is stored as its complement
(data/packing.py). The manifest has exactly one encoding: sorted keys, no white space, no floats.

A sequence of length L at position i is the tokens from i*L to i*L + L, both included: L inputs and, shifted by one, L
targets. Neighbours share one token, the last target of one and the first input of the next, so that every token but the
first is a target exactly once in a pass."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from p2ptrain.data import tokenizer as tokenizers
from p2ptrain.data.assignment import Positions
from p2ptrain.data.kept_pieces import KeptPieces, pieces_of_a_round, size_of
from p2ptrain.data.tokenizer_rules import try_out
from p2ptrain.digest import PIECE_BYTES, digest
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError
from p2ptrain.files import entries, replace_file, trouble, write_atomically

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
PIECES_NAME = "pieces"
FETCHED_NAME = "fetched"
PIECES_MAX = 1_000_000  # per split: a tebibyte of tokens, more than anyone has sent to volunteers
MANIFEST_BYTES_MAX = 128 * 2**20  # two full splits at 67 bytes a piece; a newcomer reads all of it
OPEN_PIECES_MAX = 256  # each open map holds a file descriptor, and a common limit is 1,024

HexDigest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # used as a file name, so the pattern is strict


class TokenizerName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokenizer that a data set was made with, as `RunConfig.tokenizer` names it."""

    digest: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
    kind: Literal["bytes", "json"]
    vocab_size: Annotated[int, msgspec.Meta(ge=2, le=tokenizers.VOCAB_SIZE_MAX)]


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pieces: Annotated[tuple[HexDigest, ...], msgspec.Meta(max_length=PIECES_MAX)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=PIECES_MAX * PIECE_BYTES)]


class DatasetIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    held_out: Split
    token_bytes: Literal[1, 2, 4]
    tokenizer: TokenizerName
    training: Split
    version: Literal[1]
    masked: bool = False  # tokens are signed, and those not to be learned are stored as complements

    def encode(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")


def manifest_digest(encoded: bytes) -> str:
    return digest("data manifest", encoded).hex()


def piece_digest(piece: bytes | memoryview) -> str:
    return digest("data piece", piece).hex()


def decode_manifest(encoded: bytes) -> DatasetIndex:
    """Decodes a manifest whose digest was checked. Raises ValueError, with the reason, if its contents are wrong."""
    try:
        manifest = msgspec.json.decode(encoded, type=DatasetIndex)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if manifest.encode() != encoded:
        raise ValueError("not in the canonical encoding")
    tokenizer = manifest.tokenizer
    if (tokenizer.kind == "json") != bool(tokenizer.digest):
        raise ValueError(f"tokenizer of kind {tokenizer.kind} with digest {tokenizer.digest!r}")
    if tokenizers.token_type(tokenizer.vocab_size, manifest.masked).itemsize != manifest.token_bytes:
        raise ValueError(f"{manifest.token_bytes} bytes per token do not fit {tokenizer.vocab_size} tokens")
    for name, split in (("training", manifest.training), ("held_out", manifest.held_out)):
        expected = -(-split.tokens * manifest.token_bytes // PIECE_BYTES)
        if len(split.pieces) != expected:
            raise ValueError(f"{len(split.pieces)} pieces for {split.tokens} {name} tokens, which take {expected}")
    if not manifest.training.tokens and not manifest.held_out.tokens:
        raise ValueError("no tokens")
    return manifest


def read_manifest(directory: Path) -> bytes:
    """Reads the manifest of the data set in `directory`, whichever data set that is."""
    try:
        encoded = _read_file(directory / MANIFEST_NAME, MANIFEST_BYTES_MAX)
    except FileNotFoundError as error:
        raise DataError(f"{directory} holds no data set, or one that was not finished") from error
    except OSError as error:
        raise DataError(f"{directory / MANIFEST_NAME} cannot be read: {error.strerror}") from error
    if encoded is None:
        raise DataError(f"{directory / MANIFEST_NAME} is larger than {MANIFEST_BYTES_MAX} bytes")
    return encoded


def store_manifest(directory: Path, encoded: bytes, expected_digest: str) -> TokenDataset:
    """Begins a data set in `directory` from a manifest that a peer sent; its pieces may all be missing. A different
    manifest there is replaced, because the digest says which one belongs there."""
    if len(encoded) > MANIFEST_BYTES_MAX:
        raise RemoteProtocolError(f"data manifest of {len(encoded)} bytes; the limit is {MANIFEST_BYTES_MAX}")
    if (found := manifest_digest(encoded)) != expected_digest:
        raise RemoteProtocolError(f"data manifest {found} instead of {expected_digest}")
    try:
        dataset = TokenDataset(directory, decode_manifest(encoded))
    except ValueError as error:  # the fault of the run's creator, not of the peer that sent it
        raise DataError(f"data manifest {expected_digest}: {error}") from error
    with trouble(directory):
        (directory / PIECES_NAME).mkdir(parents=True, exist_ok=True)
        write_atomically(directory / MANIFEST_NAME, encoded)
    return dataset


class TokenDataset:
    """A data set on disk, some pieces of which may still be missing.

    Each piece is checked against its digest when it is first used. A damaged one is removed if it was fetched, and an
    error names it; from then on it counts as missing, until `add_piece` restores it. A batch that needs a missing piece
    is an error too, so callers that may lack pieces check `missing` first. All methods are thread-safe. After
    `keep_within`, pieces that are added lie apart and may be removed again, but not while they are needed: `need` and
    `need_held_out` say which."""

    def __init__(self, directory: Path, manifest: DatasetIndex) -> None:
        self.directory = directory
        self._own, self._fetched = directory / PIECES_NAME, directory / FETCHED_NAME
        self.manifest = manifest
        self._sizes = _piece_sizes(manifest)
        self._type = tokenizers.token_type(manifest.tokenizer.vocab_size, manifest.masked)
        self._checked: set[str] = set()
        self._damaged: set[str] = set()
        self._bad: set[str] = set()  # damaged prepared pieces, which stay on the disk and are not used
        self._open: OrderedDict[str, tokenizers.Tokens] = OrderedDict()  # least recently used first
        self._writing = threading.Lock()  # two writers of one piece would share its temporary name
        self._kept: KeptPieces | None = None  # None: pieces that are added stay for good

    @classmethod
    def open(cls, directory: Path, expected_digest: str) -> TokenDataset:
        """Opens the data set in `directory`; DataError if it is not the one that `expected_digest` names."""
        path, encoded = directory / MANIFEST_NAME, read_manifest(directory)
        if (found := manifest_digest(encoded)) != expected_digest:
            raise DataError(f"{path} is manifest {found}, not {expected_digest}")
        try:
            return cls(directory, decode_manifest(encoded))
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise DataError(f"{path}: {error}") from error

    @property
    def tokenizer(self) -> TokenizerName:
        return self.manifest.tokenizer

    @property
    def is_masked(self) -> bool:
        """Whether tokens that are not to be learned are stored as complements, which are negative (data/packing.py)."""
        return self.manifest.masked

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes.values())

    def sequences(self, length: int) -> int:
        return _sequences(self.manifest.training, length)

    def sequences_in(self, pieces: int, length: int) -> int:
        """Number of training sequences of `length` that so many pieces hold; one at least."""
        return max(1, pieces * (PIECE_BYTES // self._type.itemsize) // length)

    def held_out_sequences(self, length: int) -> int:
        return _sequences(self.manifest.held_out, length)

    def batch(self, positions: Positions, length: int) -> npt.NDArray[np.int64]:
        """The training sequences at `positions`: inputs [:, :-1], targets [:, 1:].  # [positions, length + 1]"""
        return self._gather(self.manifest.training, positions, length)

    def held_out_batch(self, positions: Positions, length: int) -> npt.NDArray[np.int64]:
        """Returns the held-out sequences at `positions`, in the form of `batch`."""
        return self._gather(self.manifest.held_out, positions, length)

    # -- Exchanged between nodes --------------------------------------------------------------------

    def keep_within(self, room: int) -> None:
        """Limits the pieces that are added to `room` bytes in all: the least recently needed ones are removed."""
        self._kept = KeptPieces(self._fetched, room, self._sizes, self._let_go)

    @property
    def prepared_bytes(self) -> int:
        """Disk space of the manifest, the tokenizer and the pieces that are never removed."""
        files = (self.directory / name for name in (MANIFEST_NAME, TOKENIZER_NAME))
        return self._prepared_pieces + sum(file.stat().st_size for file in files if file.exists())

    def fetched_bytes_min(self, sequences: int, held_out: int, length: int) -> int:
        """Returns the space that a node needs for the pieces of a round and of the first held-out sequences."""
        drawn = pieces_of_a_round(sequences, length * self._type.itemsize / PIECE_BYTES)
        pieces = min(drawn, len(self.manifest.training.pieces)) + len(self._held_out_pieces(held_out, length))
        return min(pieces * PIECE_BYTES, self.size_bytes - self._prepared_pieces)

    @property
    def _prepared_pieces(self) -> int:
        names = [path.name for path in entries(self._own) if path.name in self._sizes]
        return sum(self._sizes[name] for name in names if self._is_own(name))

    def need(self, positions: Positions, length: int) -> list[bytes]:
        """Like `missing`, and keeps these pieces until the next call. Raises DataError if there is no room for them."""
        return self._need("training", self._pieces_of(self.manifest.training, positions, length))

    def need_held_out(self, sequences: int, length: int) -> list[bytes]:
        """Like `missing_held_out`, and keeps these pieces as `need` does."""
        return self._need("held out", self._held_out_pieces(sequences, length))

    def expect(self, positions: Positions, length: int) -> list[bytes]:
        """Returns the missing pieces of a later round that fit beside those that are needed now."""
        names = self._pieces_of(self.manifest.training, positions, length)
        if self._kept is None:
            return self._absent(names)
        fitting = self._kept.fitting(self._to_fetch(names))
        return self._absent([name for name in names if name in fitting])

    def _need(self, who: str, names: list[str]) -> list[bytes]:
        if self._kept is not None:
            self._kept.hold(who, self._to_fetch(names))
        return self._absent(names)

    def _to_fetch(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the pieces, with their sizes, that may have to be fetched."""
        return {name: self._sizes[name] for name in names if not self._is_own(name)}

    def _is_own(self, name: str) -> bool:
        return name not in self._bad and size_of(self._own / name) == self._sizes[name]

    def _let_go(self, name: str) -> None:
        """Closes the map of a removed piece, which frees its space."""
        self._open.pop(name, None)
        self._checked.discard(name)

    def missing(self, positions: Positions, length: int) -> list[bytes]:
        """Returns the digests of the pieces that `batch` needs and this node lacks, in the data's order."""
        return self._absent(self._pieces_of(self.manifest.training, positions, length))

    def missing_held_out(self, sequences: int, length: int) -> list[bytes]:
        """Returns the digests of the pieces missing from the first `sequences` held-out sequences."""
        return self._absent(self._held_out_pieces(sequences, length))

    def held_out_here(self, length: int) -> int:
        """Counts the held-out sequences, from the first on, whose pieces are all here."""
        absent = {digest.hex() for digest in self._absent(self.manifest.held_out.pieces)}
        whole = next((at for at, name in enumerate(self.manifest.held_out.pieces) if name in absent), None)
        if whole is None:
            return self.held_out_sequences(length)
        return max(0, whole * PIECE_BYTES // self._type.itemsize - 1) // length

    def missing_anywhere(self) -> list[bytes]:
        return self._absent(self._sizes)

    def add_piece(self, name_digest: bytes, piece: bytes) -> None:
        """Stores a piece that a peer sent, after checking its digest."""
        name = name_digest.hex()
        if name not in self._sizes:
            raise RemoteProtocolError(f"piece {name[:64]} belongs to another data set")
        if piece_digest(piece) != name:
            raise RemoteProtocolError(f"{len(piece)} bytes that are not piece {name}")
        if len(piece) != self._sizes[name]:  # the manifest is at fault, not the peer
            raise DataError(f"piece {name} has {len(piece)} bytes, but {self._sizes[name]} by the manifest")
        if self._kept is None:
            self._write(self._own / name, piece)
            self._bad.discard(name)
        else:
            self._kept.add(name, len(piece), lambda: self._write(self._fetched / name, piece))
        self._damaged.discard(name)

    def piece_size(self, name_digest: bytes) -> int | None:
        """Returns the size of a piece that a peer may have; None if it is missing or belongs to another data set. Only
        `piece`, which reads it, notices damage."""
        name = name_digest.hex()
        return None if name not in self._sizes or self._absent([name]) else self._sizes[name]

    def piece(self, name_digest: bytes) -> bytes | None:
        """Returns a piece for a peer; None if the piece is missing or belongs to another data set."""
        name = name_digest.hex()
        if name not in self._sizes:
            return None
        try:
            piece = _read_file(self._path(name), self._sizes[name])
        except OSError:
            return None
        if piece is None or piece_digest(piece) != name:
            self._remove(name)
            return None
        return piece

    def manifest_bytes(self) -> bytes:
        return self.manifest.encode()

    def tokenizer_bytes(self) -> bytes | None:
        """Returns the tokenizer's file for a peer; None if the data set has none, or the file is still missing."""
        try:
            file_bytes = _read_file(self.directory / TOKENIZER_NAME, tokenizers.TOKENIZER_BYTES_MAX)
        except OSError:
            return None
        return file_bytes if file_bytes and tokenizers.tokenizer_digest(file_bytes) == self.tokenizer.digest else None

    def store_tokenizer(self, file_bytes: bytes) -> None:
        """Stores the tokenizer's file that a peer sent, after checking that the manifest names it."""
        assert self.tokenizer.kind == "json", "the bytes tokenizer has no file"
        if (size := len(file_bytes)) > (most := tokenizers.TOKENIZER_BYTES_MAX):
            raise RemoteProtocolError(f"tokenizer file of {size} bytes; the limit is {most}")
        if (found := tokenizers.tokenizer_digest(file_bytes)) != self.tokenizer.digest:
            raise RemoteProtocolError(f"tokenizer file {found} instead of {self.tokenizer.digest}")
        try:
            try_out(file_bytes, "the run's tokenizer")
        except ConfigError as error:  # the run's creator chose the file, not this node's owner
            raise DataError(str(error)) from error
        self._write(self.directory / TOKENIZER_NAME, file_bytes)

    def open_tokenizer(self) -> tokenizers.Tokenizer:
        if self.tokenizer.kind == "bytes":
            return tokenizers.BytesTokenizer()
        path = self.directory / TOKENIZER_NAME
        if (file_bytes := self.tokenizer_bytes()) is None:
            raise DataError(f"{path} is missing, or not the tokenizer that the data was made with")
        try:
            tokenizer = tokenizers.JsonTokenizer(file_bytes, str(path))
        except ConfigError as error:  # the run's creator chose the file, not this node's owner
            raise DataError(str(error)) from error
        if tokenizer.vocab_size != (named := self.tokenizer.vocab_size):
            raise DataError(f"{path} has {tokenizer.vocab_size} tokens, but {named} by the manifest")
        return tokenizer

    def _pieces_of(self, split: Split, positions: Positions, length: int) -> list[str]:
        """Returns the pieces that hold the sequences at `positions`, in the split's order."""
        _check_positions(split, positions, length)
        each = PIECE_BYTES // self._type.itemsize
        firsts, lasts = positions * length // each, (positions + 1) * length // each  # including the last token
        spans = zip(firsts.tolist(), lasts.tolist(), strict=True)
        numbers = {number for first, last in spans for number in range(first, last + 1)}
        return [split.pieces[number] for number in sorted(numbers)]

    def _held_out_pieces(self, sequences: int, length: int) -> list[str]:
        count = min(sequences, self.held_out_sequences(length))
        return self._pieces_of(self.manifest.held_out, np.arange(count), length)

    def _absent(self, names: Iterable[str]) -> list[bytes]:
        """Returns the pieces, each once, that are missing, damaged or of the wrong size."""
        return [
            bytes.fromhex(name)
            for name in dict.fromkeys(names)
            if name in self._damaged or self._size_on_disk(name) != self._sizes[name]
        ]

    def _write(self, path: Path, content: bytes) -> None:
        with self._writing, trouble(path):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, content)

    def _remove(self, name: str) -> None:
        """Marks a damaged piece as missing, and removes it if this node fetched it."""
        self._damaged.add(name)
        self._bad.add(name)
        self._checked.discard(name)
        with suppress(OSError):  # if the disk cannot be written, the piece counts as missing anyway
            (self._fetched / name).unlink()

    # -- Batches ------------------------------------------------------------------------------------

    def _gather(self, split: Split, positions: Positions, length: int) -> npt.NDArray[np.int64]:
        if not positions.size:
            return np.empty((0, length + 1), np.int64)
        _check_positions(split, positions, length)
        # Sorted and without duplicates, sequences make one rising run of token numbers, which few pieces cover.
        wanted, places = np.unique(positions, return_inverse=True)
        numbers = (wanted[:, None] * length + np.arange(length + 1)).ravel()
        pieces, offsets = np.divmod(numbers, PIECE_BYTES // self._type.itemsize)
        borders = [0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), len(pieces)]
        gathered = np.empty(len(numbers), dtype=np.int64)
        for first, last in pairwise(borders):
            gathered[first:last] = self._piece(split.pieces[pieces[first]])[offsets[first:last]]
        return gathered.reshape(len(wanted), length + 1)[places]

    def _piece(self, name: str) -> tokenizers.Tokens:
        """Maps a piece's tokens into memory, checking them on first use."""
        tokens = self._open.pop(name, None)  # a single step, because another thread may remove pieces
        if tokens is None:
            tokens = self._map(name)
        self._open[name] = tokens
        if len(self._open) > OPEN_PIECES_MAX:
            self._open.popitem(last=False)  # its map is closed together with the last array on it
        return tokens

    def _map(self, name: str) -> tokenizers.Tokens:
        path = self._path(name)
        try:
            with path.open("rb") as file:
                # A read beyond the end of a mapped file kills the process, so the size is checked first.
                if (size := os.fstat(file.fileno()).st_size) != self._sizes[name]:
                    raise DataError(f"piece {path} has {size} bytes instead of {self._sizes[name]}")
                if name not in self._checked:  # read from the file: the map's pages would stay in memory
                    self._check(name, file.read(size))
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=self._type)
        except OSError as error:
            raise DataError(f"piece {path} cannot be read: {error.strerror}") from error

    def _check(self, name: str, piece: bytes) -> None:
        if piece_digest(piece) != name:
            self._remove(name)
            raise DataError(f"piece {self._path(name)} is damaged: its bytes do not have this digest")
        # The digest proves that these are the creator's bytes, not that the creator made valid ones.
        vocab_size, tokens = self.tokenizer.vocab_size, np.frombuffer(piece, dtype=self._type)
        if (largest := max(int(tokens.max()), ~int(tokens.min()))) >= vocab_size:
            raise DataError(
                f"piece {self._path(name)} contains token {largest}, but the tokenizer has only {vocab_size} tokens"
            )
        self._checked.add(name)

    def _path(self, name: str) -> Path:
        """Returns where a piece lies; if it is missing, where it would have been prepared."""
        fetched = self._fetched / name
        return fetched if not self._is_own(name) and fetched.exists() else self._own / name

    def _size_on_disk(self, name: str) -> int:
        """Size of a piece's file in bytes; -1 if there is none."""
        size = size_of(self._own / name)
        return size if size == self._sizes[name] else max(size, size_of(self._fetched / name))


def _sequences(split: Split, length: int) -> int:
    assert length > 0, f"sequences of length {length}"
    return max(0, split.tokens - 1) // length


def _check_positions(split: Split, positions: Positions, length: int) -> None:
    assert positions.ndim == 1, f"positions of shape {positions.shape}"
    assert ((positions >= 0) & (positions < _sequences(split, length))).all(), "a position does not exist"


def _piece_sizes(manifest: DatasetIndex) -> dict[str, int]:
    """Returns the size in bytes of every piece, by its digest."""
    sizes: dict[str, int] = {}
    for split in (manifest.training, manifest.held_out):
        left = split.tokens * manifest.token_bytes
        for name in split.pieces:
            size = min(left, PIECE_BYTES)
            left -= size
            if sizes.setdefault(name, size) != size:
                raise ValueError(f"piece {name} would have two sizes")
    return sizes


def _read_file(path: Path, size_max: int) -> bytes | None:
    """Reads a whole file; None if it is larger than allowed."""
    with path.open("rb") as file:
        # Called with the limit, `read` would allocate that much whatever the file's size.
        content = file.read(min(os.fstat(file.fileno()).st_size, size_max) + 1)
    return content if len(content) <= size_max else None
