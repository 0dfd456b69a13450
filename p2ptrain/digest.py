"""BLAKE3 digests with a domain, and the Merkle tree over pieces of 1 MiB.

A digest covers bytes together with their purpose: the domain is hashed first, so that a payload can never pass as a
state piece. Trees (Merkle 1987; in the shape of RFC 6962) let a receiver check each piece as it arrives: an odd last
node moves up unchanged, leaves and inner nodes have domains of their own, and the root also covers the size in bytes,
so that no tree is a prefix of another.

It imports nothing else of the package: the core names payloads with it, `exact` the state, the network checks pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

DIGEST_BYTES = 32
PIECE_BYTES = 2**20  # small enough to check and forward while the next one arrives


def digest(domain: str, *parts: bytes | memoryview, size: int = DIGEST_BYTES) -> bytes:
    """Returns the 32-byte digest of `parts` in a `domain`, or its first `size` bytes: BLAKE3 goes on for ever."""
    hasher = blake3(derive_key_context=f"p2ptrain 1 {domain}")
    for part in parts:
        hasher.update(part)
    return hasher.digest(size)


def piece_count(size: int) -> int:
    return max(1, -(-size // PIECE_BYTES))


def piece_bytes(size: int, index: int) -> int:
    """Returns the length of a piece of `size` bytes: a mebibyte, except for the last one."""
    return min(PIECE_BYTES, size - index * PIECE_BYTES)


def leaf_digest(index: int, piece: bytes | memoryview) -> bytes:
    return digest("leaf", index.to_bytes(8, "little"), piece)


def leaf_digests(data: bytes | memoryview) -> list[bytes]:
    """Returns the digests of all pieces of `data`."""
    view = memoryview(data).cast("B")
    pieces = range(piece_count(len(view)))
    return [leaf_digest(index, view[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]) for index in pieces]


def merkle_root(leaves: Sequence[bytes], size: int) -> bytes:
    """Returns the root over `leaves`, the digests of the pieces of `size` bytes."""
    assert leaves, "a tree has at least one leaf"
    level = list(leaves)
    while len(level) > 1:
        paired = [digest("node", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(level) & ~1 :]
    return digest("root", size.to_bytes(8, "little"), level[0])


def leaf(leaves: bytes, index: int) -> bytes:
    """Returns one of `leaves`, the concatenated digests of all pieces."""
    return leaves[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def is_piece(leaves: bytes, size: int, index: int, piece: bytes) -> bool:
    """Whether these bytes are this piece of the tree."""
    return len(piece) == piece_bytes(size, index) and leaf_digest(index, piece) == leaf(leaves, index)


def proves(leaves: bytes, size: int, root: bytes) -> bool:
    """Whether these digests lead to the root."""
    if len(leaves) != piece_count(size) * DIGEST_BYTES:
        return False
    return merkle_root([leaf(leaves, index) for index in range(piece_count(size))], size) == root


def leaves_of(data: bytes | memoryview, root: bytes) -> bytes:
    """Returns the concatenated digests of the pieces; empty if they do not lead to this root."""
    leaves = b"".join(leaf_digests(data))
    return leaves if proves(leaves, memoryview(data).nbytes, root) else b""
