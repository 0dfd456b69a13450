"""Measurements of a simulation: rounds, messages, views, contributions taken, bans, states fetched.

Messages and bytes are counted before gossip's own duplication: a published message counts once for its sender and
once for every receiver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from p2ptrain.core.events import Certified
from p2ptrain.core.history import Beginning
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import Message, Vote, kind_of
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.network import bits
from p2ptrain.sim.scenario import Expect


class ManifestFacts(NamedTuple):
    """The facts of a decided manifest that are evaluated in the end: a long simulation cannot keep all manifests."""

    round: int
    digest: bytes
    taken: int  # contributions
    authors: int  # nodes that made them, as bits


class Measurements:
    """Counters of one run."""

    def __init__(self, key_index: Mapping[bytes, int], expect: Expect) -> None:
        self._key_index = key_index
        periods = [(each.since, each.until) for each in expect.paused]
        periods += [(each.since, each.until) for each in expect.progress]
        self._applied: dict[tuple[float, float], Counter[int]] = {period: Counter() for period in periods}
        self.last_applied: dict[int, tuple[float, int]] = {}  # by node: when it applied its last round, and which
        self.heard_messages = 0  # all nodes together
        self.heard_bytes = 0
        self.kinds: Counter[str] = Counter()  # messages sent, by kind
        self.ticks: Counter[int] = Counter()
        self.views: dict[tuple[bytes, int], int] = {}  # last view, by branch and round
        self.manifests: dict[tuple[bytes, int], ManifestFacts] = {}
        self.taken: Counter[bytes] = Counter()  # contributions, by author
        self.counted: Counter[bytes] = Counter()  # those that were applied
        self.banned: dict[bytes, int] = {}  # by key: the round
        self.unseated: Counter[bytes] = Counter()
        self.branches: dict[bytes, Beginning] = {}
        self.returned: Counter[int] = Counter()
        self.states_fetched: Counter[int] = Counter()  # from other nodes, by node
        self.disconnects: Counter[int] = Counter()
        self.stalls: Counter[int] = Counter()
        self.mismatches: Counter[int] = Counter()  # states that came out wrong, by node
        self.payloads_fetched = 0  # from other nodes
        self.audits = 0

    # -----------------------------------------------------------------------------------------------
    # Recorded while the simulation runs

    def published(self, node: SimNode, message: Message, size: int, receivers: int) -> None:
        kind = message.ballot.name.lower() if type(message) is Vote else kind_of(message)
        self.kinds[kind] += 1
        self.heard_messages += receivers
        self.heard_bytes += receivers * size

    def sent(self, node: SimNode, kind: str, size: int) -> None:
        self.kinds[kind] += 1
        self.heard_messages += 1
        self.heard_bytes += size

    def certified(self, node: SimNode, record: Certified) -> None:
        """Notes that a node has adopted a decided round, or a branch."""
        if not node.honest:
            return
        step = record.step
        if isinstance(step, Beginning):
            self.branches.setdefault(step.branch, step)
            return
        manifest = step.manifest
        place = manifest.branch, manifest.round
        self.views[place] = max(step.certificate.view, self.views.get(place, 0))
        if place not in self.manifests:
            authors = [self._key_index[each.author] for each in manifest.taken if each.author in self._key_index]
            facts = ManifestFacts(manifest.round, manifest.digest, len(manifest.taken), bits(authors))
            self.manifests[place] = facts
            self.taken.update(taken.author for taken in manifest.taken)
            self.counted.update(taken.author for taken in manifest.taken if taken.counts)
            self.unseated.update(manifest.unseated)
            for key in manifest.banned:
                self.banned.setdefault(key, manifest.round)

    def audited(self) -> None:
        self.audits += 1

    def fetched_payload(self) -> None:
        self.payloads_fetched += 1

    def applied(self, node: SimNode, manifest: Manifest, now: float) -> None:
        self.last_applied[node.index] = now, manifest.round
        for (since, until), applied in self._applied.items():
            applied[node.index] += since < now <= until

    def look_for_stall(self, node: SimNode) -> None:
        """Counts how often nodes concluded that the quorum was lost."""
        if node.core is None:
            return
        self.stalls[node.index] += node.process.begins_to_stall(node.core.view().is_stalled)

    # -----------------------------------------------------------------------------------------------
    # Evaluated afterwards

    def rounds_between(self, index: int, since: float, until: float) -> int:
        """Returns how many rounds a node applied in a period that the scenario has expectations of."""
        return self._applied[since, until][index]
