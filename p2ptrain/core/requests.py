"""Requests: the pool of verified joins, leaves, evidence and audits that wait for a manifest.

At most two requests per author wait, and joins may fill only part of the pool, so that a crowd of newcomers cannot keep
out evidence and leaves. Each round begins with room for new joins, so that nobody keeps the others out; newcomers ask
again later. Evidence is counted separately: otherwise a liar with two pending
leaves could not be convicted, and a crowd that leaves would keep out all evidence.

A join from before its author was last admitted or removed is not attested: a member that repeats it would bring back
who has left, and use up an invitation.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from p2ptrain.core.admission import Asking, check_request
from p2ptrain.core.audits import SUMMONS_MAX
from p2ptrain.core.context import Context
from p2ptrain.core.manifest import Manifest, Request, joins_max
from p2ptrain.core.messages import REQUESTS_MAX, SEATS_MAX, AuditReport, Evidence, JoinRequest, Received
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import RemoteProtocolError

JOINS_MAX = REQUESTS_MAX // 2
EVIDENCE_MAX = REQUESTS_MAX // 2  # apart from joins and leaves; three times the number of tolerated liars
OF_AUTHOR_MAX = 2
AUDITS_OF_MEMBER_MAX = SUMMONS_MAX + 2  # one for each summons, and those of two rounds
AUDITS_MAX = SEATS_MAX * AUDITS_OF_MEMBER_MAX


class Waiting(Struct):
    received: Received
    request: Request
    about: bytes  # the key that it concerns
    since: int  # the last round that was decided when it came


class Requests:
    """The pool of requests, by name."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.by_name: dict[bytes, Waiting] = {}
        self.settled: dict[bytes, int] = {}  # by key: the last recent round that admitted or removed it

    def add(self, received: Received, state: AgreedState, asked_for: bool = False) -> bool:
        """Adds a request; returns False if it is useless or does not fit, raises RemoteProtocolError if it is invalid.

        A request that we asked for, because others attest it, always fits: the manifest depends on it.
        """
        name = received.name
        if name in self.by_name:
            return False
        message = received.message
        assert isinstance(message, Asking)
        joins = self._joins()
        proofs = sum(bool(waiting.request.guilty) for waiting in self.by_name.values())
        is_proof = isinstance(message, Evidence)
        audits = [waiting for waiting in self.by_name.values() if waiting.request.measured]
        if isinstance(message, AuditReport):
            mine = sum(each.about == message.author for each in audits)
            is_full = len(audits) >= AUDITS_MAX or mine >= AUDITS_OF_MEMBER_MAX
        elif is_proof:
            is_full = proofs >= EVIDENCE_MAX
        else:
            is_full = len(self.by_name) - proofs - len(audits) >= REQUESTS_MAX
            is_full = is_full or (isinstance(message, JoinRequest) and len(joins) >= JOINS_MAX)
        room = 2 * REQUESTS_MAX - (0 if is_proof else EVIDENCE_MAX - min(proofs, EVIDENCE_MAX))
        if (is_full and not asked_for) or len(self.by_name) - len(audits) >= room or len(audits) >= 2 * AUDITS_MAX:
            self.context.counters["requests without room"] += 1
            return False
        request = check_request(message, state, self.context.run, self.context.signer)
        if request.measured:
            self.by_name[name] = Waiting(received, request, request.measured.author, state.round)
            return True
        about = request.guilty or request.leave or (request.join.key if request.join else b"")
        same = [
            each
            for each in self.by_name.values()
            if each.about == about and bool(each.request.guilty) == is_proof and not each.request.measured
        ]
        waiting = Waiting(received, request, about, state.round)
        if not asked_for and (len(same) >= OF_AUTHOR_MAX or self._is_repeated(waiting)):
            return False
        self.by_name[name] = waiting
        return True

    def _is_repeated(self, waiting: Waiting) -> bool:
        """Whether it is a join that has counted already."""
        message = waiting.received.message
        return isinstance(message, JoinRequest) and message.round <= self.settled.get(message.author, -1)

    def _joins(self) -> list[bytes]:
        return [name for name, waiting in self.by_name.items() if waiting.request.join is not None]

    def request(self, name: bytes) -> Request | None:
        waiting = self.by_name.get(name)
        return waiting.request if waiting else None

    def received(self, name: bytes) -> Received | None:
        waiting = self.by_name.get(name)
        return waiting.received if waiting else None

    def names(self, state: AgreedState) -> tuple[bytes, ...]:
        """Returns the names for an availability, ascending; if there are too many, evidence and audits go first.

        The last manifest draws which joins are granted. If that matters, joins that came in its round or later wait,
        because their keys may have been made to be drawn: its digest is known when it is proposed.
        """
        joins = self._joins()
        late = {name for name in joins if self.by_name[name].since >= state.round - 1}
        known = self.by_name.keys() - late if len(joins) > joins_max(state.roster.size) else self.by_name
        fresh = [name for name in known if not self._is_repeated(self.by_name[name])]

        def rank(name: bytes) -> tuple[bool, bool, bytes]:  # a crowd of newcomers keeps out neither proofs nor audits
            request = self.by_name[name].request
            return not request.guilty, not request.measured, name

        chosen = self._one_audit_each(sorted(fresh, key=rank))[:REQUESTS_MAX]
        return tuple(sorted(chosen))

    def _one_audit_each(self, names: list[bytes]) -> list[bytes]:
        """Leaves out audits of which only one can count: of a member one, and one for each summons."""
        found: dict[object, bytes] = {}
        for name in names:
            measured = self.by_name[name].request.measured
            place = (measured.author, measured.is_summoned and (measured.key, measured.round)) if measured else name
            found.setdefault(place, name)
        return list(found.values())

    def prune(self, state: AgreedState, recent: Iterable[Manifest]) -> None:
        """Forgets requests that were granted or have become invalid, and of too many joins some at random. `recent` are
        the manifests in which a request that is still valid may have counted, the newest first."""
        self.settled = {}
        for manifest in recent:
            for key in (*(join.key for join in manifest.joins), *manifest.leaves, *manifest.banned):
                self.settled.setdefault(key, manifest.round)
        self.by_name = {name: waiting for name, waiting in self.by_name.items() if self._still(waiting, state)}
        joins = self._joins()
        for name in self.context.rng.sample(joins, max(0, len(joins) - JOINS_MAX // 2)):
            del self.by_name[name]

    def _still(self, waiting: Waiting, state: AgreedState) -> bool:
        """Whether a request is still valid, by the same test that others apply to what we attest."""
        message = waiting.received.message
        assert isinstance(message, Asking)
        if isinstance(message, Evidence):
            return waiting.about in state.place  # a proof stays valid
        try:
            check_request(message, state, self.context.run, self.context.signer)
        except RemoteProtocolError:
            return False
        return True

    def limits(self) -> dict[str, tuple[int, int]]:
        audits = sum(waiting.request.measured is not None for waiting in self.by_name.values())
        return {"requests": (len(self.by_name) - audits, 2 * REQUESTS_MAX), "audits": (audits, 2 * AUDITS_MAX)}
