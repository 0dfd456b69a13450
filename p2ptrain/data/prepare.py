"""Makes a data set: turns text into two splits of tokens, in pieces.

A document is held out if the BLAKE3 digest of its text, read as a fraction, is below the requested fraction. So the
split is the same on every machine and in every order, and two copies of a document are always on the same side; on both
sides they would falsify the held-out loss.

The text is read once, in bounded memory, and tokenized in several processes, and pieces are stored as they fill. (The
tokenizers library works on all cores by itself, but its results come back to Python token by token, which takes as long
as making them.) The tokenizer's file is stored with them, so that a run needs nothing else. The manifest is written
last, under a temporary name, fsynced and renamed, so that the leftovers of an interrupted call do not open as a data
set. Repeating the call resumes and makes the same data set; a different call removes the leftovers."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np

from p2ptrain.data import corpus, dataset
from p2ptrain.data.corpus import Document, Reading, SourceFile
from p2ptrain.data.tokenizer import JsonTokenizer, Marked, Tokenizer, Tokens, token_type
from p2ptrain.digest import PIECE_BYTES, digest
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.files import PARTIAL_SUFFIX, replace_file, sync, trouble

AHEAD = 3  # batches per process that are read ahead
Progress = Callable[[int, int, int], None]
"""Called with the number of bytes read so far, and the total, and of the tokens made of them."""

Batch = tuple[list[Document], list[Tokens]]
READABLE = 0o644  # a data set is not secret; the user's umask still applies
BATCH_BYTES = 2**20  # text tokenized at a time: enough to keep every core busy
UNFINISHED_NAME = ".p2ptrain-unfinished"  # the progress of an interrupted call
SAVED_BYTES = 64 * 2**20  # text between two saves of the progress: half a minute


def in_processes(
    tokenizer: Tokenizer, dtype: np.dtype[Any], batches: Iterable[list[Document]], processes: int
) -> Iterator[Batch]:
    """Yields each batch with its tokens, of type `dtype`, in order. The bytes tokenizer runs in this process."""
    if processes < 2 or not tokenizer.file_bytes:
        for batch in batches:
            yield batch, _tokens_of(batch, _encoded(tokenizer, _texts_of(batch)), dtype)
        return
    waiting: deque[tuple[list[Document], Future[list[bytes]]]] = deque()

    def first() -> Batch:
        batch, result = waiting.popleft()
        return batch, _tokens_of(batch, (np.frombuffer(each, dtype) for each in result.result()), dtype)

    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_begin, initargs=(tokenizer.file_bytes, dtype))
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_encode, _texts_of(batch))))
            if len(waiting) > AHEAD * processes:
                yield first()
        while waiting:
            yield first()
    except BrokenProcessPool as error:
        what = "a process that tokenizes was ended, perhaps for want of memory"
        raise DataError(f"{what}. Type the command again to go on, with fewer --processes") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _texts_of(batch: Sequence[Document]) -> list[str | Marked]:
    found = (document for document in batch if document.tokens is None)
    return [each.text if each.learned is None else Marked(each.text, each.learned) for each in found]


def _tokens_of(batch: Sequence[Document], encoded: Iterable[Tokens], dtype: np.dtype[Any]) -> list[Tokens]:
    made = iter(encoded)
    found = (next(made) if document.tokens is None else document.tokens for document in batch)
    return [tokens.astype(dtype, copy=False) for tokens in found]


def _encoded(tokenizer: Tokenizer, texts: Sequence[str | Marked]) -> list[Tokens]:
    plain = iter(tokenizer.encode_batch([each for each in texts if isinstance(each, str)]))
    marked = iter(tokenizer.encode_marked([each for each in texts if isinstance(each, Marked)]))
    return [next(plain if isinstance(each, str) else marked) for each in texts]


# -- In the other processes -------------------------------------------------------------------------

_tokenizer: JsonTokenizer | None = None
_dtype: np.dtype[Any] | None = None


def _begin(file_bytes: bytes, dtype: np.dtype[Any]) -> None:
    global _tokenizer, _dtype
    threading.Thread(target=_end_with_the_first_one, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    _tokenizer, _dtype = JsonTokenizer(file_bytes), dtype


def _end_with_the_first_one() -> None:
    """Ends this process if its parent is killed, which the queue would not show, since siblings keep it open."""
    first = multiprocessing.parent_process()
    assert first is not None, "another process has begun this one"
    first.join()
    os._exit(1)


def _encode(texts: list[str | Marked]) -> list[bytes]:
    assert _tokenizer is not None and _dtype is not None, "the process has begun"
    return [tokens.astype(_dtype, copy=False).tobytes() for tokens in _encoded(_tokenizer, texts)]


@dataclass(frozen=True, slots=True)
class DatasetSummary:
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
    trained on and one is held out, whatever the fraction."""
    if not 0 <= held_out < 1:
        raise ConfigError(f"{held_out} of the text", key="held_out", fix="Choose a fraction from 0 to below 1")
    sources = corpus.embedded_sources() if embedded else []
    sources += (corpus.wikitext_sources(wikitext) if wikitext else []) + corpus.file_sources(files)
    if not sources:
        raise ConfigError("nothing to prepare", fix="Name text files or JSON lines, or ask for the embedded corpus")
    tokenizer = how.tokenizer
    with _claimed(out, tokenizer):
        border = int(held_out * 2**64)
        reading = _write_splits(out, sources, how, border, progress, processes)
        if held_out and (moved := reading.moved(border)) != border:
            reading = _write_splits(out, sources, how, moved, progress, processes)
        training, kept_out = (each.finish(out / dataset.PIECES_NAME) for each in (reading.training, reading.held_out))
        if not training.tokens:
            # If there are documents, some are left to train on, unless the files changed between the two readings.
            problem = "the named files hold no text" if reading.highest < 0 else "the text changed while it was read"
            fix = "Name files with text, and do not change them meanwhile"
            raise ConfigError(problem, source=sources[0].name, fix=fix)
        manifest = dataset.DatasetIndex(
            held_out=kept_out,
            token_bytes=cast(Literal[1, 2, 4], _dtype_of(how).itemsize),
            tokenizer=dataset.TokenizerName(tokenizer.digest, tokenizer.kind, tokenizer.vocab_size),
            training=training,
            version=1,
            masked=how.chats is not None,
        )
        encoded = manifest.encode()
        dataset.decode_manifest(encoded)  # an index that cannot be opened would be our bug, and must not be written
        sync(out / dataset.PIECES_NAME)
        if tokenizer.file_bytes:
            replace_file(out / dataset.TOKENIZER_NAME, tokenizer.file_bytes, mode=READABLE)
        replace_file(out / dataset.MANIFEST_NAME, encoded, mode=READABLE)
        (out / UNFINISHED_NAME).unlink(missing_ok=True)
        sync(out)
    return DatasetSummary(
        digest=dataset.manifest_digest(encoded),
        tokens=training.tokens,
        held_out_tokens=kept_out.tokens,
        pieces=len({*training.pieces, *kept_out.pieces}),
        path=out,
        chats_cut=reading.chats_cut,
    )


