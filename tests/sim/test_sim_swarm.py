"""Swarm testing draws only faults that the protocol must tolerate, and reports and shrinks failures."""

from __future__ import annotations

import tomllib
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from p2ptrain.core.roster import tolerated_by
from p2ptrain.sim import scenario as sc
from p2ptrain.sim import swarm
from p2ptrain.sim.ledger import TwoHistories, Violation
from p2ptrain.sim.outcome import Outcome, simulate
from p2ptrain.sim.scenario import Scenario, scenario_of, to_toml


def test_drawing_is_a_function_of_the_seed() -> None:
    assert [swarm.draw(seed) for seed in range(20)] == [swarm.draw(seed) for seed in range(20)]
    assert len({to_toml(swarm.draw(seed)) for seed in range(200)}) == 200


def test_at_most_f_lie_or_are_gone_for_good() -> None:
    for seed in range(500):
        scenario = swarm.draw(seed)
        liars = {node for fault in scenario.fault if isinstance(fault, sc.Lie) for node in scenario.pick(fault.nodes)}
        crashes = [fault for fault in scenario.fault if isinstance(fault, sc.Crash)]
        dead = {node for fault in crashes if fault.until is None for node in scenario.pick(fault.nodes)}
        forgetful = {node for fault in crashes if fault.forgetful for node in scenario.pick(fault.nodes)}
        left = {
            node for fault in scenario.fault if isinstance(fault, sc.Departure) for node in scenario.pick(fault.nodes)
        }
        assert len(liars | dead | left | forgetful) <= tolerated_by(scenario.nodes)
        assert not (liars & dead or liars & left or dead & left)
        assert scenario.end_of_faults < scenario.seconds


def test_every_fault_and_every_liar_comes_up() -> None:
    drawn = [fault for seed in range(1_500) for fault in swarm.draw(seed).fault]
    assert {type(fault) for fault in drawn} == set(get_args(sc.AnyFault)) - {sc.Flip}  # has a scenario of its own
    told = {fault.how for fault in drawn if isinstance(fault, sc.Lie)}
    assert told == {*swarm.LIAR_KINDS, *swarm.AUDIT_LIES, swarm.SUCCESSION_LIE}
    assert {swarm.draw(seed).nodes for seed in range(300)} == set(range(4, 17))


def test_a_swarm_test_counts_what_it_has_done() -> None:
    told: list[tuple[int, int]] = []
    tally = swarm.swarm(60, 0, progress=lambda tally: told.append((tally.seeds, tally.rounds)))
    assert tally.failed is None
    assert (tally.seeds, tally.rounds) == told[-1]
    assert tally.rounds >= 60
    assert len(told) == 1 or told[-2][1] < 60
    assert " s: nothing found" in str(tally)


def test_a_swarm_test_stops_when_its_time_is_over() -> None:
    assert swarm.swarm(10**9, 0, seconds=0.0).seeds == 0
    assert swarm.swarm(10**9, 0, seconds=0.001).seeds == 1


def broken(monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """Fails every scenario with a clog and at least five nodes."""
    tried: list[Scenario] = []

    def run(scenario: Scenario, seed: int) -> Outcome:
        tried.append(scenario)
        plain = scenario_of({"sentence": "Nothing.", "nodes": 1, "rounds": 1})
        outcome = simulate(plain, seed)
        fails = scenario.nodes >= 5 and any(isinstance(fault, sc.Clog) for fault in scenario.fault)
        return replace(outcome, failures=[f"clogged, with {scenario.nodes} nodes"] if fails else [])

    monkeypatch.setattr(swarm, "run", run)
    return tried


def test_a_failure_is_told_with_its_seed_and_command_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = broken(monkeypatch)
    tally = swarm.swarm(10**9, 1_000)
    failed = tally.failed
    assert failed is not None
    assert failed.seed == 1_000 + tally.seeds - 1
    assert failed.failures == [f"clogged, with {swarm.draw(failed.seed).nodes} nodes"]
    shrunk = failed.scenario
    assert (shrunk.nodes, shrunk.rounds, [type(fault) for fault in shrunk.fault]) == (5, 5, [sc.Clog])
    assert (shrunk.links, shrunk.training, shrunk.disk, shrunk.agreement) == (
        sc.Links(),
        sc.Workload(),
        sc.Durability(),
        {},
    )
    assert failed.shrunk_failures == ["clogged, with 5 nodes"]
    text = str(failed)
    assert f"p2ptrain simulate --swarm 1 --seed {failed.seed}" in text
    assert scenario_of(tomllib.loads(text.partition("\n\n# ")[2].partition("\n")[2])) == shrunk
    assert len(tried) > 5


@pytest.mark.parametrize("seed", range(40))
def test_taking_a_node_away_leaves_a_scenario_that_can_run(seed: int) -> None:
    scenario = swarm.draw(seed)
    while scenario.nodes > 4:
        smaller = swarm.without(scenario, seed % scenario.nodes)
        assert smaller.nodes == scenario.nodes - 1
        assert scenario_of(tomllib.loads(to_toml(smaller))) == smaller
        scenario = smaller


@pytest.mark.parametrize("error", [AssertionError("the world has ended"), KeyError("a round")])
def test_a_crash_of_the_core_is_told_also_beyond_what_is_promised(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crashed(scenario: Scenario, seed: int, *_: Any) -> Outcome:
        outcome = simulate(scenario_of({"sentence": "Nothing.", "nodes": 1, "rounds": 1}), seed)
        outcome.cluster.watch.is_beyond = True
        return replace(outcome, failures=["the core has crashed"], error=error)

    monkeypatch.setattr(swarm, "simulate", crashed)
    assert swarm.run(swarm.draw(5), 5).failures == ["the core has crashed"]


@pytest.mark.parametrize("error", [None, Violation("somebody honest is banned")])
def test_a_run_beyond_what_is_promised_has_no_verdict(error: Violation | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def beyond(scenario: Scenario, seed: int, *_: Any) -> Outcome:
        outcome = simulate(scenario_of({"sentence": "Nothing.", "nodes": 1, "rounds": 1}), seed)
        outcome.cluster.watch.is_beyond = True
        return replace(outcome, failures=["the world has ended"], error=error)

    monkeypatch.setattr(swarm, "simulate", beyond)
    tally = swarm.swarm(1, 5)
    assert (tally.failed, tally.beyond) == (None, 1)
    assert str(tally).endswith("nothing found, 1 reached a roster with more than f faulty members")


def test_two_histories_are_told_also_beyond_what_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    def forked(scenario: Scenario, seed: int, *_: Any) -> Outcome:
        outcome = simulate(scenario_of({"sentence": "Nothing.", "nodes": 1, "rounds": 1}), seed)
        outcome.cluster.watch.is_beyond = True
        return replace(outcome, failures=["two manifests"], error=TwoHistories("two manifests"))

    monkeypatch.setattr(swarm, "simulate", forked)
    assert swarm.run(swarm.draw(5), 5).failures == ["two manifests"]
