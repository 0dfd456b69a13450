"""The byte format of a segment of the write-ahead log, and how torn and damaged records are told apart.

    segment   header, then frames: a snapshot of the journal, then records in the order they were persisted
    header    magic, format version, digest of both with the segment's number
    frame     u32 length | 8 bytes BLAKE3 of the body | 4 bytes BLAKE3 of these, the segment and the offset | body

The head of a frame has its own digest, so that the length can be trusted: a frame whose body ends beyond the file was
torn by a power cut, and was never sent; a complete frame with a wrong digest was damaged later. Damage is an error
and is never cut off, because its record may have been sent. After Mohan et al., "ARIES" (TODS 1992), and the
logs of LevelDB and TigerBeetle, which make the same distinction."""

from __future__ import annotations

from pathlib import Path
from struct import Struct as Layout

import msgspec
from msgspec import Struct

from p2ptrain.core.events import Record, Saved
from p2ptrain.digest import digest
from p2ptrain.errors import DataError
from p2ptrain.store.formats import refuse_version

VERSION = 1
RECORD_BYTES_MAX = 2**31  # the largest is a snapshot of 65,536 rounds of a large swarm
SECTOR_BYTES = 512  # a disk writes a sector as a whole or not at all

_MAGIC = b"p2ptrain log"
_HEADER = Layout("<12sI8s")
_FRAME = Layout("<I8s4s")
FRAME_BYTES = _FRAME.size  # bytes before a body


class Snapshot(Struct, frozen=True, tag=True):
    """The result of all records before this segment."""

    saved: Saved
    is_forgetful: bool  # the log before this one was lost, and nothing was written since


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Record | Snapshot] = msgspec.msgpack.Decoder(Record | Snapshot)


def encoded(what: Record | Snapshot) -> bytes:
    return _ENCODER.encode(what)


def decoded(path: Path, at: int, body: bytes) -> Record | Snapshot:
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(path, at, f"not a record that this version knows: {error}") from error


def header(number: int, version: int = VERSION) -> bytes:
    return _HEADER.pack(_MAGIC, version, _header_digest(number, version))


def _header_digest(number: int, version: int) -> bytes:
    return digest("log header", number.to_bytes(8, "little"), version.to_bytes(4, "little"))[:8]


def frame(number: int, at: int, body: bytes) -> bytes:
    assert len(body) < RECORD_BYTES_MAX, "a record is within its bound"
    name = digest("log record", body)[:8]
    return _FRAME.pack(len(body), name, _frame_digest(number, at, len(body), name)) + body


def _frame_digest(number: int, at: int, length: int, name: bytes) -> bytes:
    place = b"".join(part.to_bytes(8, "little") for part in (number, at, length))
    return digest("log frame", place, name)[:4]


def frames_of(path: Path, number: int, data: bytes) -> tuple[list[tuple[int, bytes]], int]:
    """Returns the bodies in a segment with their offsets, and where they end. Raises DataError on damage."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise damaged(path, 0, "not the beginning of a log")
    _, version, name = _HEADER.unpack_from(data)
    refuse_version(path, version, VERSION)
    if name != _header_digest(number, version):
        raise damaged(path, 0, "its header has changed since it was written")
    bodies, at = [], _HEADER.size
    while at < len(data):
        body = _body_at(number, data, at)
        if body is None:
            if not _is_torn(number, data, at):
                raise damaged(path, at, "the record has changed since it was written")
            break
        bodies.append((at, body))
        at += _FRAME.size + len(body)
    if not bodies:
        raise damaged(path, at, "the snapshot is missing")
    return bodies, at


def _body_at(number: int, data: bytes, at: int) -> bytes | None:
    if len(data) - at < _FRAME.size:
        return None
    length, name, check = _FRAME.unpack_from(data, at)
    start = at + _FRAME.size
    body = data[start : start + length]
    is_whole = check == _frame_digest(number, at, length, name) and digest("log record", body)[:8] == name
    return body if is_whole else None


def _is_torn(number: int, data: bytes, at: int) -> bool:
    """Whether an incomplete frame was torn while it was written, rather than damaged later."""
    left = len(data) - at
    if left < _FRAME.size:
        return True
    length, name, check = _FRAME.unpack_from(data, at)
    if check == _frame_digest(number, at, length, name) and left < _FRAME.size + length:
        return True
    # Some file systems extend the file first: the unwritten rest is zeros, from the start of a sector.
    last = max(at, (len(data) - 1) // SECTOR_BYTES * SECTOR_BYTES)
    return not any(data[last:])


def damaged(path: Path, at: int, why: str) -> DataError:
    fix = (
        "It was intact once, so the disk or somebody has changed it. Restore the file, or move the directory "
        f"{path.parent} away: the node then asks its peers what it had said, and is silent until it knows"
    )
    return DataError(f"damaged at byte {at}: {why}", path=path, fix=fix)
