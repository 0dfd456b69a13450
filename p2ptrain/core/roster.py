"""The roster: who has a vote, how many votes decide, and who proposes.

A seat is the place of a member's key among the sorted keys, so that bitmaps need no names. With N >= 4 members, f =
(N-1)//3 may lie and q = 2N//3 + 1 decide: any two quorums share an honest member (Bracha and Toueg 1985). Below,
nobody may lie, and a majority decides: such a roster is `crash-only`. What q - f members attest, at least one
honest member attests, and what every honest member attests is attested by q - f of any q.

Proposers follow the members in the order of BLAKE3(run, branch, round, key). Nothing in it can be chosen by a
proposer but its key, which it chose before it knew the round.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache

from blake3 import blake3

TOLERANT_FROM = 4  # members; below, one liar is already more than the quorums can outvote


def quorum_of(size: int) -> int:
    """How many of `size` members decide."""
    return 2 * size // 3 + 1 if size >= TOLERANT_FROM else size // 2 + 1


def tolerated_by(size: int) -> int:
    """How many of `size` members may lie."""
    return (size - 1) // 3 if size >= TOLERANT_FROM else 0


class Roster:
    """The members of one round."""

    def __init__(self, members: tuple[bytes, ...]) -> None:
        self.members = members  # rising
        self.size = len(members)
        self.quorum = quorum_of(self.size)
        self.tolerated = tolerated_by(self.size)
        self.attesting = self.quorum - self.tolerated  # so many of a quorum make something true

    @cached_property
    def seat(self) -> dict[bytes, int]:
        return {key: seat for seat, key in enumerate(self.members)}

    @property
    def is_crash_only(self) -> bool:
        return self.size < TOLERANT_FROM

    def in_seats(self, seats: bytes) -> list[bytes] | None:
        """The members in a bitmap of seats; None if it names seats that are not there."""
        named = seats_in(seats)
        return None if named and named[-1] >= self.size else [self.members[seat] for seat in named]


@lru_cache(maxsize=64)
def roster_of(members: tuple[bytes, ...]) -> Roster:
    """The roster of these members: the same one round after round, as long as nobody comes or goes."""
    return Roster(members)


@lru_cache(maxsize=64)
def proposers(run_id: bytes, branch: bytes, number: int, members: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The members in the order in which they propose in round `number`; view v belongs to v modulo their number."""
    prefix = run_id + branch + number.to_bytes(8, "little")
    return tuple(sorted(members, key=lambda member: blake3(prefix + member).digest()))


def bitmap(seats: Iterable[int]) -> bytes:
    """Seats as a bitmap without zero bytes at its end."""
    bits = 0
    for seat in seats:
        bits |= 1 << seat
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def seats_in(seats: bytes) -> list[int]:
    """The seats of a bitmap, rising."""
    bits = int.from_bytes(seats, "little")
    return [seat for seat in range(bits.bit_length()) if bits >> seat & 1]
