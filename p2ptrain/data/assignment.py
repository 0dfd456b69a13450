"""Assigns data: maps (run seed, round, place in the roster) to positions of sequences.

There is no scheduler. Each pass over the data is a pseudo-random permutation of all sequences, rounds take consecutive
slots of it, and within a round each place has its own slots. So members never overlap in a round, a pass of a fixed
roster repeats nothing, and any node computes any other's shard from a few agreed integers, without a table and in time
that depends only on the shard.

A run chooses one of three policies (`data.assignment`):

    drawn       every place has as many slots, and they lie anywhere in the data
    window      every place has as many slots, and for many rounds all of them lie in one window of the data, so that a
                node that cannot keep the whole set fetches each piece once a pass; windows are drawn, then sequences
    capability  as drawn, but a place has slots in proportion to the steps that its node has lately taken, counted
                on in the agreed state (p2ptrain/share.py)

The permutation is a keyed, format-preserving one: a Feistel network over the smallest power of two that holds all
positions, walked along its cycle until it lands on a position that exists (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002). A Feistel network is a bijection for any round functions, and walking a cycle from a set back
into the set is a bijection of that set; the domain is less than twice the number of sequences, so a walk takes at most
two steps on average. The round function is splitmix64's finaliser (Steele et al. 2014). This only scatters; it is no
cipher.

Everything is 64-bit integer arithmetic, the same on every machine. It is part of the protocol: a different
permutation is a different version."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2ptrain.digest import digest
from p2ptrain.share import PassSlots

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

FEISTEL_ROUNDS = 8  # Luby and Rackoff (1988) need four; narrow halves mix worse, and eight take microseconds
SEQUENCES_MAX = 2**62  # positions stay int64
# Pieces of a window. They take little room on a disk, and a round draws its sequences from as many a place; a guess.
WINDOW_PIECES = 64


def shard(seed: int, round_number: int, place: int, places: int, count: int, sequences: int) -> Positions:
    """Returns the `count` sequences, of all `sequences`, that `place` of `places` trains on in a round.  # [count]

    With less data than one round needs, members have to share sequences: the round then cycles through all of them, so
    that no two sequences differ by more than one in how often they are used."""
    assert 0 <= place < places, f"place {place} of {places}"
    assert count > 0 and round_number >= 0, f"{count} sequences in round {round_number}"
    assert 0 < sequences <= SEQUENCES_MAX, f"{sequences} sequences"
    per_round = places * count
    rounds_per_pass = max(1, sequences // per_round)
    pass_number, round_of_pass = divmod(round_number, rounds_per_pass)
    first = round_of_pass * per_round + place * count
    slots = (np.arange(count, dtype=np.int64) + first) % sequences
    return permute(slots, sequences, _keys("assignment keys", seed, pass_number))


def shard_in_window(
    seed: int, round_number: int, place: int, places: int, count: int, sequences: int, window: int
) -> Positions:
    """Returns what `shard` does, by window: of `window` sequences at most, if a round needs no more.  # [count]

    A pass consists of turns of many rounds, and in each turn every place has a window of its own. A pass's windows
    begin anywhere and follow one another; those of its last turn, which is shorter, come last. With less data than one
    round needs, this is `shard`."""
    assert window > 0, f"a window of {window} sequences"
    rounds, longest = sequences // (places * count), max(1, window // count)  # of a pass, and of a turn
    if not rounds:
        return shard(seed, round_number, place, places, count, sequences)
    pass_number, round_of_pass = divmod(round_number, rounds)
    turn, round_of_turn = divmod(round_of_pass, longest)
    before, length, windows = 0, longest, rounds // longest * places
    if turn == rounds // longest:
        before, length, windows, turn = windows, rounds % longest, places, 0
    keys, size = _keys("assignment keys", seed, pass_number), length * count
    start, number = permute(np.array([0]), sequences, keys), permute(np.array([turn * places + place]), windows, keys)
    slots = np.arange(count, dtype=np.int64) + round_of_turn * count
    inside = permute(slots, size, _keys("window keys", seed, pass_number, before + int(number[0])))
    return (start + before * longest * count + number * size + inside) % sequences


def shard_of_slots(seed: int, slots: PassSlots, sequences: int) -> Positions:
    """Returns the sequences at some slots of a round, by capability.  # [slots.size]

    The round in which a pass ends takes the rest from that pass's first slots, so that its members do not overlap; the
    next pass lacks as many of its own."""
    chosen = (np.arange(slots.size, dtype=np.int64) + (slots.start + slots.first) % sequences) % sequences
    return permute(chosen, sequences, _keys("assignment keys", seed, slots.start // sequences))


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


def _keys(domain: str, *numbers: int) -> Words:  # [FEISTEL_ROUNDS]
    """Derives a permutation's keys by BLAKE3, so that those of neighbouring seeds and passes are unrelated."""
    name = b"".join(number.to_bytes(8, "little") for number in numbers)
    halves = [digest(domain, name, bytes([half])) for half in range(FEISTEL_ROUNDS // 4)]
    return np.frombuffer(b"".join(halves), dtype="<u8").astype(np.uint64)
