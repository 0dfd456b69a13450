"""Makes a data set: turns text into two splits of tokens, in pieces.

Only a document's content decides whether it is held out: it is if the BLAKE3 digest of its text, read
as a fraction, is below the requested fraction. So the split is the same on every machine and in every
order, and a document that occurs twice is never on both sides, where it would falsify the held-out loss.

The text is read once, in bounded memory, and pieces are stored as they fill. The tokenizer's file is stored with
them, so that a data set is all that a run needs. The manifest is written last, under a temporary name, fsynced
and renamed: the leftovers of an interrupted call do not open as a data set, and the next call clears them away.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, cast

import numpy as np

from p2ptrain.digest import PIECE_BYTES, digest
from p2ptrain.errors import ConfigError
from p2ptrain.files import PARTIAL_SUFFIX, replace_file, sync
from p2ptrain.learn.corpus import Document, TextFile, documents, embedded_sources, file_sources
from p2ptrain.learn.data import (
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
from p2ptrain.learn.tokenizer import Tokenizer, Tokens, token_type

Progress = Callable[[int, int], None]
"""Called with the number of bytes read so far, and the total."""

READABLE = 0o644  # a data set is not secret; the user's umask still applies
BATCH_BYTES = 2**20  # text tokenized at a time: enough to keep every core busy


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """Summary of a data set that `prepare` made."""

    digest: str  # of the manifest
    tokens: int  # for training
    held_out_tokens: int
    pieces: int  # files
    path: Path


def prepare(
    out: Path,
    files: Sequence[Path],
    *,
    embedded: bool,
    tokenizer: Tokenizer,
    held_out: Fraction,
    progress: Progress,
) -> DatasetSummary:
    """Makes a data set in the directory `out` from the embedded corpus, if requested, and `files`, in this order.

    The text may have any size; memory grows only with the longest JSON line. The leftovers of an interrupted
    call are replaced; a directory with a data set or anything else in it is refused.

    With little text, the fraction may hold out nothing, or everything. Then the document nearest to the
    border goes to the empty side, which takes a second reading: with at least two different documents, one is
    trained on and one is held out, whatever the fraction.
    """
    if not 0 <= held_out < 1:
        raise ConfigError(f"{held_out} of the text", key="held_out", fix="Choose a fraction from 0 to below 1")
    sources = (embedded_sources() if embedded else []) + file_sources(files)
    if not sources:
        raise ConfigError("nothing to prepare", fix="Name text files or JSON lines, or ask for the embedded corpus")
    with _claimed(out, tokenizer):
        border = int(held_out * 2**64)
        reading = _write_splits(out, sources, tokenizer, border, progress)
        if held_out and (moved := reading.moved(border)) != border:
            reading = _write_splits(out, sources, tokenizer, moved, progress)
        if not reading.training.tokens:
            # If there are documents, the border leaves some to train on, unless the second reading found other ones.
            problem = "the named files hold no text" if reading.highest < 0 else "the text changed while it was read"
            raise ConfigError(
                problem, source=sources[0].name, fix="Name files with text, and do not change them meanwhile"
            )
        manifest = DatasetIndex(
            held_out=reading.held_out,
            token_bytes=cast(Literal[1, 2, 4], token_type(tokenizer.vocab_size).itemsize),
            tokenizer=TokenizerName(tokenizer.digest, tokenizer.kind, tokenizer.vocab_size),
            training=reading.training,
            version=1,
        )
        encoded = manifest.encode()
        decode_manifest(encoded)  # an index that cannot be opened would be our bug, and must not be written
        sync(out / PIECES_NAME)
        if tokenizer.file_bytes:
            replace_file(out / TOKENIZER_NAME, tokenizer.file_bytes, mode=READABLE)
        replace_file(out / MANIFEST_NAME, encoded, mode=READABLE)
        sync(out)
    return DatasetSummary(
        digest=manifest_digest(encoded),
        tokens=reading.training.tokens,
        held_out_tokens=reading.held_out.tokens,
        pieces=len({*reading.training.pieces, *reading.held_out.pieces}),
        path=out,
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """The two splits made by one reading of the text, and the lowest and highest of the documents' fractions."""

    training: Split
    held_out: Split
    lowest: int
    highest: int  # -1: no document

    def moved(self, border: int) -> int:
        """Returns the nearest border that leaves neither split empty, if the documents allow it."""
        if self.highest < border:
            return max(0, self.highest)  # if all documents are the same text, it is trained on
        if border <= self.lowest < self.highest:
            return self.lowest + 1
        return border


def _fraction_of(text: str) -> int:
    """Maps a document to a number between 0 and 2**64."""
    return int.from_bytes(digest("held-out document", text.encode())[:8], "little")


def _write_splits(
    out: Path, sources: Sequence[TextFile], tokenizer: Tokenizer, border: int, progress: Progress
) -> _Reading:
    directory = out / PIECES_NAME
    for leftover in directory.iterdir():
        leftover.unlink()
    training, held_out = _SplitWriter(directory), _SplitWriter(directory)
    end = np.array([tokenizer.end_of_document], dtype=token_type(tokenizer.vocab_size))
    lowest, highest = 2**64, -1
    done, total = 0, sum(source.size for source in sources)
    progress(0, total)
    for batch in _batches(sources):
        texts = [document.text for document in batch]
        for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
            fraction = _fraction_of(text)
            lowest, highest = min(lowest, fraction), max(highest, fraction)
            writer = held_out if fraction < border else training
            writer.append(tokens)
            writer.append(end)
        done += sum(document.source_bytes for document in batch)
        progress(min(done, total), total)
    progress(total, total)
    return _Reading(training.finish(), held_out.finish(), lowest, highest)


def _batches(sources: Sequence[TextFile]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for source in sources:
        for document in documents(source):
            batch.append(document)
            size += document.source_bytes
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Cuts a split's tokens into pieces, and stores each piece as soon as it is full."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._buffer = bytearray()
        self._pieces: list[str] = []
        self._tokens = 0

    def append(self, tokens: Tokens) -> None:
        self._tokens += len(tokens)
        self._buffer += tokens.tobytes()
        while len(self._buffer) >= PIECE_BYTES:
            self._store(PIECE_BYTES)

    def finish(self) -> Split:
        if self._buffer:
            self._store(len(self._buffer))
        return Split(tuple(self._pieces), self._tokens)

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
            strange = None if entry.name in (MANIFEST_NAME + PARTIAL_SUFFIX, TOKENIZER_NAME + PARTIAL_SUFFIX) else entry
        if strange:
            raise _unusable(out, f"it holds other files ({strange.relative_to(out)})")


def _unusable(out: Path, why: str) -> ConfigError:
    return ConfigError(f"cannot prepare data here: {why}", source=str(out), fix="Name a new or empty directory")
