"""Assigns data: maps (run seed, round, place in the roster) to positions of sequences.

Nobody hands out work. Each pass over the data is a pseudo-random permutation of all sequences, rounds
take consecutive slots of it, and within a round each place has slots of its own. So members never overlap
in a round, a pass of a fixed roster repeats nothing, and any node computes any other's shard from three
integers, without a table and in time that depends on the shard alone.

The permutation is a keyed, format-preserving one: a Feistel network over the smallest power of two that
holds all positions, walked along its cycle until it lands on a position that exists (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). A network of whatever functions is a bijection, and walking
a cycle from inside a set back into it is one of that set, so bijectivity holds by construction; the domain
is less than twice the number of sequences, so a walk takes two steps in the mean. The round function is
splitmix64's finaliser (Steele et al. 2014). This scatters; it keeps no secret.

All of it is arithmetic of 64-bit integers, the same on every machine. It is part of the protocol: another
permutation is another version.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2ptrain.digest import digest

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

FEISTEL_ROUNDS = 8  # Luby and Rackoff (1988) need four; narrow halves mix worse, and eight cost microseconds
SEQUENCES_MAX = 2**62  # positions stay int64


def shard(seed: int, round_number: int, place: int, places: int, count: int, sequences: int) -> Positions:
    """Returns the `count` sequences, of all `sequences`, that `place` of `places` trains on in a round.  # [count]

    With less data than one round needs, sharing cannot be avoided: the round then goes round all sequences,
    so that each is used once more than any other at most.
    """
    assert 0 <= place < places, f"place {place} of {places}"
    assert count > 0 and round_number >= 0, f"{count} sequences in round {round_number}"
    assert 0 < sequences <= SEQUENCES_MAX, f"{sequences} sequences"
    per_round = places * count
    rounds_per_pass = max(1, sequences // per_round)
    pass_number, round_of_pass = divmod(round_number, rounds_per_pass)
    first = round_of_pass * per_round + place * count
    slots = (np.arange(count, dtype=np.int64) + first) % sequences
    return permute(slots, sequences, _round_keys(seed, pass_number))


def permute(slots: Positions, size: int, keys: Words) -> Positions:
    """Returns the images of `slots`, all below `size`, under the permutation of range(size) that `keys` choose."""
    bits = max(2, (size - 1).bit_length())  # at least one bit in each half
    images = _feistel(slots.astype(np.uint64), bits, keys)
    while (outside := np.flatnonzero(images >= size)).size:
        images[outside] = _feistel(images[outside], bits, keys)
    return images.astype(np.int64)


def _feistel(words: Words, bits: int, keys: Words) -> Words:
    """A bijection of range(2**bits). The halves may differ by a bit, so they are changed in turn, not swapped."""
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    low, high = words & low_mask, words >> np.uint64(low_bits)
    for key in keys.reshape(-1, 2):  # a pair for each two rounds
        low = low ^ (_scatter(high, key[0]) & low_mask)
        high = high ^ (_scatter(low, key[1]) & high_mask)
    return (high << np.uint64(low_bits)) | low


def _scatter(words: Words, key: np.uint64) -> Words:
    """Applies splitmix64's finaliser, which relies on array products wrapping around at 2**64."""
    words = words ^ key
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int, pass_number: int) -> Words:  # [FEISTEL_ROUNDS]
    """Derives one pass's keys by BLAKE3, so that neighbouring seeds and passes have unrelated keys."""
    name = seed.to_bytes(8, "little") + pass_number.to_bytes(8, "little")
    halves = [digest("assignment keys", name, bytes([half])) for half in range(FEISTEL_ROUNDS // 4)]
    return np.frombuffer(b"".join(halves), dtype="<u8").astype(np.uint64)
