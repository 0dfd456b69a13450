"""Reads files as documents, and cuts long texts.

A document is the unit that is held out or trained on, and an end-of-document token follows it. In JSON
lines it is the "text" of a line. In any other file it is a block of at most 16 KiB that ends with a line
if possible: text files have no boundaries that a program could see, and with blocks the memory and the
granularity of the split are the same for a note and for a book.

Nothing is repaired. Bytes that are not UTF-8 are an error that names the file and the offset, because
replacing them would teach the model the replacement character, and text in another encoding, or a
compressed file, would consist of little else. Line ends are left as they are; a byte order mark at the
start of a file is dropped.

The embedded corpus needs no download: it is the language reference and the standard library's sources, which
come with every Python. They differ between Python versions, so two machines may well make two different data
sets from it; a run names the one that its creator made.
"""

from __future__ import annotations

import io
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from p2ptrain.errors import ConfigError

BLOCK_BYTES_MAX = 16 * 2**10  # a few pages: small enough to hold out a hundredth of a megabyte
LINE_BYTES_MAX = 16 * 2**20  # three long novels; a line is held in memory as a whole
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LINES_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class TextFile:
    """A text to read documents from; `name` is for error messages."""

    name: str
    size: int  # bytes
    open: Callable[[], BinaryIO]
    is_lines: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    source_bytes: int  # its size where it was read


class _JsonDocument(msgspec.Struct):
    """A line of a JSON-lines file; fields other than its text are ignored."""

    text: str


def file_sources(files: Sequence[Path]) -> list[TextFile]:
    sources = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(
                f"cannot be read: {error.strerror}", source=str(path), fix="Name text files or JSON lines"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("not a file", source=str(path), fix="Name the files in it")
        is_lines = path.suffix.lower() in LINES_SUFFIXES
        sources.append(TextFile(str(path), status.st_size, _opener(path), is_lines))
    return sources


def embedded_sources() -> list[TextFile]:
    """Returns the language reference and the top-level modules of the standard library, in a fixed order."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415  (half a megabyte that nothing else needs)
    except ImportError as error:
        raise _incomplete_python("pydoc_data") from error
    sources = [_text_source(f"language reference, {name}", topics[name]) for name in sorted(topics)]
    library = Path(sysconfig.get_path("stdlib"))
    # Taken from Python's own list of names: distributions add files of their own, which contain paths.
    modules = [library / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    modules = [path for path in modules if path.is_file()]
    if not modules:
        raise _incomplete_python(str(library))
    return sources + file_sources(modules)


def documents(source: TextFile) -> Iterator[Document]:
    """Yields the documents of `source` in order, skipping empty ones."""
    try:
        with source.open() as file:
            yield from _lines(file, source.name) if source.is_lines else _blocks(file, source.name)
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", source=source.name, fix="Check the file and its permissions"
        ) from error


def _blocks(file: BinaryIO, name: str) -> Iterator[Document]:
    carry = file.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK)
    offset = file.tell() - len(carry)  # of the next block
    while block := carry + file.read(BLOCK_BYTES_MAX - len(carry)):
        cut = _cut(block) if len(block) == BLOCK_BYTES_MAX else len(block)
        block, carry = block[:cut], block[cut:]
        yield Document(_text(block, name, offset), len(block))
        offset += len(block)


def _cut(block: bytes) -> int:
    """Returns where to cut a full block: after its last line, or else before its last character, in case it is cut."""
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
        raise ConfigError(
            f"not UTF-8 ({error.reason})",
            source=f"{name}, byte {offset + error.start}",
            fix="Unpack the file if it is compressed, or convert it to UTF-8, for example with iconv",
        ) from error


def _lines(file: BinaryIO, name: str) -> Iterator[Document]:
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(
                f"longer than {LINE_BYTES_MAX} bytes", source=where, fix="Put each document on its own line"
            )
        content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if not content.strip():
            continue
        try:
            text = msgspec.json.decode(content, type=_JsonDocument).text
        except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
            raise ConfigError(
                str(error), source=where, fix='Each line must be a JSON object with a string under "text"'
            ) from error
        if text:
            yield Document(text, len(line))


def _opener(path: Path) -> Callable[[], BinaryIO]:
    return lambda: path.open("rb")


def _text_source(name: str, text: str) -> TextFile:
    encoded = text.encode()
    return TextFile(name, len(encoded), lambda: io.BytesIO(encoded))


def _incomplete_python(what: str) -> ConfigError:
    return ConfigError(
        f"this Python lacks {what}, a part of the embedded corpus",
        key="embedded",
        fix="Install the complete standard library, or name files",
    )
