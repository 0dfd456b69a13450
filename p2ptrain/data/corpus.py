"""Reads files as documents, and cuts long texts.

A document is the unit that is held out or trained on, and an end-of-document token follows it. In JSON lines it is the
value of a key, in Parquet and Arrow files a cell of a column. Tokens from another program are cut where it ended a
document. Any other file is cut into blocks of at most 16 KiB that end with a line if possible: a program cannot see
where documents in it begin, and with blocks the memory and the granularity of the split are the same for a note and for
a book. WikiText is cut before each article's title. Files may be compressed by gzip or zstd.

Nothing is repaired. Bytes that are not UTF-8 are an error that names the file and the offset, because replacing
them would teach the model the replacement character, and text in another encoding would consist of little
else. Line ends are left as they are; a byte order mark at the start of a file is dropped.

The embedded corpus needs no download: it is the language reference and the standard library's sources, which
come with every Python. They differ between Python versions, so two machines may well make two different data
sets from it; a run names the one that its creator made."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np

from p2ptrain.data.chats import ChatTemplate
from p2ptrain.data.tokenizer import BytesTokenizer, Tokenizer, Tokens, token_type
from p2ptrain.errors import ConfigError

BLOCK_BYTES_MAX = 16 * 2**10  # a few pages: small enough to hold out a hundredth of a megabyte
BLOCK_TOKENS_MAX = 2**16  # for token streams without document ends
LINE_BYTES_MAX = 16 * 2**20  # three long novels; a line is held in memory as a whole
ROWS_AT_ONCE = 64
PACKED_BYTES = 2**13  # how much of a zstd file is unpacked at once
KEYS_SHOWN = 12
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LINES_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".arrow")
TOKENS_SUFFIXES = (".npy", ".bin")
TEXT_SUFFIXES = (".txt", ".md")
PACKED_SUFFIXES = (".gz", ".zst")
IN_DIRECTORIES = (*TEXT_SUFFIXES, *LINES_SUFFIXES, *TABLE_SUFFIXES, *TOKENS_SUFFIXES)
TITLE = re.compile(r" = [^=].* = \n?")  # of an article in WikiText; sections have more signs
WIKITEXT = {  # its files by split, as its authors and as Hugging Face name them
    "training": re.compile(r"wiki\.train\.(tokens|raw)|train-.*\.parquet"),
    "held out": re.compile(r"wiki\.valid\.(tokens|raw)|validation-.*\.parquet"),
}
AGAIN = "Make or fetch the file again"
NAMES = f"Name directories, text files, or files that end with {', '.join(IN_DIRECTORIES[2:])}"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that contains documents; `name` is for error messages."""

    name: str
    size: int  # bytes on the disk
    open: Callable[[], BinaryIO]
    form: str = ".txt"  # the file's suffix, apart from the one for its compression
    packed: str = ""  # the suffix of its compression
    changed: int = 0  # the file's modification time, in ns
    split: str = ""  # of WIKITEXT, if it belongs to that


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    source_bytes: int  # the document's size in the file
    tokens: Tokens | None = None  # if another program made them; then there is no text
    learned: tuple[tuple[int, int], ...] | None = None  # the places in a chat's text that are learned
    split: str = ""  # training or held out, where the files decide it


@dataclass(frozen=True, slots=True)
class Reading:
    column: str = "text"  # the key or column that holds the text
    tokenizer: Tokenizer = BytesTokenizer()  # noqa: RUF009  (it has no state)
    skipped: Callable[[ConfigError], None] | None = None  # called for each document left out as broken; None: raise
    chats: ChatTemplate | None = None  # turns the column's values, which are then chats, into text

    def document(self, value: Any, source_bytes: int, where: str) -> Document | None:
        """Makes a document from the column's value; None if it is empty, or is broken and left out."""
        if self.chats is None:
            return Document(value, source_bytes) if value else None
        try:
            marked = self.chats.write(value, where)
        except ConfigError as error:
            self.leave_out(error)
            return None
        return Document(marked.text, source_bytes, learned=marked.learned)

    def leave_out(self, error: ConfigError) -> None:
        """Reports a broken document as left out, or raises the error."""
        if self.skipped is None:
            raise error
        self.skipped(error)


