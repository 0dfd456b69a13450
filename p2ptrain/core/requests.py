"""Requests: joins, leaves and evidence that this node has verified, and that wait for a manifest to carry them.

Of one author at most two wait, and joins may fill only part of the pool, so that a crowd at the door keeps neither
evidence nor leaves out. When its part is full, newcomers ask again later. Evidence is counted apart: else a liar who
has asked to leave, twice, could not be convicted, and a crowd that leaves would keep out all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from p2ptrain.core.admission import check_request
from p2ptrain.core.manifest import Request
from p2ptrain.core.messages import REQUESTS_MAX, Evidence, JoinRequest, Leave, Received
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import RemoteProtocolError

if TYPE_CHECKING:
    from p2ptrain.core.context import Context

JOINS_MAX = REQUESTS_MAX // 2
EVIDENCE_MAX = REQUESTS_MAX // 2  # beside joins and leaves; three times as many as liars are tolerated
OF_AUTHOR_MAX = 2


class Waiting(Struct):
    received: Received
    request: Request
    about: bytes  # whom it concerns


class Requests:
    """The pool of one node."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.by_name: dict[bytes, Waiting] = {}

    def add(self, received: Received, state: AgreedState, asked_for: bool = False) -> bool:
        """Take in a request; False if there is no room or no use for it, RemoteProtocolError if it is wrong.

        One that we asked for, because others attest it, finds room: without it we know no manifest.
        """
        name = received.name
        if name in self.by_name:
            return False
        message = received.message
        assert isinstance(message, JoinRequest | Leave | Evidence)
        joins = sum(waiting.request.join is not None for waiting in self.by_name.values())
        proofs = sum(bool(waiting.request.guilty) for waiting in self.by_name.values())
        is_proof = isinstance(message, Evidence)
        if is_proof:
            is_full = proofs >= EVIDENCE_MAX
        else:
            is_full = len(self.by_name) - proofs >= REQUESTS_MAX
            is_full = is_full or (isinstance(message, JoinRequest) and joins >= JOINS_MAX)
        if (is_full and not asked_for) or len(self.by_name) >= 2 * REQUESTS_MAX:
            self.context.counters["requests without room"] += 1
            return False
        request = check_request(message, state, self.context.run, self.context.signer)
        about = request.guilty or request.leave or (request.join.key if request.join else b"")
        same = [each for each in self.by_name.values() if each.about == about and bool(each.request.guilty) == is_proof]
        if not asked_for and len(same) >= OF_AUTHOR_MAX:
            return False
        self.by_name[name] = Waiting(received, request, about)
        return True

    def request(self, name: bytes) -> Request | None:
        waiting = self.by_name.get(name)
        return waiting.request if waiting else None

    def received(self, name: bytes) -> Received | None:
        waiting = self.by_name.get(name)
        return waiting.received if waiting else None

    def names(self) -> tuple[bytes, ...]:
        """For an availability, rising; of too many the evidence first."""
        chosen = sorted(self.by_name, key=lambda name: (not self.by_name[name].request.guilty, name))[:REQUESTS_MAX]
        return tuple(sorted(chosen))

    def prune(self, state: AgreedState) -> None:
        """Forget what has been granted or has lost its meaning."""
        self.by_name = {name: waiting for name, waiting in self.by_name.items() if self._still(waiting, state)}

    def _still(self, waiting: Waiting, state: AgreedState) -> bool:
        """The same test that others apply when they see it: what one attests, the rest must be able to take in."""
        message = waiting.received.message
        assert isinstance(message, JoinRequest | Leave | Evidence)
        if isinstance(message, Evidence):
            return waiting.about in state.place  # that it is proof does not change
        try:
            check_request(message, state, self.context.run, self.context.signer)
        except RemoteProtocolError:
            return False
        return True

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds."""
        return {"requests": (len(self.by_name), 2 * REQUESTS_MAX)}
