"""/metrics: the status once more, as Prometheus counts and names things.

Everything is read when it is asked for. Labels come from lists in the code, never from a peer, so that nobody can make
as many time series as they like. Counters begin anew with the process, as Prometheus expects, but for
energy, which is counted over all starts. A counter never falls while the node lives: what goes up and down is a gauge.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2ptrain.core.complaints import Code
from p2ptrain.core.reputation import Reason
from p2ptrain.web.models import Direction, Purpose, Status

PHASES = ("train", "collect", "agree", "apply")
OUTCOMES = {
    "taken": "contributions taken",
    "expired": "contributions expired",
    "too_late": "contributions too late",
    "failed": "trainings failed",
}


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    """Nothing, where there is no value yet."""
    if value is not None:
        yield GaugeMetricFamily(f"p2ptrain_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    return _labelled(GaugeMetricFamily(f"p2ptrain_{name}", text, labels=[label]), values)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"p2ptrain_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    return _labelled(CounterMetricFamily(f"p2ptrain_{name}", text, labels=[label]), values)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[str, float]]) -> Metric:
    for each, value in values:
        family.add_metric([each], value)
    return family


def _of_rounds(status: Status) -> Iterator[Metric]:
    yield from _gauge("round", "Round that is being worked on.", status.round)
    yield from _gauge("applied_round", "Last round whose update is in this node's weights.", status.applied_round)
    yield from _gauge("certified_round", "Newest round whose state root is certified.", status.certified_round)
    yield from _gauge(
        "since_applied_seconds", "Seconds since a round was applied; absent before one.", status.since_applied_seconds
    )
    yield _gauges(
        "phase", "1 for the phase that the round is in.", "phase", [(each, each == status.phase) for each in PHASES]
    )
    yield from _gauge("view", "Tries of this round to agree before this one.", status.view)
    yield from _gauge("held_contributions", "Contributions on offer that are here.", status.held)
    yield _counter("root_mismatches", "States that came out wrong here.", status.counters.get("root mismatches", 0))
    outcomes = [(each, float(status.counters.get(name, 0))) for each, name in OUTCOMES.items()]
    yield _counters("contributions", "This node's own contributions, by what became of them.", "outcome", outcomes)


def _of_swarm(status: Status) -> Iterator[Metric]:
    yield from _gauge("roster_members", "Peers with a vote.", len(status.roster))
    yield from _gauge("quorum_members", "Members that decide together.", status.quorum)
    tolerance = status.fault_tolerance
    faults = [("liar", float(tolerance.liars)), ("crash", float(tolerance.crashes))]
    yield _gauges("tolerated_members", "Members that may fail so without harm.", "fault", faults)
    yield from _gauge("admitted_peers", "Peers that may contribute.", status.admitted)
    yield from _gauge("connected_peers", "Peers that are connected.", len(status.peers))
    yield from _gauge("is_member", "1 if this node has a vote.", status.is_member)
    yield from _gauge("is_admitted", "1 if this node may contribute.", status.is_admitted)
    reasons = [(each.value, float(status.observed.get(each.value, 0))) for each in Reason]
    yield _counters("peer_faults", "Faults of peers that were noted.", "reason", reasons)


def _of_learning(status: Status) -> Iterator[Metric]:
    yield from _gauge("loss_nats", "Mean loss of the last round that was trained here, nats a token.", status.loss)
    not_finite = status.counters.get("trainings not finite", 0)
    yield _counter("trainings_not_finite", "Trainings ended by a loss or gradient that is not finite.", not_finite)
    yield _counter("tokens", "Tokens trained on here.", status.tokens)
    yield _counter("training_seconds", "Time spent training here.", status.training_seconds)
    if status.mine.energy_joules is not None:
        yield _counter("energy_joules", "What the whole device has used, over all starts.", status.mine.energy_joules)
    yield from _gauge("payload_bytes", "Size of one contribution.", status.payload_bytes)
    yield from _gauge("state_bytes", "Size of the weights.", status.state_bytes)


def _of_node(status: Status) -> Iterator[Metric]:
    codes = {each.code for each in status.complaints}
    yield _gauges(
        "health", "1 for each complaint that the node has.", "kind", [(each.value, each in codes) for each in Code]
    )
    is_degraded = Code.DEGRADED in codes
    yield from _gauge("disk_degraded", "1 while the disk does not take what has to be saved first.", is_degraded)
    yield from _gauge(
        "disk_free_bytes", "What this node may still write to the disk of its run.", status.disk_free_bytes
    )
    damaged = status.counters.get("damaged files", 0)
    yield _counter("damaged_files", "Files of this node that were found damaged, and done without.", damaged)
    yield from _gauge("is_paused", "1 while it is not to train: its owner, its hours or its battery.", status.is_paused)
    yield from _gauge(
        "event_loop_lag_seconds", "How late the event loop was at worst in the last minute.", status.loop_lag_seconds
    )
    yield from _gauge("uptime_seconds", "Time since this daemon took up the run.", status.uptime_seconds)
    traffic = CounterMetricFamily(
        "p2ptrain_traffic_bytes",
        "Bytes by purpose, as the node counts them: without what libp2p adds or passes on.",
        labels=["purpose", "direction"],
    )
    for purpose in get_args(Purpose):
        for direction in get_args(Direction):
            traffic.add_metric([purpose, direction], getattr(status.traffic[purpose], direction))
    yield traffic
    yield from _gauge("queued_frames", "Frames of messages that wait to be sent over streams.", status.queued_frames)
    limits = [
        ("sent", float(status.limits.upload_bytes_per_second)),
        ("received", float(status.limits.download_bytes_per_second)),
    ]
    yield _gauges("limit_bytes_per_second", "What the owner allows; 0: no limit.", "direction", limits)
    events = [(name.replace(" ", "_"), float(count)) for name, count in sorted(status.counters.items())]
    yield _counters("occurrences", "What else happened, by name; names come from the code.", "what", events)


class Metrics(Collector):
    """Of one node. `status` is None while there is none yet; `own` is what the server counts of itself."""

    def __init__(self, release: str, status: Callable[[], Status | None], own: Callable[[], Iterable[Metric]]) -> None:
        self._release, self._status, self._own = release, status, own
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("p2ptrain_build_info", "Always 1; the labels tell.", labels=["version", "python"])
        build.add_metric([self._release, platform.python_version()], 1)
        yield build
        yield from self._own()
        if (status := self._status()) is not None:
            for part in (_of_rounds, _of_swarm, _of_learning, _of_node):
                yield from part(status)
