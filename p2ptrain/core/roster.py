"""The roster: the members with a vote, the quorum, and the order of proposers.

A seat is the index of a member's key among the sorted keys, so that bitmaps can refer to members. With N >= 4 members,
f = (N-1)//3 may lie and q = 2N//3 + 1 decide: any two quorums share an honest member (Bracha and Toueg 1985). With
fewer, no liar is tolerated and a majority decides: such a roster is `crash-only`. Anything that q - f members attest is
attested by at least one honest member, and anything that every honest member attests is attested by q - f of any q.

Members propose in the order of BLAKE3(run, branch, round, key). A member can influence only its key, which it chose
before it knew the round."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache

from blake3 import blake3

Keys = tuple[bytes, ...]
TOLERANT_FROM = 4  # members; with fewer, not even one liar can be outvoted


def quorum_of(size: int) -> int:
    return 2 * size // 3 + 1 if size >= TOLERANT_FROM else size // 2 + 1


def tolerated_by(size: int) -> int:
    return (size - 1) // 3 if size >= TOLERANT_FROM else 0


class Roster:
    """The members of one round, and the thresholds that follow from their number."""

    def __init__(self, members: tuple[bytes, ...]) -> None:
        self.members = members  # ascending
        self.size = len(members)
        self.quorum = quorum_of(self.size)
        self.tolerated = tolerated_by(self.size)
        self.attesting = self.quorum - self.tolerated  # attestations that include an honest one, within any quorum

    @cached_property
    def seat(self) -> dict[bytes, int]:
        return {key: seat for seat, key in enumerate(self.members)}

    @property
    def is_crash_only(self) -> bool:
        return self.size < TOLERANT_FROM

    def in_seats(self, seats: bytes) -> list[bytes] | None:
        """Returns the members in a bitmap of seats, or None if it names seats that do not exist."""
        named = seats_in(seats)
        return None if named and named[-1] >= self.size else [self.members[seat] for seat in named]


@lru_cache(maxsize=64)
def roster_of(members: tuple[bytes, ...]) -> Roster:
    """Returns the roster of these members: the same object as long as the membership does not change."""
    return Roster(members)


@lru_cache(maxsize=64)
def proposers(run_id: bytes, branch: bytes, number: int, members: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Returns the members in the order in which they propose in round `number`; view v is member v mod N's turn."""
    prefix = run_id + branch + number.to_bytes(8, "little")
    return tuple(sorted(members, key=lambda member: blake3(prefix + member).digest()))


def changed(members: Keys, seated: Keys, unseated: Keys) -> Keys:
    """Returns the members after a round: the same object if none has changed, so that its roster is in the cache."""
    if not seated and not unseated:
        return members
    return tuple(sorted({*members, *seated} - {*unseated}))


def bitmap(seats: Iterable[int]) -> bytes:
    """Encodes seats as a bitmap without trailing zero bytes."""
    bits = 0
    for seat in seats:
        bits |= 1 << seat
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def seats_in(seats: bytes) -> list[int]:
    """Returns the seats of a bitmap, ascending."""
    bits = int.from_bytes(seats, "little")
    return [seat for seat in range(bits.bit_length()) if bits >> seat & 1]
