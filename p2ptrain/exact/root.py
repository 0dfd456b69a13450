"""The state root: the digest by which nodes compare their replicas.

The state is all parameters in the model's order, fp32, little-endian, one after another. Its root is a
Merkle root over pieces of 1 MiB (see `digest`). Hashing a large state would delay the
round too long, so above `full_root_bytes_max` most roots cover a sample of pieces, drawn by the digest of the
round's manifest: the sample is unknown until the round is decided, and a replica that differs in a share s of
its pieces passes n samples with probability (1 - s)**n. Every `full_root_rounds` the root covers all pieces, and
only such roots are used for catching up."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from p2ptrain.capacity import cores
from p2ptrain.config import StateConfig
from p2ptrain.digest import PIECE_BYTES, digest, leaf_digest, merkle_root, piece_count
from p2ptrain.exact.kernels.launches import attempt, is_usable
from p2ptrain.exact.kernels.launches import leaves as leaves_on_card

FLOAT_BYTES = 4
HASHING_THREADS_MAX = 8  # about as many as main memory feeds; a guess
FETCHED_PIECES = 64  # copied from a device at a time: the whole state would double the memory

assert sys.byteorder == "little", "the state is hashed as it is in memory"


def covered_pieces(size: int, config: StateConfig, round_number: int, manifest_digest: bytes) -> list[int] | None:
    """Draws the pieces that a round's root covers; returns None if it covers all."""
    pieces = piece_count(size)
    full = size <= config.full_root_bytes_max or round_number % config.full_root_rounds == 0
    if full or pieces <= 2 * config.partial_root_leaves:  # sampling half or more saves little
        return None
    chosen: set[int] = set()
    draw = 0
    while len(chosen) < config.partial_root_leaves:
        drawn = digest("root sample", manifest_digest, draw.to_bytes(8, "little"))
        chosen.add(int.from_bytes(drawn, "little") % pieces)  # with 256 bits the bias of the remainder is negligible
        draw += 1
    return sorted(chosen)


def state_root(state: Tensor, pieces: list[int] | None = None) -> bytes:
    """Computes the root of the flat fp32 state, or of a sample of its pieces."""
    assert state.dtype == torch.float32
    size = state.numel() * FLOAT_BYTES
    each = PIECE_BYTES // FLOAT_BYTES
    if pieces is None:
        return merkle_root(state_leaves(state), size)
    leaves = [leaf_digest(index, octets(state[index * each : (index + 1) * each])) for index in pieces]
    return _partial_root(pieces, leaves, size)


def state_leaves(state: Tensor) -> list[bytes]:
    """Hashes all pieces of the flat fp32 state, on several cores: BLAKE3 releases the interpreter lock."""
    each, leaves = PIECE_BYTES // FLOAT_BYTES, list[bytes]()
    if is_usable(state.device) and (found := attempt(partial(leaves_on_card, state), state.device)):
        return found
    with ThreadPoolExecutor(min(cores(), HASHING_THREADS_MAX)) as pool:
        for block in torch.split(state, FETCHED_PIECES * each):
            pieces = map(octets, torch.split(block.cpu(), each))
            leaves += pool.map(leaf_digest, itertools.count(len(leaves)), pieces)
    return leaves


def root_of_leaves(leaves: Sequence[bytes], size: int, pieces: list[int] | None = None) -> bytes:
    """Computes the same root from the digests of all pieces, without the state."""
    if pieces is None:
        return merkle_root(leaves, size)
    return _partial_root(pieces, [leaves[index] for index in pieces], size)


def _partial_root(pieces: list[int], leaves: list[bytes], size: int) -> bytes:
    names = b"".join(index.to_bytes(8, "little") for index in pieces)
    return digest("partial root", names, merkle_root(leaves, size))


def octets(part: Tensor) -> memoryview:
    """Returns a tensor as bytes, without a copy if it is contiguous and in main memory."""
    return part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
