"""What has changed since the last look, as lines for a person: who takes part, which branch, and what is wrong.

And what the node could not take in, because peers said more than it can hear.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

from p2ptrain.core.complaints import Code, Complaint
from p2ptrain.core.state import AgreedState
from p2ptrain.identity import peer_id_of

NAMES_MAX = 8  # peers that one line names
LOOKS = 3  # in a row until a complaint is told: some pass within a round
DROPS_SECONDS = 60.0  # between two lines about what is dropped: a flood may last for days

Line = tuple[int, str]  # level of logging and text


class News:
    """Of one node."""

    def __init__(self) -> None:
        self._members: frozenset[bytes] | None = None
        self._branch = b""
        self._looks: dict[Code, int] = {}  # for how many a complaint has stood
        self._told: dict[Code, str] = {}  # complaints that were told, and how

    def look(self, state: AgreedState, complaints: Sequence[Complaint]) -> list[Line]:
        """The lines since the last look, when these were the complaints of the node and its edges."""
        lines = [*self._of_roster(state), *self._of_health(complaints)]
        self._members, self._branch = frozenset(state.members), state.branch
        return lines

    def _of_roster(self, state: AgreedState) -> Iterable[Line]:
        if self._members is None:
            return
        now = frozenset(state.members)
        count = "1 member" if len(now) == 1 else f"{len(now)} members"
        if state.branch != self._branch:
            yield (
                logging.WARNING,
                f"went on from round {state.round + 1} on branch {state.branch.hex()[:16]}, {count}",
            )
        if come := now - self._members:
            yield logging.INFO, f"{_names(come)} got a seat: {count}"
        if gone := self._members - now:
            yield logging.INFO, f"{_names(gone)} lost a seat or left: {count}"

    def _of_health(self, complaints: Sequence[Complaint]) -> Iterable[Line]:
        self._looks = {each.code: self._looks.get(each.code, 0) + 1 for each in complaints}
        for each in complaints:
            if self._looks[each.code] == LOOKS:
                self._told[each.code] = each.text
                yield logging.WARNING if each.severity == "error" else logging.INFO, each.text
        for code in [code for code in self._told if code not in self._looks]:
            yield logging.INFO, f"over: {self._told.pop(code)}"


class Drops:
    """Of one node: messages for which there was no room. Told at once, and then now and then."""

    def __init__(self) -> None:
        self._told = 0
        self._next_at = -math.inf

    def look(self, dropped: int, last: bytes, now: float) -> list[Line]:
        """`dropped` are all so far, `last` the peer that the last came from, if that is known."""
        count = dropped - self._told
        if not count or now < self._next_at:
            return []
        self._told, self._next_at = dropped, now + DROPS_SECONDS
        whose = f", lately of {peer_id_of(last)}" if last else ""
        what = "1 message" if count == 1 else f"{count:,} messages"
        text = f"{what} of peers had no room and were dropped{whose}: what this node misses, it asks for again"
        return [(logging.WARNING, text)]


def _names(peers: Iterable[bytes]) -> str:
    names = sorted(map(peer_id_of, peers))
    rest = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + rest
