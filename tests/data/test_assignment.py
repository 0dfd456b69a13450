"""The assignment: every node computes it for all, shards do not overlap, and a pass uses all data."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.data.assignment import shard, shard_in_window, shard_of_slots
from p2ptrain.digest import digest
from p2ptrain.share import PassSlots

MASK = 2**64 - 1


def of_round(seed: int, round_number: int, places: int, count: int, sequences: int) -> np.ndarray:
    return np.concatenate([shard(seed, round_number, place, places, count, sequences) for place in range(places)])


def in_plain_integers(seed: int, pass_number: int, slot: int, size: int) -> int:
    """The permutation by definition, one slot at a time and without numpy."""

    def scatter(word: int, key: int) -> int:
        word ^= key
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
        word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
        return word ^ word >> 31

    name = seed.to_bytes(8, "little") + pass_number.to_bytes(8, "little")
    stream = digest("assignment keys", name, b"\0") + digest("assignment keys", name, b"\1")
    keys = [int.from_bytes(stream[at : at + 8], "little") for at in range(0, 64, 8)]
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    word = slot
    while True:
        low, high = word % 2**low_bits, word >> low_bits
        for number, key in enumerate(keys):
            if number % 2:
                high ^= scatter(low, key) % 2 ** (bits - low_bits)
            else:
                low ^= scatter(high, key) % 2**low_bits
        word = high << low_bits | low
        if word < size:
            return word


@given(
    seed=st.integers(0, 2**63 - 1),
    pass_number=st.integers(0, 2**40),
    size=st.integers(1, 2**62),
    slot=st.integers(0, 2**62 - 1),
)
def test_shards_agree_with_the_definition_in_plain_integers(seed: int, pass_number: int, size: int, slot: int) -> None:
    slot %= size
    # A round of one sequence at the only place: the slot of round r is r modulo the size.
    expected = in_plain_integers(seed, pass_number, slot, size)
    assert shard(seed, pass_number * size + slot, 0, 1, 1, size).tolist() == [expected]


@given(seed=st.integers(0, 2**63 - 1), pass_number=st.integers(0, 1_000), size=st.integers(1, 3_000))
def test_a_pass_is_a_permutation_of_all_sequences(seed: int, pass_number: int, size: int) -> None:
    assert sorted(shard(seed, pass_number, 0, 1, size, size).tolist()) == list(range(size))


@given(
    seed=st.integers(0, 2**63 - 1),
    pass_number=st.integers(0, 100),
    places=st.integers(1, 20),
    count=st.integers(1, 20),
    sequences=st.integers(1, 2_000),
)
@settings(deadline=None)
def test_the_rounds_of_a_pass_repeat_no_sequence(
    seed: int, pass_number: int, places: int, count: int, sequences: int
) -> None:
    rounds = sequences // (places * count)
    used = [of_round(seed, pass_number * rounds + number, places, count, sequences) for number in range(rounds)]
    flat = np.concatenate(used).tolist() if used else []
    assert len(set(flat)) == len(flat) == rounds * places * count
    assert all(0 <= position < sequences for position in flat)


def test_a_pass_of_a_fixed_roster_that_divides_the_data_uses_every_sequence_once() -> None:
    used = np.concatenate([of_round(7, number, places=5, count=4, sequences=1_000) for number in range(50)])
    assert sorted(used.tolist()) == list(range(1_000))


def test_members_never_overlap_in_a_round_whatever_the_size_of_the_roster() -> None:
    for places in (*range(1, 34), 64, 100, 255, 256):
        positions = of_round(1, 12_345, places, 8, 5_000)
        assert len(set(positions.tolist())) == places * 8


@given(
    seed=st.integers(0, 2**63 - 1),
    round_number=st.integers(0, 2**40),
    places=st.integers(1, 20),
    count=st.integers(1, 20),
    sequences=st.integers(1, 50),
)
def test_too_little_data_is_shared_as_evenly_as_can_be(
    seed: int, round_number: int, places: int, count: int, sequences: int
) -> None:
    uses = np.bincount(of_round(seed, round_number, places, count, sequences), minlength=sequences)
    assert len(uses) == sequences
    assert uses.max() <= -(-places * count // sequences)
    if places * count >= sequences:
        assert uses.min() >= places * count // sequences


def test_shards_are_the_committed_ones() -> None:
    # Another permutation would be another protocol: nodes of two releases would train on one another's data.
    assert shard(0, 0, 0, 1, 8, 1_000).tolist() == [770, 400, 607, 24, 61, 583, 122, 475]
    assert shard(2**63 - 1, 10**6, 2, 7, 5, 123_457).tolist() == [16818, 91877, 93110, 106114, 81389]
    assert shard(42, 3, 255, 256, 4, 2**62).tolist() == [
        3996164487890952175,
        2220060149582027206,
        1633264128789698028,
        1288180588900287377,
    ]
    assert shard(5, 9, 1, 3, 4, 5).tolist() == [1, 4, 0, 2]


def test_passes_seeds_and_sizes_give_orders_of_their_own() -> None:
    def order(seed: int, pass_number: int, size: int) -> list[int]:
        return shard(seed, pass_number, 0, 1, size, size).tolist()

    orders = [order(seed, pass_number, 500) for seed in range(4) for pass_number in range(4)]
    for index, one in enumerate(orders):
        for other in orders[:index]:
            same = sum(a == b for a, b in zip(one, other, strict=True))
            assert same < 12  # one in the mean, Poisson: 12 or more happens once in 10**9
    assert [position for position in order(0, 0, 501) if position < 500] != order(0, 0, 500)


def test_every_order_of_few_sequences_comes_up() -> None:
    seen = {tuple(shard(3, pass_number, 0, 1, 4, 4).tolist()) for pass_number in range(500)}
    assert len(seen) == 24


def test_positions_are_spread_evenly() -> None:
    # Where slot 0 of 1,000 passes lands, in 20 bins of 50: chi-square with 19 degrees of freedom.
    landed = [int(shard(11, pass_number * 1_000, 0, 1, 1, 1_000)[0]) for pass_number in range(1_000)]
    bins = np.bincount(np.array(landed) // 50, minlength=20)
    assert ((bins - 50) ** 2 / 50).sum() < 50.8  # its quantile of 1 - 10**-4


def test_neighbouring_slots_land_apart() -> None:
    steps = np.diff(shard(1, 0, 0, 1, 10_000, 10_000))
    assert np.abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.05  # what independent positions give
    assert (np.abs(steps) == 1).sum() < 20  # two in the mean


def test_a_shard_is_a_pure_function_of_integers() -> None:
    first = shard(1, 2, 3, 4, 5, 6_000)
    np.random.seed(0)
    assert first.dtype == np.int64
    assert shard(1, 2, 3, 4, 5, 6_000).tolist() == first.tolist()


# ---------------------------------------------------------------------------------------------------
# By window


def by_place(seed: int, number: int, places: int, count: int, sequences: int, window: int) -> list[list[int]]:
    """Returns the sequences of each place in a round."""
    shares = [shard_in_window(seed, number, place, places, count, sequences, window) for place in range(places)]
    return [each.tolist() for each in shares]


windowed = given(
    seed=st.integers(0, 2**63 - 1),
    pass_number=st.integers(0, 100),
    places=st.integers(1, 12),
    count=st.integers(1, 20),
    sequences=st.integers(1, 2_000),
    window=st.integers(1, 400),
)


@windowed
@settings(deadline=None, max_examples=60)
def test_a_pass_by_window_repeats_nothing_and_uses_as_much_as_one_that_is_drawn(
    seed: int, pass_number: int, places: int, count: int, sequences: int, window: int
) -> None:
    rounds = sequences // (places * count)
    numbers = range(pass_number * rounds, (pass_number + 1) * rounds)
    used = [
        position
        for number in numbers
        for share in by_place(seed, number, places, count, sequences, window)
        for position in share
    ]
    assert len(set(used)) == len(used) == rounds * places * count
    assert all(0 <= position < sequences for position in used)


@windowed
@settings(deadline=None, max_examples=60)
def test_a_place_stays_in_its_window_for_a_turn(
    seed: int, pass_number: int, places: int, count: int, sequences: int, window: int
) -> None:
    rounds, turn = sequences // (places * count), max(1, window // count)
    for begin in range(0, rounds, turn):
        numbers = range(pass_number * rounds + begin, pass_number * rounds + min(begin + turn, rounds))
        shares = [by_place(seed, number, places, count, sequences, window)[0] for number in numbers]
        used = sorted(position for share in shares for position in share)
        gaps = np.diff([*used, used[0] + sequences])
        assert sequences - gaps.max() + 1 == len(used)  # one run of positions, perhaps over the end of the data
        assert len(used) <= max(window, count)


def test_a_window_is_shuffled_and_the_next_pass_has_others() -> None:
    shares = by_place(1, 0, places=4, count=100, sequences=100_000, window=1_000)
    for share in shares:
        assert 800 < max(share) - min(share) < 1_000
        assert (np.abs(np.diff(share)) == 1).sum() < 5
    later = by_place(1, 250, places=4, count=100, sequences=100_000, window=1_000)
    assert not {position for share in shares for position in share} & {
        position for share in later for position in share
    }


def test_too_little_data_for_a_round_is_shared_as_if_drawn() -> None:
    for place in range(4):
        assert shard_in_window(3, 7, place, 4, 5, 19, 8).tolist() == shard(3, 7, place, 4, 5, 19).tolist()


def test_windows_are_the_committed_ones() -> None:
    assert shard_in_window(7, 0, 0, 3, 4, 1_000, 100).tolist() == [205, 150, 230, 148]
    assert shard_in_window(7, 80, 2, 3, 4, 1_000, 100).tolist() == [672, 677, 693, 697]
    assert shard_in_window(2**63 - 1, 10**6, 255, 256, 4, 2**62, 2**20).tolist() == [
        308601409884391246,
        308601409883736015,
        308601409884240039,
        308601409884584541,
    ]


# ---------------------------------------------------------------------------------------------------
# By capability


@given(
    seed=st.integers(0, 2**63 - 1),
    pass_number=st.integers(0, 2**20),
    shares=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    rounds=st.integers(1, 20),
)
@settings(deadline=None, max_examples=60)
def test_a_pass_by_capability_uses_all_data_once(seed: int, pass_number: int, shares: list[int], rounds: int) -> None:
    total = sum(shares)
    sequences = rounds * total
    firsts = np.cumsum([0, *shares[:-1]]).tolist()
    starts = [pass_number * sequences + number * total for number in range(rounds)]
    used = [
        position
        for start in starts
        for first, share in zip(firsts, shares, strict=True)
        for position in shard_of_slots(seed, PassSlots(start, total, first, share), sequences).tolist()
    ]
    assert sorted(used) == list(range(sequences))


@given(
    start=st.integers(0, 2**60), shares=st.lists(st.integers(1, 12), min_size=1, max_size=12), more=st.integers(0, 50)
)
@settings(deadline=None, max_examples=60)
def test_members_do_not_overlap_in_the_round_in_which_a_pass_ends(start: int, shares: list[int], more: int) -> None:
    total = sum(shares)
    firsts = np.cumsum([0, *shares[:-1]]).tolist()
    parts = [
        shard_of_slots(5, PassSlots(start, total, first, share), total + more)
        for first, share in zip(firsts, shares, strict=True)
    ]
    assert len(set(np.concatenate(parts).tolist())) == total


def test_slots_of_equal_members_are_those_that_are_drawn() -> None:
    for number in range(12):
        slots = PassSlots(number * 20, 20, 5, 5)
        assert shard_of_slots(9, slots, 200).tolist() == shard(9, number, 1, 4, 5, 200).tolist()
    assert PassSlots(40, 20, 5, 5).next == PassSlots(60, 20, 5, 5)
