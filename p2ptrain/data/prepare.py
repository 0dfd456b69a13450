"""Makes a data set: turns text into two splits of tokens, in pieces.

A document is held out if the BLAKE3 digest of its text, read as a fraction, is below the requested fraction.
So the split is the same on every machine and in every order, and two copies of a document are always on the
same side; on both sides they would falsify the held-out loss.

The text is read once, in bounded memory, and tokenized in several processes, and pieces are stored as they fill. The
tokenizer's file is stored with them, so that a run needs nothing else. The manifest is written last, under a temporary
name, fsynced and renamed, so that the leftovers of an interrupted call do not open as a data set. Repeating the call
resumes and makes the same data set; a different call removes the leftovers.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np

from p2ptrain.data.corpus import (
    Document,
    Reading,
    SourceFile,
    documents,
    embedded_sources,
    file_sources,
    wikitext_sources,
)
from p2ptrain.data.dataset import (
    MANIFEST_NAME,
    PIECES_MAX,
    PIECES_NAME,
    TOKENIZER_NAME,
    DatasetIndex,
    Split,
    TokenizerName,
    decode_manifest,
    manifest_digest,
    piece_digest,
)
from p2ptrain.data.tokenize_in_processes import in_processes
from p2ptrain.data.tokenizer import Tokenizer, Tokens, token_type
from p2ptrain.digest import PIECE_BYTES, digest
from p2ptrain.errors import ConfigError
from p2ptrain.files import PARTIAL_SUFFIX, replace_file, sync

Progress = Callable[[int, int, int], None]
"""Called with the number of bytes read so far, and the total, and of the tokens made of them."""

READABLE = 0o644  # a data set is not secret; the user's umask still applies
BATCH_BYTES = 2**20  # text tokenized at a time: enough to keep every core busy
UNFINISHED_NAME = ".p2ptrain-unfinished"  # the progress of an interrupted call
SAVED_BYTES = 64 * 2**20  # text between two saves of the progress: half a minute


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """Summary of a data set that `prepare` made."""

    digest: str  # the manifest's digest
    tokens: int  # training tokens
    held_out_tokens: int
    pieces: int  # number of files
    path: Path
    chats_cut: int = 0  # chats that contain the token that ends a document, so that documents = "apart" would cut them


def prepare(
    out: Path,
    files: Sequence[Path],
    *,
    embedded: bool,
    wikitext: Path | None = None,
    how: Reading,
    held_out: Fraction,
    progress: Progress,
    processes: int = 1,
) -> DatasetSummary:
    """Makes a data set in the directory `out` from the embedded corpus and WikiText, if requested, and `files`, in this
    order. Of WikiText its validation files are held out.

    The text may have any size: memory grows only with the longest JSON line and the largest row group of a table.
    Repeating an interrupted call resumes it. A directory that holds a data set or anything else is refused.

    With little text, the fraction may hold out nothing, or everything. Then the document nearest to the
    border goes to the empty side, which takes a second reading: with at least two different documents, one is
    trained on and one is held out, whatever the fraction.
    """
    if not 0 <= held_out < 1:
        raise ConfigError(f"{held_out} of the text", key="held_out", fix="Choose a fraction from 0 to below 1")
    sources = (embedded_sources() if embedded else []) + (wikitext_sources(wikitext) if wikitext else [])
    sources += file_sources(files)
    if not sources:
        raise ConfigError("nothing to prepare", fix="Name text files or JSON lines, or ask for the embedded corpus")
    tokenizer = how.tokenizer
    with _claimed(out, tokenizer):
        border = int(held_out * 2**64)
        reading = _write_splits(out, sources, how, border, progress, processes)
        if held_out and (moved := reading.moved(border)) != border:
            reading = _write_splits(out, sources, how, moved, progress, processes)
        if not reading.training.tokens:
            # If there are documents, some are left to train on, unless the files changed between the two readings.
            problem = "the named files hold no text" if reading.highest < 0 else "the text changed while it was read"
            raise ConfigError(
                problem, source=sources[0].name, fix="Name files with text, and do not change them meanwhile"
            )
        manifest = DatasetIndex(
            held_out=reading.held_out,
            token_bytes=cast(Literal[1, 2, 4], _dtype_of(how).itemsize),
            tokenizer=TokenizerName(tokenizer.digest, tokenizer.kind, tokenizer.vocab_size),
            training=reading.training,
            version=1,
            masked=how.chats is not None,
        )
        encoded = manifest.encode()
        decode_manifest(encoded)  # an index that cannot be opened would be our bug, and must not be written
        sync(out / PIECES_NAME)
        if tokenizer.file_bytes:
            replace_file(out / TOKENIZER_NAME, tokenizer.file_bytes, mode=READABLE)
        replace_file(out / MANIFEST_NAME, encoded, mode=READABLE)
        (out / UNFINISHED_NAME).unlink(missing_ok=True)
        sync(out)
    return DatasetSummary(
        digest=manifest_digest(encoded),
        tokens=reading.training.tokens,
        held_out_tokens=reading.held_out.tokens,
        pieces=len({*reading.training.pieces, *reading.held_out.pieces}),
        path=out,
        chats_cut=reading.chats_cut,
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """The two splits made in one reading of the text, and the lowest and highest fraction of a document."""

    training: Split
    held_out: Split
    lowest: int
    highest: int  # -1 if there are no documents whose split it decides
    chats_cut: int

    def moved(self, border: int) -> int:
        """Returns the nearest border that leaves neither split empty, if the documents allow it."""
        if -1 < self.highest < border:
            return self.highest  # if all documents are the same text, it is trained on
        if border <= self.lowest < self.highest:
            return self.lowest + 1
        return border


def _fraction_of(document: Document) -> int:
    """Maps a document to a number between 0 and 2**64."""
    content = document.text.encode() if document.tokens is None else document.tokens.astype("<u4").tobytes()
    return int.from_bytes(digest("held-out document", content)[:8], "little")


class _Kept(msgspec.Struct, array_like=True):
    """A split so far: its full pieces, and the bytes of the last one."""

    pieces: list[str] = []
    tokens: int = 0
    rest: bytes = b""


class _Unfinished(msgspec.Struct, array_like=True):
    """The saved progress of a reading."""

    call: str  # identifies the call: the digest of its sources and settings
    documents: int = 0
    bytes_read: int = 0
    lowest: int = 2**64 - 1
    highest: int = -1
    training: _Kept = msgspec.field(default_factory=_Kept)
    held_out: _Kept = msgspec.field(default_factory=_Kept)
    chats_cut: int = 0


def _write_splits(
    out: Path, sources: Sequence[SourceFile], how: Reading, border: int, progress: Progress, processes: int
) -> _Reading:
    done = _unfinished(out, _name_of(sources, how, border))
    training, held_out = (_SplitWriter(out / PIECES_NAME, each) for each in (done.training, done.held_out))
    dtype = _dtype_of(how)
    end = np.array([how.tokenizer.end_of_document], dtype=dtype)
    total, since_saved = sum(source.size for source in sources), 0
    found = (document for source in sources for document in documents(source, how))
    progress(min(done.bytes_read, total), total, training.tokens + held_out.tokens)
    for batch, encoded in in_processes(how.tokenizer, dtype, _batches(islice(found, done.documents, None)), processes):
        for document, tokens in zip(batch, encoded, strict=True):
            fraction = _fraction_of(document)
            if not document.split:
                done.lowest, done.highest = min(done.lowest, fraction), max(done.highest, fraction)
            is_held_out = document.split == "held out" if document.split else fraction < border
            writer = held_out if is_held_out else training
            writer.append(tokens)
            done.chats_cut += document.learned is not None and bool(((tokens == end) | (tokens == ~end))[:-1].any())
            is_learned = not len(tokens) or tokens[-1] >= 0
            writer.append(end if is_learned else ~end)
        done.documents += len(batch)
        done.bytes_read += sum(document.source_bytes for document in batch)
        since_saved += sum(map(_size_of, batch))
        if since_saved >= SAVED_BYTES:
            since_saved = 0
            _save(out, done, training, held_out)
        progress(min(done.bytes_read, total), total, training.tokens + held_out.tokens)
    progress(total, total, training.tokens + held_out.tokens)
    return _Reading(training.finish(), held_out.finish(), done.lowest, done.highest, done.chats_cut)


def _dtype_of(how: Reading) -> np.dtype[np.integer[Any]]:
    return token_type(how.tokenizer.vocab_size, is_masked=how.chats is not None)


def _name_of(sources: Sequence[SourceFile], how: Reading, border: int) -> str:
    """Returns a digest of the sources and settings, by which a repeated call is recognised."""
    files = [(source.name, source.size, source.changed, source.split) for source in sources]
    template = "" if how.chats is None else how.chats.digest
    kind = how.tokenizer.kind, how.tokenizer.digest, how.column, how.skipped is None, str(border), template
    return digest("data prepare", msgspec.msgpack.encode((files, kind))).hex()


def _unfinished(out: Path, call: str) -> _Unfinished:
    """Returns the saved progress of the same call, and removes all pieces that do not belong to it."""
    try:
        encoded = (out / UNFINISHED_NAME).read_bytes()
        done = msgspec.msgpack.decode(encoded, type=_Unfinished)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        done = _Unfinished(call)
    done = done if done.call == call else _Unfinished(call)
    ours = {*done.training.pieces, *done.held_out.pieces}
    if not all((out / PIECES_NAME / name).exists() for name in ours):
        done, ours = _Unfinished(call), set()
    for leftover in (out / PIECES_NAME).iterdir():
        if leftover.name not in ours:
            leftover.unlink()
    return done


def _save(out: Path, done: _Unfinished, training: _SplitWriter, held_out: _SplitWriter) -> None:
    done.training, done.held_out = training.kept(), held_out.kept()
    sync(out / PIECES_NAME)
    replace_file(out / UNFINISHED_NAME, msgspec.msgpack.encode(done), mode=READABLE)


def _size_of(document: Document) -> int:
    return len(document.text) if document.tokens is None else document.tokens.nbytes


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in found:
        batch.append(document)
        size += _size_of(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Cuts a split's tokens into pieces, and stores each piece as soon as it is full."""

    def __init__(self, directory: Path, kept: _Kept) -> None:
        self._directory = directory
        self._buffer = bytearray(kept.rest)
        self._pieces = list(kept.pieces)
        self.tokens = kept.tokens

    def append(self, tokens: Tokens) -> None:
        self.tokens += len(tokens)
        self._buffer += tokens.tobytes()
        while len(self._buffer) >= PIECE_BYTES:
            self._store(PIECE_BYTES)

    def kept(self) -> _Kept:
        return _Kept(self._pieces, self.tokens, bytes(self._buffer))

    def finish(self) -> Split:
        if self._buffer:
            self._store(len(self._buffer))
        return Split(tuple(self._pieces), self.tokens)

    def _store(self, size: int) -> None:
        if len(self._pieces) == PIECES_MAX:
            raise ConfigError(
                f"more than {PIECES_MAX} MiB of tokens",
                fix="Prepare less text, or split it into data sets for several runs",
            )
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        name = piece_digest(piece)
        if not (path := self._directory / name).exists():  # repeated text is stored once
            replace_file(path, piece, mode=READABLE)
        self._pieces.append(name)


