"""Newcomers: how long a short round stays open for keys that were admitted lately, so that they can catch up.

Where a round takes a few hundredths of a second, a newcomer is never there before its end: while it applies what came
since its state and trains, the others are rounds ahead. So until it has had its probation, a round that has all else
lasts as long as a newcomer needs, unless it contributes before. With a seat of its own, the others wait for it anyway.

It costs rounds of a second or more nothing, and others little: a key is waited for only while it is connected, in the
first rounds after its admission; and what all keys together may take is saved up as a share of the time, because keys
cost nothing. Strangers are not waited for. Each member decides for itself how long to collect, so nothing of this has
to be agreed.
"""

from __future__ import annotations

from collections.abc import Container

from p2ptrain.core.state import AgreedState

LEAST_SECONDS = 1.0  # of a round, for a newcomer: two ways through a relay, a few rounds to apply and a training
ROUNDS = 32  # after its admission; a newcomer asks when it is as many behind, which take it a few of these. A guess
SAVED_SECONDS_MAX = 32.0  # what one newcomer can take
SHARE = 0.1  # of the time that newcomers may take in the long run


class NewcomerTime:
    """The time that rounds may stay open for newcomers."""

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
