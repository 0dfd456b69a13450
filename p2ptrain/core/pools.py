"""The pools: what a node takes in from others and keeps from round to round."""

from __future__ import annotations

from collections.abc import Iterable

from p2ptrain.core.admission import Requests
from p2ptrain.core.arrivals import Arrivals
from p2ptrain.core.context import Context
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.newcomers import NewcomerTime
from p2ptrain.core.offers import Offers
from p2ptrain.core.overlap import Exchange
from p2ptrain.core.payloads import Payloads
from p2ptrain.core.state import AgreedState
from p2ptrain.core.tally import Claims, Tallies


class Pools:
    def __init__(self, context: Context) -> None:
        self.payloads = Payloads(context)
        self.offers = Offers(context.run.agreement.staleness_rounds_max, self.payloads)
        self.requests = Requests(context)
        self.arrivals = Arrivals()
        self.newcomers = NewcomerTime()
        self.exchange = Exchange()
        self.tallies = Tallies()  # counts of contributions, only shown
        self.claims = Claims(context.run)  # only shown, too

    def take(self, manifest: Manifest) -> None:
        self.tallies.take(manifest)
        if manifest.banned:
            proofs = [self.requests.request(name) for name in manifest.evidence]
            refused = [self.offers.announcement(name) for name in manifest.refused]
            guilty = [each.guilty if each else None for each in proofs]
            self.tallies.ban(manifest, guilty, [each.author if each else None for each in refused])
        self.claims.take(manifest, self.offers)

    def begin_round(self, state: AgreedState, recent: Iterable[Manifest]) -> None:
        """Forgets what no longer counts after this state; `recent` are the manifests that led to it."""
        self.offers.prune(state)
        self.claims.begin(state, self.offers)
        self.requests.prune(state, recent)
        self.arrivals.forget(state.place)
        self.tallies.forget(state.place)

    @property
    def counted(self) -> tuple[object, ...]:
        """Whatever may let the node advance and a message can change without an effect."""
        return len(self.requests.by_name), self.payloads.deadline

    def limits(self) -> dict[str, tuple[int, int]]:
        pools = (self.offers, self.payloads, self.requests, self.arrivals, self.exchange, self.tallies, self.claims)
        return {name: limit for pool in pools for name, limit in pool.limits().items()}
