"""Checks that what nodes show of claims stays within what honest nodes have claimed.

That is promised where liars are a minority of those who spoke. Every simulated liar claims absurd losses (devices.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2ptrain.core.claims import MILLION
from p2ptrain.core.events import Applied, Effect, Event
from p2ptrain.sim.devices import HONEST_CLAIMS
from p2ptrain.sim.ledger import Checker, Violation

if TYPE_CHECKING:
    from p2ptrain.sim.cluster import Cluster

LOWEST, HIGHEST = HONEST_CLAIMS[0] / MILLION, HONEST_CLAIMS[-1] / MILLION


class HonestClaims(Checker):
    """No honest node shows a loss that only liars have claimed."""

    def __init__(self) -> None:
        self.looked_at = self.shown = 0  # rounds whose training loss was looked at, and held-out losses

    def after(self, cluster: Cluster, index: int, event: Event, effects: Sequence[Effect]) -> None:
        core = cluster.nodes[index].core
        if type(event) is not Applied or core is None:
            return
        view = core.view()
        entry, loss = view.entry(event.round), view.training_of(event.round).loss
        if entry is not None and loss is not None and entry.manifest.branch == event.branch:
            authors = [cluster.nodes[cluster.key_index[taken.author]] for taken in entry.manifest.taken]
            least = view.run.recipe.local_steps_min or view.run.recipe.local_steps
            honest = sum(least for author in authors if author.honest)  # who knows how many steps they took
            if honest > view.run.recipe.local_steps * sum(not author.honest for author in authors):
                self.looked_at += 1
                self._look(index, "training", loss, LOWEST)
        liars = sum(not node.honest for node in cluster.nodes)
        if view.held_out is not None and liars <= 1 and view.held_out.said >= 2:
            self.shown += 1
            self._look(index, "held-out", view.held_out.loss, LOWEST if view.held_out.said > 2 or not liars else 0.0)

    def _look(self, index: int, what: str, loss: float, lowest: float) -> None:
        if not lowest <= loss <= HIGHEST:
            raise Violation(f"node {index} shows a {what} loss of {loss}, which no honest node has claimed")
