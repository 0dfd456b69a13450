"""Assigns data: maps (run seed, round, place in the roster) to positions of sequences.

There is no scheduler. Each pass over the data is a pseudo-random permutation of all sequences, rounds
take consecutive slots of it, and within a round each place has its own slots. So members never overlap
in a round, a pass of a fixed roster repeats nothing, and any node computes any other's shard from three
integers, without a table and in time that depends only on the shard.

The permutation is a keyed, format-preserving one: a Feistel network over the smallest power of two that
holds all positions, walked along its cycle until it lands on a position that exists (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). A Feistel network is a bijection for
any round functions, and walking a cycle from a set back into the set is a bijection of that set; the domain
is less than twice the number of sequences, so a walk takes at most two steps on average. The round function is
splitmix64's finaliser (Steele et al. 2014). This only scatters; it is no cipher.

Everything is 64-bit integer arithmetic, the same on every machine. It is part of the protocol: a different
permutation is a different version.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2ptrain.digest import digest

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

FEISTEL_ROUNDS = 8  # Luby and Rackoff (1988) need four; narrow halves mix worse, and eight take microseconds
SEQUENCES_MAX = 2**62  # positions stay int64


def shard(seed: int, round_number: int, place: int, places: int, count: int, sequences: int) -> Positions:
    """Returns the `count` sequences, of all `sequences`, that `place` of `places` trains on in a round.  # [count]

    With less data than one round needs, members have to share sequences: the round then cycles through all of
    them, so that no two sequences differ by more than one in how often they are used.
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
    """Maps `slots`, all below `size`, through the permutation of range(size) that `keys` select."""
    bits = max(2, (size - 1).bit_length())  # at least one bit in each half
    images = _feistel(slots.astype(np.uint64), bits, keys)
    while (outside := np.flatnonzero(images >= size)).size:
        images[outside] = _feistel(images[outside], bits, keys)
    return images.astype(np.int64)


def _feistel(words: Words, bits: int, keys: Words) -> Words:
    """Permutes range(2**bits). The halves may differ in width by a bit, so they are changed in turn, not swapped."""
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    low, high = words & low_mask, words >> np.uint64(low_bits)
    for key in keys.reshape(-1, 2):  # a pair of keys for every two rounds
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