def _fraction_of(document: Document) -> int:
    """Maps a document to a number between 0 and 2**64."""
    content = document.text.encode() if document.tokens is None else document.tokens.astype("<u4").tobytes()
    return int.from_bytes(digest("held-out document", content)[:8], "little")


class _SplitSoFar(msgspec.Struct, array_like=True):
    """A split whose tokens are cut into pieces, each stored as soon as it is full, and the bytes of the last one."""

    pieces: list[str] = []
    tokens: int = 0
    rest: bytearray = msgspec.field(default_factory=bytearray)

    def append(self, tokens: Tokens, directory: Path) -> None:
        self.tokens += len(tokens)
        self.rest += tokens.tobytes()
        while len(self.rest) >= PIECE_BYTES:
            self._store(PIECE_BYTES, directory)

    def finish(self, directory: Path) -> dataset.Split:
        if self.rest:
            self._store(len(self.rest), directory)
        return dataset.Split(tuple(self.pieces), self.tokens)

    def _store(self, size: int, directory: Path) -> None:
        if len(self.pieces) == dataset.PIECES_MAX:
            fix = "Prepare less text, or split it into data sets for several runs"
            raise ConfigError(f"more than {dataset.PIECES_MAX} MiB of tokens", fix=fix)
        piece = bytes(self.rest[:size])
        del self.rest[:size]
        name = dataset.piece_digest(piece)
        if not (path := directory / name).exists():  # repeated text is stored once
            replace_file(path, piece, mode=READABLE)
        self.pieces.append(name)


class _ReadSoFar(msgspec.Struct, array_like=True):
    """A reading of the text, as far as it has come: what is saved of an interrupted one."""

    call: str  # identifies the call: the digest of its sources and settings
    documents: int = 0
    bytes_read: int = 0
    lowest: int = 2**64 - 1  # fraction of a document
    highest: int = -1  # -1 if there are no documents whose split it decides
    training: _SplitSoFar = msgspec.field(default_factory=_SplitSoFar)
    held_out: _SplitSoFar = msgspec.field(default_factory=_SplitSoFar)
    chats_cut: int = 0

    @property
    def tokens(self) -> int:
        return self.training.tokens + self.held_out.tokens

    def moved(self, border: int) -> int:
        """Returns the nearest border that leaves neither split empty, if the documents allow it."""
        if -1 < self.highest < border:
            return self.highest  # if all documents are the same text, it is trained on
        return self.lowest + 1 if border <= self.lowest < self.highest else border


