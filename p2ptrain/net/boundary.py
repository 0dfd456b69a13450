"""The boundary around every exchange with a peer: what nobody foresaw in it ends the exchange, and never the node.

Bytes of a peer pass through our code, hivemind, protobuf and p2pd, and any of these may have a mistake that only a
hostile peer finds. Inside the boundary such a surprise becomes a `FaultError`, which is a TransportError: handled like
a peer that hung up. It is counted by peer and address range, logged with its traceback, shown as a complaint, and paid
for by the peer: one that causes many is not answered for a while.

What concerns our own state (core, store, replica, root) lies outside, and still ends the node: it must not go on wrong.
So does a lack of memory, after which nobody knows what is missing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.errors import P2ptrainError
from p2ptrain.identity import peer_id_of
from p2ptrain.net.rate_limit import PeerLimits
from p2ptrain.net.transport import IsAdmitted, TransportError

LOG_SECONDS = 60.0  # between tracebacks, for each place
SHOWN_SECONDS = 3_600.0  # after the last fault the complaint ends
FAULT_COST, BURST = 60, 600  # ten faults of strangers at once, some of one range
EACH_A_SECOND, STRANGERS_A_SECOND = 1, 4  # paid off: a fault a minute of one stranger, four of all of them
PEERS_MAX = 256  # whose faults are counted; the one with the fewest is forgotten

log = logging.getLogger("p2ptrain.net")


class FaultError(TransportError):
    """An exchange with a peer that failed by a fault of p2ptrain, or of a library."""


@dataclass(frozen=True, slots=True)
class ExchangeFault:
    """A surprise in an exchange with a peer."""

    place: str
    peer: bytes  # empty: unknown
    range: str  # of addresses that the peer is connected from; empty: unknown
    error: str  # its type
    at: float


class Boundary:
    """Ends exchanges with peers in which something unforeseen happens."""

    def __init__(
        self, range_of: Callable[[bytes], str] = lambda peer: "", is_admitted: IsAdmitted = lambda peer: False
    ) -> None:
        self.range_of, self.is_admitted = range_of, is_admitted
        self._limits = PeerLimits(
            is_admitted, range_of, each=EACH_A_SECOND, strangers=STRANGERS_A_SECOND, burst=BURST
        )  # members' faults are counted alone: what an honest one sets off must not part the swarm
        self._logged_at: dict[str, float] = {}
        self.last: ExchangeFault | None = None
        self.counts: Counter[str] = Counter()  # by place
        self.by_peer: Counter[tuple[bytes, str]] = Counter()  # by peer and range

    @contextmanager
    def guard(self, place: str, peer: bytes = b"") -> Iterator[None]:
        """Turns what was not foreseen into a FaultError, where TransportErrors are handled."""
        try:
            yield
        except (P2ptrainError, TimeoutError):
            raise
        except Exception as error:  # nothing else in the package does: see above
            raise self._note(place, peer, error) from error

    @contextmanager
    def contain(self, place: str, peer: bytes = b"") -> Iterator[None]:
        """Ends an exchange here, whatever it raises; an error that should have been handled inside is a fault, too."""
        try:
            yield
        except FaultError:
            pass  # noted where it happened
        except Exception as error:  # noqa: BLE001  # nothing else in the package does: see above
            self._note(place, peer, error)

    async def contained(
        self,
        place: str,
        peer: bytes,
        work: Callable[..., Awaitable[None]],
        *arguments: Any,
        failed: Callable[[str], object] = str,
    ) -> None:
        """Does the work of a task, which ends here whatever it raises; `failed` is then called with the reason."""
        with self.contain(place, peer):
            try:
                with self.guard(place, peer):
                    await work(*arguments)
            except FaultError as error:
                failed(str(error))

    def is_tired_of(self, peer: bytes) -> bool:
        """Whether a stranger has caused so many faults that it is not answered for a while."""
        return not self.is_admitted(peer) and self._limits.seconds_until(peer, FAULT_COST) > 0.0

    @property
    def complaints(self) -> list[Complaint]:
        fault = self.last
        if fault is None or time.monotonic() - fault.at > SHOWN_SECONDS:
            return []
        whom = peer_id_of(fault.peer) if fault.peer else "a peer"
        count, where = self.counts.total(), fault.range or "an unknown range"
        what = {"place": fault.place, "error": fault.error, "whom": whom, "range": where}
        return [complaint(Code.EXCHANGE_FAULT, count=count, **what)]

    def _note(self, place: str, peer: bytes, error: Exception) -> FaultError:
        """Notes a fault; raises it if it is a lack of memory."""
        if _is_of_memory(error):
            raise error
        now, where = time.monotonic(), self._charge(peer) if peer else ""
        self.last = ExchangeFault(place, peer, where, type(error).__name__, now)
        self.counts[place] += 1
        self.by_peer[peer, where] += 1
        if len(self.by_peer) > PEERS_MAX:
            del self.by_peer[min(self.by_peer, key=self.by_peer.__getitem__)]
        if now >= self._logged_at.get(place, now):
            self._logged_at[place] = now + LOG_SECONDS
            whom = f" with {peer_id_of(peer)}" if peer else ""
            log.error("a fault of p2ptrain ended an exchange%s (%s): please report it", whom, place, exc_info=error)
        return FaultError(f"a fault of p2ptrain in {place}: {type(error).__name__}")

    def _charge(self, peer: bytes) -> str:
        """Has a stranger pay for a fault; returns the address range that the peer is connected from."""
        try:
            if not self.is_admitted(peer):
                self._limits.spend(peer, FAULT_COST)
            return self.range_of(peer)
        except Exception as error:  # noqa: BLE001  # it may be what is broken
            log.debug("the range of %s is not known: %r", peer.hex()[:16], error)
            return ""


def _is_of_memory(error: Exception) -> bool:
    """Whether memory was refused, perhaps in one of several tasks."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(MemoryError) is not None
    return isinstance(error, MemoryError)