def file_sources(files: Sequence[Path]) -> list[SourceFile]:
    """Returns the given files, and the files in the given directories."""
    return [source for path in files for source in _sources_at(path, _status(path))]


def wikitext_sources(directory: Path) -> list[SourceFile]:
    """Returns WikiText's training and validation files in a directory."""
    _status(directory)
    found = [each for each in _files_below(directory) if each.parent == directory]
    splits = {split: sorted(each for each in found if form.fullmatch(each.name)) for split, form in WIKITEXT.items()}
    if not all(splits.values()) or len({path.suffix for paths in splits.values() for path in paths}) > 1:
        fix = "It needs wiki.train.tokens and wiki.valid.tokens (or .raw), or train-*.parquet and validation-*.parquet"
        raise ConfigError("not a directory with one form of WikiText", source=str(directory), key="--wikitext", fix=fix)
    return [replace(each, split=split) for split, paths in splits.items() for each in file_sources(paths)]


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path), fix=NAMES) from error


def _sources_at(path: Path, status: os.stat_result) -> Iterator[SourceFile]:
    if stat.S_ISDIR(status.st_mode):
        found = sorted(each for each in _files_below(path) if _form_of(each)[0] in IN_DIRECTORIES)
        if not found:
            what = f"a directory without a file that ends with {', '.join(IN_DIRECTORIES)}"
            raise ConfigError(what, source=str(path), fix="Name its files, which are then read as text")
        for each in found:
            yield from _sources_at(each, _status(each))
    elif not stat.S_ISREG(status.st_mode):
        raise ConfigError("not a file", source=str(path), fix=NAMES)
    else:
        form, packed = _form_of(path)
        if form in TABLE_SUFFIXES:
            _library("pyarrow", str(path))
        if packed == ".zst":
            _library("zstandard", str(path))
        yield SourceFile(str(path), status.st_size, lambda: path.open("rb"), form, packed, status.st_mtime_ns)


def _files_below(directory: Path) -> Iterator[Path]:
    """Yields all files below a directory except hidden ones; links to directories are not followed."""

    def failed(error: OSError) -> None:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(error.filename), fix="Check its permissions")

    for place, folders, names in os.walk(directory, onerror=failed):
        folders[:] = [each for each in folders if not each.startswith(".")]
        found = (Path(place, name) for name in names if not name.startswith("."))
        yield from (path for path in found if path.is_file())  # not broken links


def _form_of(path: Path) -> tuple[str, str]:
    """Returns a file's suffix, which decides how it is read, and the suffix of its compression."""
    packed = path.suffix.lower() if path.suffix.lower() in PACKED_SUFFIXES else ""
    return (Path(path.stem) if packed else path).suffix.lower(), packed