def _write_splits(
    out: Path, sources: Sequence[SourceFile], how: Reading, border: int, progress: Progress, processes: int
) -> _ReadSoFar:
    done, pieces, dtype = _unfinished(out, _name_of(sources, how, border)), out / dataset.PIECES_NAME, _dtype_of(how)
    end = np.array([how.tokenizer.end_of_document], dtype=dtype)
    total, since_saved = sum(source.size for source in sources), 0
    found = (document for source in sources for document in corpus.documents(source, how))
    progress(min(done.bytes_read, total), total, done.tokens)
    for batch, encoded in in_processes(how.tokenizer, dtype, _batches(islice(found, done.documents, None)), processes):
        for document, tokens in zip(batch, encoded, strict=True):
            fraction = _fraction_of(document)
            if not document.split:
                done.lowest, done.highest = min(done.lowest, fraction), max(done.highest, fraction)
            is_held_out = document.split == "held out" if document.split else fraction < border
            split = done.held_out if is_held_out else done.training
            split.append(tokens, pieces)
            done.chats_cut += document.learned is not None and bool(((tokens == end) | (tokens == ~end))[:-1].any())
            is_learned = not len(tokens) or tokens[-1] >= 0
            split.append(end if is_learned else ~end, pieces)
        done.documents += len(batch)
        done.bytes_read += sum(document.source_bytes for document in batch)
        since_saved += sum(map(_size_of, batch))
        if since_saved >= SAVED_BYTES:
            since_saved = 0
            sync(pieces)
            replace_file(out / UNFINISHED_NAME, msgspec.msgpack.encode(done), mode=READABLE)
        progress(min(done.bytes_read, total), total, done.tokens)
    progress(total, total, done.tokens)
    return done


def _dtype_of(how: Reading) -> np.dtype[np.integer[Any]]:
    return token_type(how.tokenizer.vocab_size, is_masked=how.chats is not None)


def _name_of(sources: Sequence[SourceFile], how: Reading, border: int) -> str:
    """Returns a digest of the sources and settings, by which a repeated call is recognised."""
    names = [each.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for each in sources]
    files = [(name, each.size, each.changed, each.split) for name, each in zip(names, sources, strict=True)]
    template = "" if how.chats is None else how.chats.digest
    kind = how.tokenizer.kind, how.tokenizer.digest, how.column, how.skipped is None, str(border), template
    return digest("data prepare", msgspec.msgpack.encode((files, kind))).hex()


def _unfinished(out: Path, call: str) -> _ReadSoFar:
    """Returns the saved progress of the same call, and removes all pieces that do not belong to it."""
    try:
        done = msgspec.msgpack.decode((out / UNFINISHED_NAME).read_bytes(), type=_ReadSoFar)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        done = _ReadSoFar(call)
    done = done if done.call == call else _ReadSoFar(call)
    ours = {*done.training.pieces, *done.held_out.pieces}
    if not all((out / dataset.PIECES_NAME / name).exists() for name in ours):
        done, ours = _ReadSoFar(call), set()
    for leftover in (out / dataset.PIECES_NAME).iterdir():
        if leftover.name not in ours:
            leftover.unlink()
    return done


def _size_of(document: Document) -> int:
    return len(document.text) if document.tokens is None else document.tokens.nbytes


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    batch, size = list[Document](), 0
    for document in found:
        batch.append(document)
        size += _size_of(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
        with trouble(out):
            _refuse_contents(out, tokenizer)
            (out / dataset.PIECES_NAME).mkdir(exist_ok=True)
        yield
    except BlockingIOError as error:
        raise _unusable(out, "another `data prepare` is using it") from error
    finally:
        os.close(descriptor)


def _refuse_contents(out: Path, tokenizer: Tokenizer) -> None:
    """Refuses a directory that holds anything but the leftovers of an interrupted `prepare`."""
    if (out / dataset.MANIFEST_NAME).exists():
        raise _unusable(out, "it holds a data set, which a run may be using")
    ours = re.compile(rf"[0-9a-f]{{64}}({re.escape(PARTIAL_SUFFIX)})?")
    for entry in out.iterdir():
        if entry.name == dataset.PIECES_NAME and entry.is_dir():
            strange = next((piece for piece in entry.iterdir() if not ours.fullmatch(piece.name)), None)
        elif entry.name == dataset.TOKENIZER_NAME and entry.is_file():
            # Writing the same bytes again loses nothing, whoever put the file here.
            strange = entry if entry.read_bytes() != tokenizer.file_bytes else None
        else:
            names = [name + PARTIAL_SUFFIX for name in (dataset.MANIFEST_NAME, dataset.TOKENIZER_NAME, UNFINISHED_NAME)]
            strange = None if entry.name in (UNFINISHED_NAME, *names) and entry.is_file() else entry
        if strange:
            raise _unusable(out, f"it holds other files ({strange.relative_to(out)})")


def _unusable(out: Path, why: str) -> ConfigError:
    return ConfigError(f"cannot prepare data here: {why}", source=str(out), fix="Name a new or empty directory")
