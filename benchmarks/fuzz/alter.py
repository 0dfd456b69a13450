"""Alters inputs: where the format is known, a part of its structure; else bits, lengths and pieces of other inputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from benchmarks.fuzz.formats import (
    Node,
    Table,
    UnreadableError,
    Written,
    read_msgpack,
    read_protobuf,
    write_json,
    write_msgpack,
    write_protobuf,
)

DEEP = 4_000  # of nesting: beyond what Python and the libraries take
BYTES_MAX = 2**17  # of an input; a decoder that takes megabytes does the same with them, more often
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**48 - 1, 2**48, 2**53, 2**63 - 1)
NUMBERS += (2**63, 2**64 - 1, -1, -2, -32, -33, -128, -(2**31), -(2**63))
FLOATS = (0.0, -0.0, 1.0, 0.5, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "\0", "a" * 70, "\u202e\U0001f600", "../x", "{0}", "%s", "1" * 5_000, "1/0", "0/1", "1/" + "9" * 5_000)
TEXTS += ("00" * 32, "AB" * 32, "-", "NaN", "a\nb", "\x1b[31m", "\ud800", "١", "1e5", " 1", "1_0", "x" * 3_000)
OCTETS = (b"", b"\0", b"\xff", b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"\xf8\x88", bytes(32), b"\xff" * 32)
OCTETS += (bytes(64), b"a" * 300, bytes(5_000))

Alter = Callable[[bytes, Sequence[bytes], Random], bytes]


def altered(kind: str, data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    """Returns an input like `data`, or like nothing. `others` are pieces to take from."""
    if rng.random() < 0.03:
        return rng.randbytes(rng.choice((0, 1, 2, 3, 8, 31, 64, 200, 2_000)))
    for _ in range(1 + (rng.random() < 0.25) + (rng.random() < 0.1)):
        how = KINDS[kind] if rng.random() < 0.75 else _bytes
        try:
            data = how(data, others, rng)
        except UnreadableError:
            data = _bytes(data, others, rng)
        data = data[:BYTES_MAX]
    return data


def _bytes(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    changed, at = bytearray(data), rng.randrange(len(data) + 1)
    until = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 32, 256)))
    match rng.randrange(8):
        case 0 if data:
            changed[at % len(data)] ^= 1 << rng.randrange(8)
        case 1 if data:
            changed[at % len(data)] = rng.choice((0, 0x7F, 0x80, 0xFF, 0xC0, rng.randrange(256)))
        case 2:
            return data[:at]
        case 3:
            del changed[at:until]
        case 4:
            changed[at:at] = data[at:until] * rng.choice((1, 2, 30))
        case 5:
            other = rng.choice(others)
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        case 6:
            changed[at:at] = rng.choice(OCTETS) + rng.randbytes(rng.randrange(3))
        case _:
            size = rng.choice((2, 4, 8))
            number = rng.choice(NUMBERS) % 256**size
            changed[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
    return bytes(changed)


# ---------------------------------------------------------------------------------------------------
# Trees


def _msgpack(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    root = read_msgpack(data)
    node = rng.choice(root.leaves())
    _alter_node(node, others, rng, lambda: read_msgpack(rng.choice(others)), _msgpack)
    if node.kind in ("array", "map") and rng.random() < 0.02:
        node.kind, node.value, node.items = "raw", rng.choice((b"\x91", b"\x81\xa0")) * DEEP + b"\xc0", []
    return write_msgpack(root)


def _protobuf(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    root = read_protobuf(data)
    node = rng.choice(root.leaves())
    if node.kind != "message" and rng.random() < 0.1:
        node.number = rng.choice((*range(1, 20), 2**28))
    elif rng.random() < 0.02:
        deep = b"\x0a\x00"
        for _ in range(200):  # protobuf's own limit is 100
            deep = write_protobuf(Node("bytes", deep, number=rng.choice((1, 2))))
        node.kind, node.value, node.items = "raw", deep, []
    else:
        _alter_node(node, others, rng, lambda: read_protobuf(rng.choice(others)), _msgpack)
    return write_protobuf(root)


def _alter_node(node: Node, others: Sequence[bytes], rng: Random, foreign: Callable[[], Node], inside: Alter) -> None:
    """Changes one node of a tree: its value, its form, its type, or the number of what is in it."""
    turn = rng.random()
    if node.items and turn < 0.7:
        at = rng.randrange(len(node.items))
        match rng.randrange(6):
            case 0:
                del node.items[at]
            case 1:
                node.items[at:at] = [node.items[at]] * rng.choice((1, 1, 2, 300))
            case 2:
                other = rng.randrange(len(node.items))
                node.items[at], node.items[other] = node.items[other], node.items[at]
            case 3:
                donor = rng.choice(foreign().leaves())
                node.items[at] = donor if _is_like(donor, node.items[at]) else node.items[at]
            case 4:
                node.items = node.items[:at]
            case _:
                node.is_wide = True
    elif turn < 0.1:
        node.is_wide = True
    elif isinstance(node.value, bytes) and node.kind != "raw":
        node.value = _octets(node.value, others, rng, inside)
    elif isinstance(node.value, float):
        node.value = rng.choice(FLOATS)
    elif isinstance(node.value, int):
        near = node.value + rng.choice((-1, 1, 256))
        node.value = rng.choice((near, rng.choice(NUMBERS), rng.getrandbits(rng.choice((4, 16, 47, 64)))))
    if turn > 0.9 and node.kind in TYPES:
        _alter_type(node, rng)


TYPES = {"int": int, "float": float, "str": bytes, "bin": bytes, "ext": bytes, "array": type(None), "map": type(None)}


def _alter_type(node: Node, rng: Random) -> None:
    node.kind = rng.choice([*TYPES])
    node.value = {int: rng.choice(NUMBERS), float: rng.choice(FLOATS), bytes: rng.choice(OCTETS)}.get(TYPES[node.kind])
    node.items = node.items if node.kind == "array" else []
    node.number = rng.choice((-128, -1, 0, 0x50, 127)) if node.kind == "ext" else 0


def _is_like(one: Node, other: Node) -> bool:
    """Whether one may stand for the other: a message is no field."""
    return (one.kind == "message") == (other.kind == "message")


def _octets(value: bytes, others: Sequence[bytes], rng: Random, inside: Alter) -> bytes:
    """Alters bytes in a tree: as a tree of their own, if they are one."""
    if len(value) > 1 and rng.random() < 0.6:
        try:
            return inside(value, others, rng)
        except UnreadableError:
            pass
    match rng.randrange(4):
        case 0:
            return rng.choice(OCTETS)
        case 1:
            return rng.randbytes(len(value))
        case 2:
            return bytes(len(value))
    return _bytes(value, others, rng)


# ---------------------------------------------------------------------------------------------------
# Texts

_STRANGE = tuple(
    Written(each)
    for each in (
        b"[" * DEEP + b"]" * DEEP, b'{"":' * DEEP + b"0" + b"}" * DEEP, b"NaN", b"Infinity", b"-0", b"1e999", b"1e-999",
        b"1" * 5_000, b"1.0", b"0.1", b"01", b'"\xff"', b'"\\ud800"', b'"\\u0000"', b'"' + b"a" * 70_000 + b'"', b"",
        b"1E400000000", b"-" + b"9" * 30, b'"\\uD83D\\uDE00"', b"\xef\xbb\xbf1", b"tru", b"/**/1",
    )
)  # fmt: skip


def _json(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    root = [_read_json(data)]
    places: list[tuple[list[Any], int]] = [(root, 0)]  # lists and pairs, and where in them
    for values, at in places:  # grows meanwhile
        match values[at]:
            case list(items):
                places.extend((items, place) for place in range(len(items)))
            case Table(pairs):
                places.extend((pair, 1) for pair in pairs)
    values, at = rng.choice(places)
    values[at] = rng.choice(_STRANGE) if rng.random() < 0.15 else _strange_json(values[at], others, rng)
    written = write_json(root[0], rng, is_loose=rng.random() < 0.05)
    return written + b"\n" if data.endswith(b"\n") else written


def _read_json(data: bytes) -> object:
    try:
        return json.loads(data, object_pairs_hook=lambda pairs: Table([list(each) for each in pairs]))
    except (ValueError, RecursionError) as error:
        raise UnreadableError from error


def _strange_json(value: object, others: Sequence[bytes], rng: Random) -> object:
    """Returns another value, mostly of the same type."""
    if rng.random() < 0.2:
        return rng.choice((None, True, 0, 1, 2**40, -1, 0.5, "", "x", [], Table([]), [[]], 1.5e300, *TEXTS))
    match value:
        case Table(pairs):
            _alter_pairs(pairs, rng)
        case list(items):
            items.extend([rng.choice(items or [0])] * rng.choice((1, 1, 400)))
        case str(text) if text[:1] in ("{", "["):  # a JSON of its own
            value = _json(text.encode(errors="surrogatepass"), others, rng).decode(errors="surrogateescape")
        case str(text):
            value = rng.choice((rng.choice(TEXTS), text.upper(), text + text, text[:-1], text + "\n", text[::-1]))
        case bool():
            value = not value
        case int():
            value = rng.choice((value + 1, *NUMBERS, 10**30, min(value, 2**64) * 1_000))
    return value


def _alter_pairs(pairs: list[list[Any]], rng: Random) -> None:
    if not pairs:
        pairs.append(["a", 0])
        return
    at = rng.randrange(len(pairs))
    key, value = pairs[at]
    match rng.randrange(4):
        case 0:
            del pairs[at]
        case 1:
            pairs.insert(rng.randrange(len(pairs) + 1), [key, value])
        case 2:
            pairs[at] = [rng.choice((*TEXTS, key.upper())), value]
        case _:
            pairs.insert(at, [rng.choice(TEXTS), rng.choice((0, "", None, []))])


def _toml(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    key, found, _ = lines[at].partition(b"=")
    match rng.randrange(6):
        case 0 | 1 if found:
            strange = rng.choice(
                (*(each.text for each in _STRANGE), b"1979-05-27", b"inf", b"0x" + b"f" * 5_000, b"'''")
            )
            lines[at] = (
                key
                + b"= "
                + rng.choice((strange, str(rng.choice(NUMBERS)).encode(), write_json(rng.choice(TEXTS), rng)))
            )
        case 2:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case 3:
            del lines[at]
        case 4:
            lines.insert(
                at,
                rng.choice((b"a" + b".a" * DEEP + b" = 1", b"[[model]]", b"[" + b"a." * 500 + b"a]", b'"\\u0000" = 1')),
            )
        case _:
            lines[at] = _bytes(lines[at], others, rng)
    return b"\n".join(lines)


_WORD = re.compile(rb"[A-Za-z0-9_.:-]+|[^A-Za-z0-9_.:-]")


def _text(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    """Alters a text without structure: an address, an HTTP request."""
    words = _WORD.findall(data)
    if not words:
        raise UnreadableError
    at = rng.randrange(len(words))
    match rng.randrange(6):
        case 0:
            words[at] = rng.choice(
                (str(rng.choice(NUMBERS)).encode(), rng.choice(TEXTS).encode(errors="surrogatepass"))
            )
        case 1:
            words[at:at] = words[at : at + rng.randrange(1, 6)] * rng.choice((1, 2, 200))
        case 2:
            del words[at : at + rng.randrange(1, 4)]
        case 3:
            words[at] = rng.choice(_WORD.findall(rng.choice(others)) or [b""])
        case 4:
            words[at] = rng.choice(
                (words[at].swapcase(), b"%00", b"%ff", b"%2e%2e", b"\r\n ", b"\t", b"\xff", b"\xc3\xa9")
            )
        case _:
            words[at] = _bytes(words[at], others, rng)
    return b"".join(words)


def _safetensors(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    """Alters the header of a file of tensors, and mostly corrects its length."""
    size = int.from_bytes(data[:8], "little")
    if not 8 <= size + 8 <= len(data):
        raise UnreadableError
    header = _json(data[8 : 8 + size].rstrip(b" "), others, rng)
    header += b" " * (-len(header) % 8)
    told = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64
    return told.to_bytes(8, "little") + header + data[8 + size :]


def _lines(data: bytes, others: Sequence[bytes], rng: Random) -> bytes:
    """Alters lines of JSON."""
    lines = data.splitlines(keepends=True)
    if not lines:
        raise UnreadableError
    at = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines.insert(rng.randrange(len(lines) + 1), lines[at])
        case 1:
            del lines[at]
        case _:
            lines[at] = _json(lines[at], others, rng)
    return b"".join(lines)


KINDS: dict[str, Alter] = {
    "bytes": _bytes,
    "msgpack": _msgpack,
    "protobuf": _protobuf,
    "json": _json,
    "json lines": _lines,
    "toml": _toml,
    "text": _text,
    "safetensors": _safetensors,
}