def embedded_sources() -> list[SourceFile]:
    """Returns the language reference and the top-level modules of the standard library, in a fixed order."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415  (half a megabyte that nothing else needs)
    except ImportError as error:
        raise _incomplete_python("pydoc_data") from error
    texts = ((f"language reference, {name}", topics[name].encode()) for name in sorted(topics))
    sources = [SourceFile(name, len(text), partial(io.BytesIO, text)) for name, text in texts]
    library = Path(sysconfig.get_path("stdlib"))
    # Taken from Python's own list of names: distributions add files of their own, which contain paths.
    modules = [path for name in sorted(sys.stdlib_module_names) if (path := library / f"{name}.py").is_file()]
    if not modules:
        raise _incomplete_python(str(library))
    return sources + file_sources(modules)


def documents(source: SourceFile, how: Reading = Reading()) -> Iterator[Document]:
    """Yields the documents of `source` in order, skipping empty ones."""
    try:
        with source.open() as file:
            yield from _documents_in(file, source, how)
    except ConfigError as error:
        how.leave_out(error)
    except (OSError, EOFError, zlib.error) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        how.leave_out(ConfigError(what, source=source.name, fix="Check the file and its permissions"))


def _documents_in(file: BinaryIO, source: SourceFile, how: Reading) -> Iterator[Document]:
    content = _unpacked(file, source)
    if source.split:
        yield from _articles(content, source, how)
    elif source.form in TABLE_SUFFIXES:
        yield from _rows(content, source, how)
    elif source.form in TOKENS_SUFFIXES:
        yield from _token_documents(content, source, how.tokenizer)
    elif source.form in LINES_SUFFIXES:
        yield from _lines(content, file, source.name, how)
    else:
        done = 0
        for text in _blocks(content, source.name):
            now = file.tell()  # position in the compressed file, coarse because it is read in blocks
            yield Document(text, now - done)
            done = now


def _unpacked(file: BinaryIO, source: SourceFile) -> BinaryIO:
    if source.packed == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if source.packed == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zstandard(file, _library("zstandard", source.name)), 2**17))
    return file


class _Zstandard(io.RawIOBase):
    """Reads a zstd file's content. The library's own reader would not notice that a file is truncated."""

    def __init__(self, file: BinaryIO, library: Any) -> None:
        self._file, self._library = file, library
        self._frame: Any = None  # the frame being read
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not (packed := self._file.read(PACKED_BYTES)):
                if self._frame is not None:
                    raise EOFError("it is cut off")
                return 0
            self._ready = b"".join(self._frames(packed))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _frames(self, packed: bytes) -> Iterator[bytes]:
        while packed:
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                yield self._frame.decompress(packed)
            except self._library.ZstdError as error:
                raise OSError(str(error)) from error
            packed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame


# -- Text -------------------------------------------------------------------------------------------


def _blocks(file: BinaryIO, name: str) -> Iterator[str]:
    head = file.read(len(BYTE_ORDER_MARK))
    carry = head.removeprefix(BYTE_ORDER_MARK)
    offset = len(head) - len(carry)  # where the next block begins
    while block := carry + file.read(BLOCK_BYTES_MAX - len(carry)):
        cut = _cut(block) if len(block) == BLOCK_BYTES_MAX else len(block)
        block, carry = block[:cut], block[cut:]
        yield _text(block, name, offset)
        offset += len(block)


def _articles(content: BinaryIO, source: SourceFile, how: Reading) -> Iterator[Document]:
    """Yields WikiText's articles, as they are written but without blank lines, which tables of it do not have."""
    rows, lines = (each.text for each in _rows(content, source, how)), _text_lines(content, source.name)
    article = ""
    for line in rows if source.form in TABLE_SUFFIXES else lines:
        if article and (TITLE.fullmatch(line) or len(article) > LINE_BYTES_MAX):
            yield Document(article, len(article.encode()), split=source.split)
            article = ""
        article += line if line.strip() else ""
    if article:
        yield Document(article, len(article.encode()), split=source.split)


def _text_lines(content: BinaryIO, name: str) -> Iterator[str]:
    offset = 0
    while line := content.readline(LINE_BYTES_MAX):
        yield _text(line, name, offset)
        offset += len(line)


def _cut(block: bytes) -> int:
    """Returns where to cut a full block: after its last line, or else before a character that may be incomplete."""
    if after_line := block.rfind(b"\n") + 1:
        return after_line
    cut = len(block) - 1
    while cut > len(block) - 4 and block[cut] & 0xC0 == 0x80:  # a continuation byte; a character has at most three
        cut -= 1
    return cut


