"""Named lines: the rates, delay and losses by which homes and servers are connected.

The simulator takes them as `links.line` in a scenario; the benchmarks with real daemons carry packets over them.
Values are what one may expect of such a line, not the best that is sold; all are guesses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """A node's line to all others, which have the same."""

    down_megabits: float  # a second
    up_megabits: float
    delay_seconds: float  # one way, from any node to any other; `ping` shows twice as much
    jitter_seconds: float = 0.0  # mean of what comes on top
    loss: float = 0.0  # share of packets

    def as_links(self) -> dict[str, float]:
        """Returns keys of a scenario's `links`, where messages are lost, that a real line would send again."""
        return {
            "latency_seconds": self.delay_seconds,
            "jitter_seconds": self.jitter_seconds,
            "bytes_per_second": self.up_megabits * 125_000,
            "loss": self.loss,
        }


LINES = {
    "wifi": Line(100.0, 40.0, 0.015, 0.01, 0.005),  # a crowded one, behind a cable
    "dsl": Line(50.0, 10.0, 0.025, 0.002),
    "fibre": Line(500.0, 200.0, 0.01, 0.001),
    "lte": Line(30.0, 10.0, 0.04, 0.015, 0.002),
    "satellite": Line(50.0, 5.0, 0.3, 0.01, 0.005),  # geostationary
    "datacentre": Line(10_000.0, 10_000.0, 0.0005, 0.0001),
}
