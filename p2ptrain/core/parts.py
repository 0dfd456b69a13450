"""What of a node outlives a round: payloads, offers, requests, and how long contributions take."""

from __future__ import annotations

from p2ptrain.core.arrivals import Arrivals
from p2ptrain.core.context import Context
from p2ptrain.core.messages import NOTHING
from p2ptrain.core.offers import Offers
from p2ptrain.core.payloads import Payloads
from p2ptrain.core.requests import Requests


class Parts:
    """Of one node."""

    def __init__(self, context: Context) -> None:
        self.payloads = Payloads(context)
        self.offers = Offers(context.run.agreement.staleness_rounds_max, self.payloads)
        self.requests = Requests(context)
        self.arrivals = Arrivals()
        self.applied_root: tuple[int, bytes] = (0, NOTHING)  # what our availabilities carry
        self.last_began = 0.0