def _text(block: bytes, name: str, offset: int) -> str:
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        what = f"not UTF-8 ({error.reason})"
        fix = "Unpack the file if it is compressed, or convert it to UTF-8, for example with iconv"
        raise ConfigError(what, source=f"{name}, byte {offset + error.start}", fix=fix) from error


# -- JSON lines -------------------------------------------------------------------------------------


def _lines(content: BinaryIO, file: BinaryIO, name: str, how: Reading) -> Iterator[Document]:
    kind: Any = str if how.chats is None else list[dict[str, Any]]
    try:
        line_type = msgspec.defstruct("Line", [("value", kind, msgspec.field(name=how.column))])
    except ValueError as error:
        raise ConfigError(f'"{how.column}" is no key', key="--column", fix="Name the key with the text") from error
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(line_type)
    number, done = 0, 0
    while line := content.readline(LINE_BYTES_MAX + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > LINE_BYTES_MAX:
            what = f"longer than {LINE_BYTES_MAX} bytes"
            how.leave_out(ConfigError(what, source=where, fix="Put each document on its own line"))
            while not line.endswith(b"\n") and (line := content.readline(LINE_BYTES_MAX)):
                pass
            continue
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if not line.strip():
            continue
        try:
            value = decoder.decode(line).value
        except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
            what = "a string" if how.chats is None else "a list of messages"
            fix = f'Each line must be a JSON object with {what} under "{how.column}"{_others(line)}'
            how.leave_out(ConfigError(str(error), source=where, fix=fix))
            continue
        now = file.tell()
        if document := how.document(value, now - done, where):
            yield document
            done = now


def _others(line: bytes) -> str:
    """Lists the keys of a line, for an error about a missing key."""
    try:
        keys = [*msgspec.json.decode(line, type=dict[str, msgspec.Raw])]
    except (ValueError, RecursionError):
        return ""
    return f"; --column names another: this line has {', '.join(keys[:KEYS_SHOWN])}" if keys else ""


# -- Tables -----------------------------------------------------------------------------------------


def _rows(file: BinaryIO, source: SourceFile, how: Reading) -> Iterator[Document]:
    pyarrow = _library("pyarrow", source.name)
    row = 0
    try:
        for texts, share in _columns(pyarrow, file, source, how):
            each = int(share * source.size / max(1, len(texts)))
            texts.validate(full=True)  # damaged data would crash the process later
            for start in range(0, len(texts), ROWS_AT_ONCE):
                for value in texts.slice(start, ROWS_AT_ONCE).to_pylist():
                    row += 1
                    if document := how.document(value, each, f"{source.name}, row {row}"):
                        yield document
    except (pyarrow.ArrowException, ValueError, OverflowError, ImportError) as error:  # a date without pandas, say
        raise ConfigError(f"damaged: {error}", source=source.name, fix=AGAIN) from error


def _columns(pyarrow: Any, file: BinaryIO, source: SourceFile, how: Reading) -> Iterator[tuple[Any, float]]:
    """Yields the values of a batch of rows, and its share of the file."""
    if source.packed:
        raise ConfigError("a compressed table", source=source.name, fix="Unpack it: Parquet compresses by itself")
    if source.form == ".parquet":
        from pyarrow import parquet  # noqa: PLC0415  (an extra)

        table = parquet.ParquetFile(file)
        _check_column(pyarrow, table.schema_arrow, source, how)
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=[how.column]):
            yield batch.column(0), len(batch) / table.metadata.num_rows
        return
    from pyarrow import ipc  # noqa: PLC0415  (an extra)

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
    _check_column(pyarrow, reader.schema, source, how)
    if is_file:
        count = reader.num_record_batches
        yield from ((reader.get_batch(number).column(how.column), 1 / count) for number in range(count))
        return
    done = 0
    for batch in reader:
        now = file.tell()
        yield batch.column(how.column), (now - done) / source.size
        done = now


