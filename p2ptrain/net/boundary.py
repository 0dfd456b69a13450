"""The boundary around every exchange with a peer: an unforeseen error ends the exchange, and never the node.

Bytes of a peer pass through our code, hivemind, protobuf and p2pd, and any of these may have a bug that only a hostile
peer finds. Inside the boundary such a surprise becomes a `FaultError`, which is a TransportError: handled like a peer
that hung up. It is counted by peer and address range, logged with its traceback, shown as a complaint, and paid for by
the peer: one that causes many is not answered for a while.

What concerns our own state (core, store, replica, root) lies outside, and still ends the node: it must not go on wrong.
So does a lack of memory: after it any object may be half made."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.errors import P2ptrainError
from p2ptrain.identity import peer_id_of
from p2ptrain.net.transport import IsAdmitted, TransportError

LOG_SECONDS = 60.0  # between tracebacks, for each place
SHOWN_SECONDS = 3_600.0  # after the last fault the complaint ends
KEY_SECONDS, RANGE_SECONDS = 60.0, 15.0  # until a stranger's key has paid for a fault, and its range of addresses
OWED_SECONDS = 600.0  # who owes as much is not answered, and nobody owes more: ten faults of a key, forty of a range
PEERS_MAX = 256  # whose faults are remembered; those with the fewest are forgotten

log = logging.getLogger("p2ptrain.net")
Work: TypeAlias = Callable[..., Awaitable[object]]
Failed: TypeAlias = Callable[[str], object]  # gets the reason


class FaultError(TransportError):
    """An exchange with a peer that failed by a bug of p2ptrain, or of a library."""


class Boundary:
    """Ends exchanges with peers in which something unforeseen happens."""

    def __init__(
        self, range_of: Callable[[bytes], str] = lambda peer: "", is_admitted: IsAdmitted = lambda peer: False
    ) -> None:
        self.range_of, self.is_admitted = range_of, is_admitted
        self._owes_until: dict[bytes | str, float] = {}  # strangers, by key and by range: never one for another
        self._logged_at: dict[str, float] = {}
        self._complaints: list[Complaint] = []  # of the last fault
        self._shown_until = 0.0
        self.counts: Counter[str] = Counter()  # by place
        self.by_peer: Counter[tuple[bytes, str]] = Counter()  # by peer and range

    @contextmanager
    def guard(self, place: str, peer: bytes = b"") -> Iterator[None]:
        """Turns what was not foreseen into a FaultError, where TransportErrors are handled."""
        try:
            yield
        except (P2ptrainError, TimeoutError):
            raise
        except Exception as error:  # only this module catches all
            raise self._note(place, peer, error) from error

    @contextmanager
    def contain(self, place: str, peer: bytes = b"", failed: Failed = lambda why: None) -> Iterator[None]:
        """Ends an exchange here, whatever it raises, and tells `failed` why. What is no FaultError is a bug."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # only this module catches all
            fault = error if isinstance(error, FaultError) else self._note(place, peer, error)
            with self.contain(place, peer):
                failed(str(fault))

    async def contained(
        self,
        place: str,
        peer: bytes,
        work: Work,
        *arguments: Any,
        failed: Failed = lambda why: None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        """Does the work of a task inside `contain`; `ended` is called after it, even if it failed at its first line."""
        try:
            with self.contain(place, peer, failed):
                await work(*arguments)
        finally:
            with self.contain(place, peer):
                ended()

    def is_tired_of(self, peer: bytes) -> bool:
        """Whether a stranger has caused so many faults that it is not answered for a while."""
        if self.is_admitted(peer):  # what an honest member sets off must not part the swarm
            return False
        almost = time.monotonic() + OWED_SECONDS - KEY_SECONDS
        return any(self._owes_until.get(each, 0.0) > almost for each in (peer, self.range_of(peer)))

    @property
    def complaints(self) -> list[Complaint]:
        return self._complaints if time.monotonic() <= self._shown_until else []

    def _note(self, place: str, peer: bytes, error: Exception) -> FaultError:
        """Notes a fault; raises it if memory was refused, perhaps in one of several tasks."""
        if isinstance(error, MemoryError) or (isinstance(error, ExceptionGroup) and error.subgroup(MemoryError)):
            raise error
        now, where, what = time.monotonic(), self._charge(peer) if peer else "", type(error).__name__
        whom = peer_id_of(peer) if peer else "a peer"
        self.counts[place] += 1
        self.by_peer[peer, where] += 1
        fields = {"place": place, "error": what, "whom": whom, "range": where or "an unknown range"}
        count, of_whom = self.counts.total(), self.by_peer[peer, where]
        self._complaints = [complaint(Code.EXCHANGE_FAULT, count=count, of_whom=of_whom, **fields)]
        self._shown_until = now + SHOWN_SECONDS
        fault = FaultError(f"a bug of p2ptrain ended an exchange with {whom} ({place}: {what}): please report it")
        if len(self.by_peer) > PEERS_MAX:
            del self.by_peer[min(self.by_peer, key=self.by_peer.__getitem__)]
        if now >= self._logged_at.get(place, now):
            self._logged_at[place] = now + LOG_SECONDS
            log.error("%s", fault, exc_info=error)
        return fault

    def _charge(self, peer: bytes) -> str:
        """Has a stranger pay for a fault; returns the address range that the peer is connected from."""
        try:
            where, is_admitted = self.range_of(peer), self.is_admitted(peer)
        except Exception as error:  # noqa: BLE001  # it may be what is broken
            log.debug("the range of %s is not known: %r", peer.hex()[:16], error)
            return ""
        now, owes = time.monotonic(), self._owes_until
        for who, seconds in ((peer, KEY_SECONDS), (where, RANGE_SECONDS)):
            if who and not is_admitted:
                owes[who] = min(max(owes.get(who, now), now) + seconds, now + OWED_SECONDS)
        while len(owes) > 2 * PEERS_MAX:
            del owes[min(owes, key=owes.__getitem__)]
        return where
