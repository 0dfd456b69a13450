"""Reads msgpack and protobuf into trees that can also be written wrongly.

A library writes only what is right. These trees keep what a hostile writer may choose: the width of a number, strings
that are not UTF-8, a key twice, a length that lies.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from random import Random
from typing import Any

DEPTH_MAX = 32  # of what is read; what nests deeper stays as it is
ITEMS_MAX = 4_096


class UnreadableError(Exception):
    """These bytes are not of the format."""


@dataclass(slots=True)
class Node:
    """A value, and how it is written: `kind` is that of the format, and "raw" is written as it stands."""

    kind: str
    value: object = None
    items: list[Node] = field(default_factory=list)
    is_wide: bool = False  # longer than it need be
    number: int = 0  # of a field in protobuf, or of an extension type

    def leaves(self) -> list[Node]:
        """Returns this node and all below it."""
        found = [self]
        for each in found:
            found.extend(each.items)
        return found


# ---------------------------------------------------------------------------------------------------
# msgpack

_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"} | {
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_LENGTHS = {"str": (0xD9, 0xDA, 0xDB), "bin": (0xC4, 0xC5, 0xC6), "array": (0, 0xDC, 0xDD), "map": (0, 0xDE, 0xDF)}
_LENGTHS["ext"] = (0xC7, 0xC8, 0xC9)
_FIXED = {"str": (0xA0, 32), "array": (0x90, 16), "map": (0x80, 16)}
_WIDTHS = (">B", ">H", ">I")
_KINDS = {code: (kind, width) for kind, codes in _LENGTHS.items() for code, width in zip(codes, _WIDTHS, strict=True)}


def read_msgpack(data: bytes) -> Node:
    node, at = _msgpack_at(data, 0, 0)
    if at != len(data):
        raise UnreadableError
    return node


def _msgpack_at(data: bytes, at: int, depth: int) -> tuple[Node, int]:
    if at >= len(data) or depth > DEPTH_MAX:
        raise UnreadableError
    code, at = data[at], at + 1
    if code < 0x80 or code >= 0xE0:
        return Node("int", code if code < 0x80 else code - 256), at
    if code in (0xC0, 0xC2, 0xC3):
        return Node("raw", bytes([code])), at
    if layout := _NUMBERS.get(code):
        value, at = _number(data, at, layout)
        return Node("float" if code < 0xCC else "int", value), at
    if 0xD4 <= code <= 0xD8:
        kind, size = "ext", 1 << code - 0xD4
    elif found := next(((kind, code - low) for kind, (low, most) in _FIXED.items() if low <= code < low + most), None):
        kind, size = found
    elif code in _KINDS:
        kind, width = _KINDS[code]
        size, at = _number(data, at, width)
    else:
        raise UnreadableError
    if kind in ("array", "map"):
        return _items_at(data, at, kind, size, depth)
    number = 0
    if kind == "ext":
        number, at = _number(data, at, ">b")
    if at + size > len(data):
        raise UnreadableError
    return Node(kind, data[at : at + size], number=number), at + size


def _items_at(data: bytes, at: int, kind: str, size: int, depth: int) -> tuple[Node, int]:
    node, size = Node(kind), size * (2 if kind == "map" else 1)
    if size > min(ITEMS_MAX, len(data)):
        raise UnreadableError
    for _ in range(size):
        item, at = _msgpack_at(data, at, depth + 1)
        node.items.append(item)
    return node, at


def _number(data: bytes, at: int, layout: str) -> tuple[int, int]:
    size = struct.calcsize(layout)
    if at + size > len(data):
        raise UnreadableError
    return struct.unpack_from(layout, data, at)[0], at + size


def write_msgpack(node: Node) -> bytes:
    match node:
        case Node("raw", bytes(value)):
            return value
        case Node("int", int(value)):
            return _written_int(value, node.is_wide)
        case Node("float", value):
            return struct.pack(">Bd", 0xCB, value)
        case Node("array" | "map" as kind):
            inside = b"".join(map(write_msgpack, node.items))
            count = len(node.items) if kind == "array" else len(node.items) // 2
            return _head(kind, count, node.is_wide) + inside
        case Node(kind, bytes(value)):
            tag = struct.pack(">B", node.number % 256) if kind == "ext" else b""
            return _head(kind, len(value), node.is_wide) + tag + value
    raise AssertionError(node)


def _written_int(value: int, is_wide: bool) -> bytes:
    value = max(-(2**63), min(value, 2**64 - 1))
    if not is_wide and -32 <= value < 128:
        return bytes([value % 256])
    codes = range(0xCC, 0xD0) if value >= 0 else range(0xD0, 0xD4)
    for code in (0xCF if value >= 0 else 0xD3,) if is_wide else codes:
        size = 8 * struct.calcsize(_NUMBERS[code])
        if value < 2**size if value >= 0 else value >= -(2 ** (size - 1)):
            return struct.pack(">B" + _NUMBERS[code][1:], code, value)
    raise AssertionError(value)


def _head(kind: str, size: int, is_wide: bool) -> bytes:
    low, most = _FIXED.get(kind, (0, 0))
    if size < most and not is_wide:
        return bytes([low + size])
    for code, width in zip(_LENGTHS[kind], _WIDTHS, strict=True):
        if code and size < 256 ** struct.calcsize(width) and not (is_wide and width != ">I"):
            return bytes([code]) + struct.pack(width, size)
    raise AssertionError(size)


# ---------------------------------------------------------------------------------------------------
# protobuf: a message is an array of fields; a field is a varint, eight bytes, bytes or four bytes

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5


def read_protobuf(data: bytes, depth: int = 0) -> Node:
    """Fields of bytes that can be read as a message are read as one."""
    message, at = Node("message"), 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if not number:
            raise UnreadableError
        if wire == VARINT:
            value, at = _varint(data, at)
            message.items.append(Node("varint", value, number=number))
            continue
        size = {EIGHT: 8, FOUR: 4}.get(wire, -1)
        if wire == BYTES:
            size, at = _varint(data, at)
        if size < 0 or at + size > len(data) or len(message.items) > ITEMS_MAX:
            raise UnreadableError
        part, at = data[at : at + size], at + size
        message.items.append(_field(part, wire, number, depth))
    return message


def _field(part: bytes, wire: int, number: int, depth: int) -> Node:
    if wire != BYTES:
        return Node("fixed", part, number=number)
    if part and depth < DEPTH_MAX:
        try:
            return Node("field", items=[read_protobuf(part, depth + 1)], number=number)
        except UnreadableError:
            pass
    return Node("bytes", part, number=number)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at
    raise UnreadableError


def _written_varint(value: int, is_wide: bool = False) -> bytes:
    value, written = value % 2**64, bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    if is_wide and len(written) < 9:
        written[-1] |= 0x80
        written += b"\x80" * (8 - len(written)) + b"\0"
    return bytes(written)


def write_protobuf(node: Node) -> bytes:
    match node:
        case Node("raw", bytes(value)):
            return value
        case Node("message"):
            return b"".join(map(write_protobuf, node.items))
        case Node("varint", int(value)):
            return _written_varint(node.number << 3 | VARINT) + _written_varint(value, node.is_wide)
        case Node("fixed", bytes(value)):
            return _written_varint(node.number << 3 | (EIGHT if len(value) == 8 else FOUR)) + value
        case Node("field" | "bytes", value):
            inside = b"".join(map(write_protobuf, node.items)) or (value if isinstance(value, bytes) else b"")
            return _written_varint(node.number << 3 | BYTES) + _written_varint(len(inside), node.is_wide) + inside
    raise AssertionError(node)


# ---------------------------------------------------------------------------------------------------
# JSON: written from values of Python, and from texts that stand for what no value says


@dataclass(frozen=True, slots=True)
class Written:
    """A piece of JSON as it stands."""

    text: bytes


@dataclass(slots=True)
class Table:
    """An object of JSON, which may have a key twice."""

    pairs: list[list[Any]]  # key and value


def write_json(value: object, rng: Random, is_loose: bool = False) -> bytes:
    """Writes without white space, in the order of the keys, as the canonical forms are; or loosely."""
    gap = b" " if is_loose and rng.random() < 0.5 else b""
    match value:
        case Written(text):
            return text
        case Table(pairs):
            inside = [_json_text(key) + b":" + gap + write_json(each, rng, is_loose) for key, each in pairs]
            return b"{" + (b"," + gap).join(inside) + b"}"
        case list():
            return b"[" + (b"," + gap).join(write_json(each, rng, is_loose) for each in value) + b"]"
        case str():
            return _json_text(value)
        case bool() | None:
            return {True: b"true", False: b"false", None: b"null"}[value]
    return str(value).encode()


def _json_text(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode(errors="surrogatepass")
