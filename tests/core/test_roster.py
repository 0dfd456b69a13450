"""The roster: quorums that share an honest member, canonical bitmaps, and an order that nobody can choose."""

from __future__ import annotations

import inspect
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.messages import SEATS_MAX
from p2ptrain.core.roster import bitmap, proposers, quorum_of, roster_of, seats_in, tolerated_by
from p2ptrain.digest import digest
from tests.helpers.core import KEYS, RUN

SIZES = range(1, SEATS_MAX + 1)
BRANCH = digest("roster test", b"branch")

# ---------------------------------------------------------------------------------------------------
# Quorums


def test_small_rosters_decide_like_this() -> None:
    sizes = (1, 2, 3, 4, 5, 6, 7, 10, 16, 100, 256)
    assert [(size, quorum_of(size), tolerated_by(size)) for size in sizes] == [
        (1, 1, 0), (2, 2, 0), (3, 2, 0), (4, 3, 1), (5, 4, 1), (6, 5, 1), (7, 5, 2), (10, 7, 3), (16, 11, 5),
        (100, 67, 33), (256, 171, 85),
    ]  # fmt: skip


def test_any_two_quorums_share_more_members_than_may_lie() -> None:
    assert [size for size in SIZES if 2 * quorum_of(size) - size <= tolerated_by(size)] == []


def test_no_smaller_number_would_do_unless_a_third_is_whole() -> None:
    """Of six members, four would be enough; "more than two thirds" is the familiar rule, and costs one vote there."""
    generous = [size for size in SIZES if 2 * (quorum_of(size) - 1) - size > tolerated_by(size)]
    assert generous == [size for size in SIZES if size >= 6 and size % 3 == 0]


def test_those_who_do_not_lie_are_a_quorum() -> None:
    assert [size for size in SIZES if size - tolerated_by(size) < quorum_of(size)] == []


def test_at_least_one_of_those_who_attest_is_honest() -> None:
    attesting = {size: roster_of(tuple(bytes([seat]) for seat in range(size))).attesting for size in SIZES}
    assert [size for size, least in attesting.items() if least != quorum_of(size) - tolerated_by(size)] == []
    assert [size for size, least in attesting.items() if least <= tolerated_by(size)] == []


def test_below_four_nobody_may_lie() -> None:
    assert [roster_of(KEYS[:size]).is_crash_only for size in (1, 2, 3, 4, 5)] == [True, True, True, False, False]


def test_a_roster_knows_its_seats() -> None:
    roster = roster_of(KEYS[:5])
    assert (roster.size, roster.quorum, roster.tolerated, roster.attesting) == (5, 4, 1, 3)
    assert roster.seat == {KEYS[seat]: seat for seat in range(5)}
    assert roster_of(tuple(KEYS[:5])) is roster


# ---------------------------------------------------------------------------------------------------
# Bitmaps


@given(st.sets(st.integers(0, SEATS_MAX - 1)))
def test_a_bitmap_holds_its_seats(seats: set[int]) -> None:
    encoded = bitmap(sorted(seats, reverse=True))
    assert seats_in(encoded) == sorted(seats)
    assert len(encoded) == (max(seats) // 8 + 1 if seats else 0)


@given(st.binary(max_size=SEATS_MAX // 8).map(lambda octets: octets.rstrip(b"\0")))
def test_a_bitmap_has_one_encoding(encoded: bytes) -> None:
    assert bitmap(seats_in(encoded)) == encoded


def test_seat_s_is_bit_s_modulo_8_of_byte_s_over_8() -> None:
    assert [bitmap([seat]) for seat in (0, 1, 7, 8, 255)] == [b"\1", b"\2", b"\x80", b"\0\1", bytes(31) + b"\x80"]
    assert bitmap([0, 9, 9]) == b"\1\2"
    assert (bitmap([]), seats_in(b"")) == (b"", [])


def test_seats_that_nobody_has_name_nobody() -> None:
    roster = roster_of(KEYS[:5])
    assert roster.in_seats(bitmap([4, 0, 2])) == [KEYS[0], KEYS[2], KEYS[4]]
    assert roster.in_seats(bitmap([5])) is None
    assert roster.in_seats(bitmap([0, 255])) is None
    assert roster.in_seats(b"") == []


# ---------------------------------------------------------------------------------------------------
# Proposers

MEMBERS = KEYS[:7]


def test_everyone_proposes_once_before_anyone_does_again() -> None:
    for number in range(100):
        assert sorted(proposers(RUN, BRANCH, number, MEMBERS)) == list(MEMBERS)


def test_over_the_rounds_everyone_gets_every_place_as_often() -> None:
    rounds = 7_000
    places = Counter(
        (place, key) for number in range(rounds) for place, key in enumerate(proposers(RUN, BRANCH, number, MEMBERS))
    )
    expected = rounds / len(MEMBERS)  # 1,000, with a deviation of 29
    assert len(places) == len(MEMBERS) ** 2
    assert max(abs(count - expected) for count in places.values()) < 5 * 29.3


def test_who_proposes_says_nothing_about_who_is_next() -> None:
    first = [proposers(RUN, BRANCH, number, MEMBERS)[0] for number in range(7_000)]
    repeated = sum(one == following for one, following in pairwise(first))
    assert abs(repeated - 1_000) < 5 * 29.3


def test_run_branch_and_round_each_change_the_order() -> None:
    other = digest("roster test", b"other")
    rounds = range(50)
    usual = [proposers(RUN, BRANCH, number, MEMBERS) for number in rounds]
    for others in (
        [proposers(other, BRANCH, number, MEMBERS) for number in rounds],
        [proposers(RUN, other, number, MEMBERS) for number in rounds],
        [proposers(RUN, BRANCH, number + 1_000, MEMBERS) for number in rounds],
        [proposers(BRANCH, RUN, number, MEMBERS) for number in rounds],
        [proposers(RUN, BRANCH, number + 2**40, MEMBERS) for number in rounds],
    ):
        assert sum(one == another for one, another in zip(usual, others, strict=True)) <= 2


def test_a_member_more_or_less_does_not_reorder_the_others() -> None:
    """A key's position depends only on its own digest: adding a helper does not change the order of the others."""
    for number in range(50):
        order = proposers(RUN, BRANCH, number, MEMBERS)
        for gone in MEMBERS:
            rest = tuple(key for key in MEMBERS if key != gone)
            assert proposers(RUN, BRANCH, number, rest) == tuple(key for key in order if key != gone)


def test_the_order_in_which_members_are_listed_does_not_matter() -> None:
    for number in range(50):
        assert proposers(RUN, BRANCH, number, MEMBERS[::-1]) == proposers(RUN, BRANCH, number, MEMBERS)


def test_nothing_else_goes_into_the_order() -> None:
    assert list(inspect.signature(proposers).parameters) == ["run_id", "branch", "number", "members"]


def test_the_order_is_a_part_of_the_protocol() -> None:
    order = proposers(bytes(32), bytes(32), 1, tuple(bytes([seat]) * 32 for seat in range(8)))
    assert [key[0] for key in order] == [1, 0, 7, 3, 2, 6, 5, 4]


@pytest.mark.parametrize("size", [1, 2, 256])
def test_every_size_has_an_order(size: int) -> None:
    members = tuple(sorted(digest("roster test key", bytes([seat])) for seat in range(size)))
    assert sorted(proposers(RUN, BRANCH, 1, members)) == list(members)
