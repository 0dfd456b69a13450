"""Log lines about changes since the last look: members, branches, complaints, overlap, and dropped messages."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from p2ptrain.core.complaints import MEANINGS, Code, Complaint
from p2ptrain.core.state import AgreedState
from p2ptrain.identity import peer_id_of
from p2ptrain.observe.figures import reasons
from p2ptrain.observe.schema import BAN_UNKNOWN

NAMES_MAX = 8  # peers named per line
LOOKS = 3  # checks in a row that find a complaint before it is logged: some pass within a round
DROPS_SECONDS = 60.0  # between two lines about dropped messages: a flood may last for days

Line = tuple[int, str]  # logging level and text


class News:
    """Compares a node's state and complaints with those of the last look."""

    def __init__(self) -> None:
        self._members: frozenset[bytes] | None = None
        self._branch = b""
        self._banned: AbstractSet[bytes] = frozenset()
        self._kept_away: AbstractSet[bytes] = frozenset()
        self._looks: dict[Code, int] = {}  # how many looks in a row have found each complaint
        self._told: set[Code] = set()  # complaints that were logged and have not ended

    def look(
        self,
        state: AgreedState,
        complaints: Sequence[Complaint],
        bans: Mapping[bytes, str] = MappingProxyType({}),
        kept_away: Mapping[bytes, Mapping[str, int]] = MappingProxyType({}),
    ) -> list[Line]:
        """Returns the lines for what has changed since the last look.

        bans: why each key was banned; kept_away: what was observed of each peer that this node keeps away
        """
        lines = [*self._of_roster(state), *self._of_peers(bans, kept_away), *self._of_health(complaints)]
        self._members, self._branch = frozenset(state.members), state.branch
        self._banned, self._kept_away = bans.keys(), kept_away.keys()
        return lines

    def _of_roster(self, state: AgreedState) -> Iterable[Line]:
        if self._members is None:
            return
        now = frozenset(state.members)
        count = "1 member" if len(now) == 1 else f"{len(now)} members"
        if state.branch != self._branch:
            yield (
                logging.WARNING,
                f"continued from round {state.round + 1} on branch {state.branch.hex()[:16]}, {count}",
            )
        if come := now - self._members:
            yield logging.INFO, f"{_names(come)} got a seat: {count}"
        if gone := self._members - now:
            yield logging.INFO, f"{_names(gone)} lost a seat or left: {count}"

    def _of_peers(self, bans: Mapping[bytes, str], kept_away: Mapping[bytes, Mapping[str, int]]) -> Iterable[Line]:
        if self._members is None:
            return
        for peer in sorted(bans.keys() - self._banned)[:NAMES_MAX]:
            yield logging.WARNING, f"{peer_id_of(peer)} was banned: {bans[peer] or BAN_UNKNOWN}"
        for peer in sorted(kept_away.keys() - self._kept_away)[:NAMES_MAX]:
            yield logging.WARNING, f"{peer_id_of(peer)} is kept away: {reasons(dict(kept_away[peer]))}"
        if back := self._kept_away - kept_away.keys():
            yield logging.INFO, f"{_names(back)} no longer kept away"

    def _of_health(self, complaints: Sequence[Complaint]) -> Iterable[Line]:
        self._looks = {each.code: self._looks.get(each.code, 0) + 1 for each in complaints}
        for each in complaints:
            if self._looks[each.code] == LOOKS:
                self._told.add(each.code)
                yield logging.WARNING if each.severity == "error" else logging.INFO, each.text
        for code in [code for code in Code if code in self._told and code not in self._looks]:
            self._told.remove(code)
            yield logging.INFO, MEANINGS[code].ended


class OverlapLog:
    """Logs when training begins to go on while rounds are agreed on, and when it waits for them again."""

    def __init__(self) -> None:
        self._was_on: bool | None = None

    def look(self, is_on: bool) -> list[Line]:
        was_on, self._was_on = self._was_on, is_on
        if was_on is None or is_on == was_on:
            return []
        begun = "exchange takes long: from now on training goes on while a round is agreed on"
        return [(logging.INFO, begun if is_on else "exchange is fast again: training waits for each round")]


class DropLog:
    """Logs dropped messages: the first at once, and later ones once a minute."""

    def __init__(self) -> None:
        self._told = 0
        self._next_at = -math.inf

    def look(self, dropped: int, last: bytes, now: float) -> list[Line]:
        """`dropped` counts from the start; `last` is the sender of the last one, or empty if unknown."""
        count = dropped - self._told
        if not count or now < self._next_at:
            return []
        self._told, self._next_at = dropped, now + DROPS_SECONDS
        whose = f", most recently from {peer_id_of(last)}," if last else ""
        what = "1 message" if count == 1 else f"{count:,} messages"
        text = f"dropped {what} from peers{whose} for lack of room; the node asks again for what it misses"
        return [(logging.WARNING, text)]


def _names(peers: Iterable[bytes]) -> str:
    names = sorted(map(peer_id_of, peers))
    rest = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + rest
