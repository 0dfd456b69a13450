"""Digests and Merkle roots, checked against a direct implementation of RFC 6962 and for inputs that must differ."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.digest import PIECE_BYTES, digest, leaf_digest, leaf_digests, merkle_root, piece_count


def keyed(domain: str, data: bytes) -> bytes:
    return blake3(data, derive_key_context=f"p2ptrain 1 {domain}").digest()


def rfc_6962(leaves: list[bytes]) -> bytes:
    """Computes the root recursively, splitting at the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return keyed("node", rfc_6962(leaves[:split]) + rfc_6962(leaves[split:]))


def test_a_digest_is_the_blake3_of_its_parts_under_the_domain() -> None:
    assert digest("run id", b"ab", memoryview(b"c")) == keyed("run id", b"abc")


def test_digests_are_the_same_in_every_release() -> None:
    assert digest("run id", b"{}").hex() == "66933b2964bdbbfa07784bbdfe5132bde964325a46efd475f54c81a094a07a90"


def test_domains_separate_the_same_bytes() -> None:
    assert len({digest(domain, b"x") for domain in ("leaf", "node", "root", "run id")}) == 4


@pytest.mark.parametrize(
    ("size", "count"),
    [(0, 1), (1, 1), (PIECE_BYTES, 1), (PIECE_BYTES + 1, 2), (3 * PIECE_BYTES, 3)],
)
def test_pieces_cover_every_byte_and_nothing_has_one_piece(size: int, count: int) -> None:
    assert piece_count(size) == count


def test_leaves_are_the_digests_of_pieces_with_their_place() -> None:
    data = bytes(PIECE_BYTES) + b"tail"
    expected = [
        keyed("leaf", (0).to_bytes(8, "little") + bytes(PIECE_BYTES)),
        keyed("leaf", (1).to_bytes(8, "little") + b"tail"),
    ]
    assert leaf_digests(data) == expected
    assert leaf_digest(1, b"tail") == expected[1]


def test_equal_pieces_in_different_places_have_different_leaves() -> None:
    first, second = leaf_digests(bytes(2 * PIECE_BYTES))
    assert first != second


@given(count=st.integers(1, 70), size=st.integers(0, 2**60))
def test_a_root_is_rfc_6962s_tree_and_the_size(count: int, size: int) -> None:
    leaves = [bytes([index]) * 32 for index in range(count)]
    assert merkle_root(leaves, size) == keyed("root", size.to_bytes(8, "little") + rfc_6962(leaves))


@given(count=st.integers(2, 40), data=st.data())
def test_a_root_depends_on_every_leaf_and_on_their_order(count: int, data: st.DataObject) -> None:
    leaves = [bytes([index]) * 32 for index in range(count)]
    changed, other = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    altered, swapped = list(leaves), list(leaves)
    altered[changed] = b"\xff" * 32
    swapped[changed], swapped[other] = swapped[other], swapped[changed]
    assert len({merkle_root(each, 1) for each in (leaves, altered, swapped)}) == 3


def test_a_tree_is_not_the_tree_of_its_inner_nodes_nor_one_with_its_last_leaf_twice() -> None:
    leaves = [bytes([index]) * 32 for index in range(3)]
    inner = [keyed("node", leaves[0] + leaves[1]), leaves[2]]
    roots = [merkle_root(leaves, 3), merkle_root(inner, 2), merkle_root([*leaves, leaves[2]], 4)]
    assert len(set(roots)) == 3


def test_a_root_covers_the_number_of_bytes() -> None:
    assert merkle_root([bytes(32)], 1) != merkle_root([bytes(32)], 2)


def test_a_tree_without_leaves_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="at least one leaf"):
        merkle_root([], 0)
