"""Newcomers: whose contributions a node takes in, and how long a short round stays open for keys admitted lately.

In an open run one person can have a thousand keys, and each can offer another payload in every round. Keys cost
nothing, and addresses something: so a node fetches and attests, of the keys without a seat that come from one range of
addresses, only as many a round as may join in one, first those whose work audits have found, and attests as many
joins. Who comes from elsewhere waits behind no crowd. Ranges are a node's own observation, and nothing of this has to
be agreed: a manifest takes what enough members attest.

Where a round takes a few hundredths of a second, a newcomer is never there before its end: while it applies what came
since its state and trains, the others are rounds ahead. So until it has had its probation, a round that has all else
lasts as long as a newcomer needs, unless it contributes before. With a seat of its own, the others wait for it anyway.

It costs rounds of a second or more nothing, and others little: a key is waited for only while it is connected, in the
first rounds after its admission; and what all keys together may take is saved up as a share of the time, because keys
cost nothing. Strangers are not waited for. Each member decides for itself how long to collect: it is not agreed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from blake3 import blake3

from p2ptrain.config import RunConfig
from p2ptrain.core.manifest import joins_max
from p2ptrain.core.state import AgreedState

LEAST_SECONDS = 1.0  # of a round, for a newcomer: two ways through a relay, a few rounds to apply and a training
ROUNDS = 32  # after its admission; a newcomer asks when it is as many behind, which take it a few of these. A guess
SAVED_SECONDS_MAX = 32.0  # what one newcomer can take
SHARE = 0.1  # of the time that newcomers may take in the long run


def looked_at(state: AgreedState, run: RunConfig, ranges: Mapping[bytes, str], number: int) -> Container[bytes]:
    """Returns the keys whose contributions to a round this node takes in. `ranges`: of addresses, of those connected"""
    seat, most = state.roster.seat, joins_max(state.roster.size)
    others = [entry for entry in state.admitted if entry.key not in seat]
    if run.admission.policy != "open" or len(others) <= most:
        return state.place

    lately = run.admission.absence_rounds_max  # who has offered nothing for longer may have gone
    found = {entry.key for entry in others if entry.conduct.credit and entry.absent < lately}
    return {*seat, *few_of_each_range((entry.key for entry in others), ranges, number, most, found)}


def few_of_each_range(
    keys: Iterable[bytes], ranges: Mapping[bytes, str], draw: int, most: int, first: Container[bytes] = ()
) -> Iterator[bytes]:
    """Draws at most `most` keys of each range; at most half of them because they are in `first`.

    Keys that are not connected make a range of their own. Otherwise those that have gone would take the places of
    those behind relays, whose ranges are unknown."""
    of_range: dict[str | None, list[bytes]] = {}
    for key in sorted(keys, key=lambda key: blake3(draw.to_bytes(8, "little") + key).digest()):
        of_range.setdefault(ranges.get(key), []).append(key)
    for each in of_range.values():
        preferred = [key for key in each if key in first][: -(-most // 2)]
        yield from [*preferred, *(key for key in each if key not in preferred)][:most]


class NewcomerTime:
    def __init__(self) -> None:
        self._saved, self._saved_at = SAVED_SECONDS_MAX, 0.0

    def awaited(self, state: AgreedState, probation: int, connected: Container[bytes]) -> set[bytes]:
        """Returns the keys that the round after this state stays open for."""
        if len(state.admitted) == len(state.members):
            return set()
        return {
            entry.key
            for entry in state.admitted
            if entry.taken < probation
            and state.round - entry.since < ROUNDS
            and entry.key in connected
            and entry.key not in state.roster.seat
        }

    def seconds(self, now: float) -> float:
        """Returns how long a round that begins now lasts at least, if newcomers are awaited."""
        saved = self._saved + SHARE * (now - self._saved_at)
        self._saved, self._saved_at = min(saved, SAVED_SECONDS_MAX), now
        return min(LEAST_SECONDS, self._saved)

    def took(self, seconds: float) -> None:
        """Notes how much longer a round has lasted for newcomers."""
        self._saved = max(0.0, self._saved - seconds)
