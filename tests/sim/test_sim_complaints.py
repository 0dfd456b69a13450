"""Simulated nodes complain at the right time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from p2ptrain.core.complaints import Code
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.outcome import simulate
from tests.helpers.sim import scenario


def complaints(seconds: int, code: Code = Code.FEW_HEARD, **changes: Any) -> dict[int, list[int]]:
    """Returns the seconds at which each of five nodes complains, by default that it hears too few."""
    told: defaultdict[int, list[int]] = defaultdict(list)

    def look(cluster: Cluster, second: int) -> None:
        for node in cluster.nodes:
            if node.core is not None and code in {each.code for each in node.core.view().complaints}:
                told[node.index].append(second)

    def prepare(cluster: Cluster) -> None:
        for second in range(1, seconds):
            cluster.calendar.at(float(second), look, cluster, second)

    outcome = simulate(scenario(5, **{"rounds": 40, "seconds": 1_000.0, **changes}), 1, standard(), prepare)
    assert outcome.failures == []
    return told


def test_five_of_whom_two_are_cut_off_for_a_minute_say_that_they_hear_too_few() -> None:
    told = complaints(120, fault=[{"kind": "partition", "at": 20, "until": 80, "groups": ["0-2", "3-4"]}])
    assert told.keys() == {*range(5)}
    for seconds in told.values():
        assert 60 <= seconds[0] <= 70 and 78 <= seconds[-1] <= 84
        assert seconds == [*range(seconds[0], seconds[-1] + 1)]


def test_a_swarm_that_is_well_hears_enough_also_while_it_trains_for_minutes() -> None:
    assert complaints(100) == {}
    long = {"seconds": 200.0, "spread": 0.0, "apply_seconds": 0.5}
    assert complaints(900, training=long, rounds=3, links={"loss": 0.1}) == {}


def test_the_four_who_are_left_of_five_say_that_one_more_loss_stops_the_run() -> None:
    lost = {"fault": [{"kind": "partition", "at": 20, "until": 80, "groups": ["0-3", "4"]}]}
    told = complaints(100, Code.QUORUM_NEAR, **lost, admission={"absence_rounds_max": 60})
    assert told.keys() == {0, 1, 2, 3}
    for seconds in told.values():
        assert 60 <= seconds[0] <= 70 and 78 <= seconds[-1] <= 84
    assert complaints(100, Code.QUORUM_NEAR, **lost) == {}, "it loses its seat, and gets another"
    assert complaints(100, Code.QUORUM_NEAR) == {}
