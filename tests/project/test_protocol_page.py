"""docs/protocol.md matches the code: fields of messages, digests and shards.

What is computed here follows the page and nothing else; a node that somebody else writes would do the same.
"""

from __future__ import annotations

import re
from math import comb
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from msgspec import Struct

from p2ptrain.core import history, manifest, messages, state
from p2ptrain.core.messages import Ballot, Vote, signed_bytes
from p2ptrain.data.assignment import shard, shard_in_window, shard_of_slots
from p2ptrain.data.packing import Masking
from p2ptrain.digest import leaf_digests, merkle_root
from p2ptrain.exact.codec import Contribution, PayloadFormat, index_widths, pack
from p2ptrain.exact.transform import COSINES
from p2ptrain.share import PassSlots

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
KINDS = {
    str(kind.__struct_config__.tag): kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Struct) and kind.__struct_config__.tag is not None
}


def fields_in(text: str) -> list[str]:
    """Returns the names in a table cell, without the remarks in brackets."""
    while "(" in text:
        text = re.sub(r"\([^()]*\)", "", text)
    return [each.strip().partition(":")[0] for each in text.split(",") if each.strip()]


def section(number: int) -> str:
    return PAGE.partition(f"\n## {number}. ")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def test_every_message_is_told_with_its_fields_in_their_order() -> None:
    told = {name.strip("`"): fields for name, fields, *_ in rows(section(4)) if name.startswith("`")}
    assert told.keys() == KINDS.keys()
    for tag, kind in KINDS.items():
        assert [name.split()[0] for name in fields_in(told[tag])] == list(kind.__struct_fields__), tag


def test_the_agreed_state_and_the_manifest_are_told_with_their_fields_in_their_order() -> None:
    told = [name for cells in rows(section(5)) for name in fields_in(cells[0]) if name != "field"]
    assert told == list(state.AgreedState.__struct_fields__)
    told = [name for cells in rows(section(7)) for name in fields_in(cells[0]) if name != "field"]
    assert told == list(manifest.Manifest.__struct_fields__)
    named = {cells[0].split("`")[1]: cells[1] for cells in rows(section(9)) if cells[0].startswith("`")}
    assert fields_in(named["Beginning"])[:5] == list(history.Beginning.__struct_fields__)[:5]


def test_the_basis_is_the_one_that_is_used() -> None:
    table = re.findall(r"^ {4,}[\d ]+$", section(13), re.MULTILINE)
    assert tuple(int(number) for line in table for number in line.split()) == COSINES


def told_digest(domain: str, *parts: bytes) -> bytes:
    return blake3(b"".join(parts), derive_key_context=f"p2ptrain 1 {domain}").digest()


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def test_digests_and_signed_bytes_are_as_told() -> None:
    data = bytes(range(256)) * 10_000  # three pieces
    pieces = [data[at : at + 2**20] for at in range(0, len(data), 2**20)]
    a, b, c = (told_digest("leaf", u64(index), piece) for index, piece in enumerate(pieces))
    top = told_digest("node", told_digest("node", a, b), c)
    assert merkle_root(leaf_digests(data), len(data)) == told_digest("root", u64(len(data)), top)
    vote = Vote(b"b" * 32, 7, 1, Ballot.PRECOMMIT, b"m" * 32, b"k" * 32)
    body = msgspec.msgpack.encode(["vote", b"b" * 32, 7, 1, 2, b"m" * 32, b"k" * 32])
    assert signed_bytes(b"r" * 32, vote) == b"p2ptrain 2 vote\0" + b"r" * 32 + told_digest("message vote", body)


def told_keys(domain: str, *numbers: int) -> list[int]:
    words = [told_digest(domain, *map(u64, numbers), bytes([half])) for half in range(2)]
    keys: list[int] = np.frombuffer(b"".join(words), "<u8").tolist()
    return keys


def told_permutation(word: int, size: int, keys: list[int]) -> int:
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    low, high = word % 2**low_bits, word >> low_bits
    for k0, k1 in zip(keys[::2], keys[1::2], strict=True):
        low ^= mix(high ^ k0) % 2**low_bits
        high ^= mix(low ^ k1) % 2 ** (bits - low_bits)
    found = high << low_bits | low
    return found if found < size else told_permutation(found, size, keys)