def _check_column(pyarrow: Any, schema: Any, source: SourceFile, how: Reading) -> None:
    column = how.column
    has = f"it has {', '.join(schema.names[:KEYS_SHOWN])}"
    if schema.names.count(column) != 1:
        problem = f'no column "{column}"' if column not in schema.names else f'two columns "{column}"'
        raise ConfigError(problem, source=source.name, fix=f"Name one with --column: {has}")
    kind = schema.field(column).type
    types, what = pyarrow.types, "text" if how.chats is None else "chats"
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_chat = (types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type)
    if not (is_text if how.chats is None else is_chat):
        fix = f"Name another with --column: {has}"
        raise ConfigError(f'column "{column}" holds {kind}, not {what}', source=source.name, fix=fix)


# -- Tokens -----------------------------------------------------------------------------------------


def _token_documents(file: BinaryIO, source: SourceFile, tokenizer: Tokenizer) -> Iterator[Document]:
    """Cuts a stream of tokens after each end of a document, and after BLOCK_TOKENS_MAX tokens without one."""
    kind, count = _token_type(file, source, tokenizer)
    carry, done = np.zeros(0, dtype=kind), 0
    while chunk := file.read(BLOCK_TOKENS_MAX * kind.itemsize):
        if len(chunk) % kind.itemsize:
            raise ConfigError("its last token is cut off", source=source.name, fix=AGAIN)
        fresh = np.frombuffer(chunk, dtype=kind)
        _check_tokens(fresh, done, source, tokenizer)
        done += len(fresh)
        tokens = np.concatenate([carry, fresh])
        *whole, carry = np.split(tokens, np.flatnonzero(tokens == tokenizer.end_of_document) + 1)
        if len(carry) >= BLOCK_TOKENS_MAX:
            whole, carry = [*whole, carry], carry[:0]
        yield from (_token_document(each, tokenizer) for each in whole if len(each) > 1)
    if count is not None and done != count:
        raise ConfigError(f"it is cut off: {done} of {count} tokens", source=source.name, fix=AGAIN)
    if len(carry):
        yield _token_document(carry, tokenizer)


def _token_document(tokens: Tokens, tokenizer: Tokenizer) -> Document:
    ended = tokens[:-1] if tokens[-1] == tokenizer.end_of_document else tokens  # storing adds the end
    return Document("", tokens.nbytes, ended.astype(token_type(tokenizer.vocab_size)))


def _token_type(file: BinaryIO, source: SourceFile, tokenizer: Tokenizer) -> tuple[np.dtype[Any], int | None]:
    """Returns the type of the tokens that follow, and their count if the header of a .npy gives it. Without a header
    the type is nanoGPT's 16 bits, or 32 bits if the vocabulary needs them."""
    if source.form == ".bin":
        return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4"), None
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, kind = read(file)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"not a NumPy array: {error}", source=source.name, fix="Save it with numpy.save") from error
    if len(shape) != 1 or kind.kind not in "iu":
        fix = "Save one row of whole numbers"
        raise ConfigError(f"an array of {kind} and shape {shape}", source=source.name, fix=fix)
    return kind, shape[0]


def _check_tokens(tokens: Tokens, done: int, source: SourceFile, tokenizer: Tokenizer) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= tokenizer.vocab_size))
    if wrong.size:
        what = f"token {tokens[wrong[0]]}, but the tokenizer has only {tokenizer.vocab_size} tokens"
        fix = "Name the tokenizer that made the file with --tokenizer"
        raise ConfigError(what, source=f"{source.name}, token number {done + int(wrong[0])}", fix=fix)


# -- Files ------------------------------------------------------------------------------------------


def _library(name: str, source: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ConfigError(f"needs {name} to be read", source=source, fix="Run: pip install 'p2ptrain[data]'") from error


def _incomplete_python(what: str) -> ConfigError:
    fix = "Install the complete standard library, or name files"
    return ConfigError(f"this Python lacks {what}, a part of the embedded corpus", key="embedded", fix=fix)