@contextmanager
def _claimed(out: Path, tokenizer: Tokenizer) -> Iterator[None]:
    """Creates `out` and locks it for this process; refuses a directory whose contents could be lost."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unusable(out, str(error.strerror)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the process, however it ends
        _refuse_contents(out, tokenizer)
        (out / PIECES_NAME).mkdir(exist_ok=True)
        yield
    except BlockingIOError as error:
        raise _unusable(out, "another `data prepare` is using it") from error
    finally:
        os.close(descriptor)


def _refuse_contents(out: Path, tokenizer: Tokenizer) -> None:
    """Refuses a directory that holds anything but the leftovers of an interrupted `prepare`."""
    if (out / MANIFEST_NAME).exists():
        raise _unusable(out, "it holds a data set, which a run may be using")
    ours = re.compile(rf"[0-9a-f]{{64}}({re.escape(PARTIAL_SUFFIX)})?")
    for entry in out.iterdir():
        if entry.name == PIECES_NAME and entry.is_dir():
            strange = next((piece for piece in entry.iterdir() if not ours.fullmatch(piece.name)), None)
        elif entry.name == TOKENIZER_NAME and entry.is_file():
            # Writing the same bytes again loses nothing, whoever put the file here.
            strange = entry if entry.read_bytes() != tokenizer.file_bytes else None
        else:
            names = [name + PARTIAL_SUFFIX for name in (MANIFEST_NAME, TOKENIZER_NAME, UNFINISHED_NAME)]
            strange = None if entry.name in (UNFINISHED_NAME, *names) and entry.is_file() else entry
        if strange:
            raise _unusable(out, f"it holds other files ({strange.relative_to(out)})")


def _unusable(out: Path, why: str) -> ConfigError:
    return ConfigError(f"cannot prepare data here: {why}", source=str(out), fix="Name a new or empty directory")
