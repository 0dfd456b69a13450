"""/metrics: the figures in Prometheus' format.

Everything is read on request. Label values come from lists in the code, never from a peer, so that no peer can create
time series at will. Counters restart with the process, as Prometheus expects, except for energy, which is counted over
all starts. A counter never decreases while the node runs; values that do are gauges.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from p2ptrain.core.complaints import Code
from p2ptrain.observe.figures import figures_of
from p2ptrain.observe.schema import RoundRecord, Status

OF_ROUND = "last_round_"  # prefix of the metrics of a round


def of_figures(model: type[BaseModel], told: Any, prefix: str = "") -> Iterable[Metric]:
    """Returns the metrics of a model's figures, except of those without a value yet."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for each in figures_of(model):
        figure, name = each.figure, f"p2ptrain_{each.figure.metric or prefix + each.name.replace('.', '_')}"
        title, described = figure.title[:1].upper() + figure.title[1:], each.description.replace("null:", "absent:")
        about = figure.text or f"{title}: {described or figure.unit}."
        labels = [label for label, _ in figure.labels] + ([figure.label] if figure.label else [])
        samples = [*each.samples(told)]
        if name not in families and (samples or figure.label):
            kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            families[name] = kind(name, about, labels=labels)
        for sample, value in samples:
            families[name].add_metric([sample[label] for label in labels], value)
    return families.values()


def of_health(status: Status) -> Metric:
    codes = {each.code for each in status.complaints}
    health = GaugeMetricFamily("p2ptrain_health", "1 for each current complaint of the node.", labels=["kind"])
    for each in Code:
        health.add_metric([each.value], each in codes)
    return health


class MetricsPage(Collector):
    """Collects a node's metrics. `status` and `rounds` return None while it starts; `own` yields the server's."""

    def __init__(
        self,
        release: str,
        status: Callable[[], Status | None],
        rounds: Callable[[int], list[RoundRecord] | None],
        own: Callable[[], Iterable[Metric]],
    ) -> None:
        self._release, self._status, self._rounds, self._own = release, status, rounds, own
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "p2ptrain_build_info", "Always 1; the labels have the versions.", labels=["version", "python"]
        )
        build.add_metric([self._release, platform.python_version()], 1)
        yield build
        yield from self._own()
        if (status := self._status()) is not None:
            yield from of_figures(Status, status)
            yield of_health(status)
        for each in self._rounds(1) or ():
            yield from of_figures(RoundRecord, each, OF_ROUND)