def told_shard(seed: int, number: int, place: int, places: int, count: int, sequences: int) -> list[int]:
    passed, x = divmod(number, max(1, sequences // (places * count)))
    keys, first = told_keys("assignment keys", seed, passed), x * places * count + place * count
    return [told_permutation((first + i) % sequences, sequences, keys) for i in range(count)]


def told_window(seed: int, r: int, g: int, G: int, n: int, Q: int, W: int) -> list[int]:  # noqa: N803
    P, R = Q // (G * n), max(1, W // n)  # noqa: N806
    passed, x = divmod(r, P)
    turn, y = divmod(x, R)
    T = P // R  # noqa: N806
    d, t, v, V = (0, R, turn * G + g, T * G) if turn < T else (T * G, P % R, g, G)  # noqa: N806
    keys = told_keys("assignment keys", seed, passed)
    o = told_permutation(v, V, keys)
    inner = told_keys("window keys", seed, passed, d + o)
    start = told_permutation(0, Q, keys) + d * R * n + o * t * n
    return [(start + told_permutation(y * n + i, t * n, inner)) % Q for i in range(n)]


@pytest.mark.parametrize("sequences", [3, 1_000, 4_097])
def test_a_shard_is_as_told(sequences: int) -> None:
    for number in (1, 40, 12_345):
        assert shard(11, number, 2, 5, 8, sequences).tolist() == told_shard(11, number, 2, 5, 8, sequences)


@pytest.mark.parametrize("number", [None, 12])
def test_masks_are_as_told(number: int | None) -> None:
    place, tokens = 9, [1 + number % 255 for number in range(10_001)]
    domain, body = ("held-out masks", u64(place)) if number is None else ("masks", u64(5) + u64(number) + u64(place))
    hasher = blake3(body, derive_key_context=f"p2ptrain 1 {domain}")
    words = np.frombuffer(hasher.digest(8 * 10_000), "<u4").tolist()
    told = []
    for t, a, b in zip(tokens, words[:10_000], words[10_000:], strict=False):
        read = 256 if a < 2**32 * 120 // 1000 else b % 256 if a < 2**32 * 135 // 1000 else t
        told.append((read, t) if a < 2**32 * 150 // 1000 else (t, -1))
    drawn = Masking(5, 256, 256, 0).draw(np.array([tokens]), np.array([place]), number)[0]
    assert list(map(tuple, drawn.T.tolist())) == told


@pytest.mark.parametrize("window", [3, 70, 10_000])
def test_a_shard_by_window_is_as_told(window: int) -> None:
    for number in (1, 101, 12_345):  # of 102 a pass, so that the second is in a last turn
        assert shard_in_window(11, number, 2, 5, 8, 4_097, window).tolist() == told_window(
            11, number, 2, 5, 8, 4_097, window
        )


def test_a_shard_by_capability_is_as_told() -> None:
    """With the c of three keys, of which ours is the second, in a round of ten steps of three sequences."""
    assigned, steps, m, Q, ahead = 1_234, (10, 4, 7), 3, 1_000, 1  # noqa: N806
    first = m * (assigned + ahead * sum(steps) + steps[0])
    keys = told_keys("assignment keys", 11, (first - m * steps[0]) // Q)
    told = [told_permutation((first + i) % Q, Q, keys) for i in range(m * steps[1])]
    slots = PassSlots(m * (assigned + sum(steps)), m * sum(steps), m * steps[0], m * steps[1])
    assert shard_of_slots(11, slots, Q).tolist() == told


def test_a_payload_is_as_told() -> None:
    """Of two chunks of 8 by 8 with four signs each: bits in a row, the lowest first."""
    area, k = 64, 4
    low_bits, ranked, upper_bits = index_widths(area, k)
    chosen = np.array([[0, 5, 6, 63], [1, 2, 3, 40]], np.uint16)
    values = np.array([[1, -1, 1, -1], [-1, -1, 1, 1]], np.int8)
    positions = (area >> low_bits) + k - 1
    assert ranked
    assert upper_bits == (comb(positions, k) - 1).bit_length()
    ranks = [sum(comb((int(x) >> low_bits) + j, j + 1) for j, x in enumerate(row)) for row in chosen]

    def section_of(fields: list[int], width: int) -> bytes:
        whole = sum(each << (width * at) for at, each in enumerate(fields))
        return whole.to_bytes(-(-len(fields) * width // 8), "little")

    told = section_of(ranks, upper_bits)
    told += section_of([int(x) % 2**low_bits for x in chosen.reshape(-1)], low_bits)
    told += section_of([int(value < 0) for value in values.reshape(-1)], 1)
    form = PayloadFormat(2, 0, area, k, 1, low_bits, ranked, upper_bits)
    assert pack(Contribution(chosen, values), form) == told
