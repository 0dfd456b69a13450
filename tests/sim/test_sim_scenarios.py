"""Every scenario in scenarios/ does what its sentence says, and scenario files are read strictly."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.liars import KINDS
from p2ptrain.sim.outcome import history, rate, simulate, summary
from p2ptrain.sim.scenario import LINES, Expect, Links, Scenario, load_scenario, scenario_of, to_toml

FOLDER = Path(__file__).parents[2] / "scenarios"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
# What small simulations of the protocol fell into before it was written. Each has a scenario; that it would fall again
# without the rule that was made for it is shown in test_sim_traps.py.
TRAPS = {
    "trap-deadline", "trap-heavier-branch", "trap-dead-author", "trap-long-cut", "trap-lost-prevotes",
    "trap-lost-proposals", "trap-proposers", "trap-empty-rounds", "trap-absence", "trap-settle",
}  # fmt: skip
SEED = 1


@pytest.mark.parametrize("name", NAMES)
def test_the_scenario_does_what_it_says(name: str) -> None:
    outcome = simulate(load_scenario(FOLDER / f"{name}.toml"), SEED, standard())
    assert outcome.failures == []


@pytest.mark.parametrize("name", ["large-payloads", "slow-disk", "trap-empty-rounds"])
@pytest.mark.parametrize("seed", [2, 8])  # the worst of ten
def test_margins_hold_with_other_seeds(name: str, seed: int) -> None:
    assert simulate(load_scenario(FOLDER / f"{name}.toml"), seed, standard()).failures == []


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("liar-claim-to-be-ahead", 20),  # two members held up a newcomer in turn until the scenario was over
        ("liar-claim-to-be-ahead", 213546703),
        ("liar-false-lengths", 153030369),  # one liar was always first, and had nothing to lie about
        ("two-nodes-restart", 2),  # started again it knew of no pace, and waited two minutes for a member that was dead
        ("three-nodes-restart", 4),
    ],
)
def test_luck_no_longer_decides(name: str, seed: int) -> None:
    assert simulate(load_scenario(FOLDER / f"{name}.toml"), seed, standard()).failures == []


def test_there_are_scenarios_for_everything() -> None:
    assert len(NAMES) >= 20
    assert set(NAMES) >= TRAPS
    sentences = [load_scenario(FOLDER / f"{name}.toml").sentence for name in NAMES]
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in sentences)
    assert len(set(sentences)) == len(NAMES)
    assert {name for name in NAMES if name.startswith("liar-")} == {f"liar-{kind.replace(' ', '-')}" for kind in KINDS}


# ---------------------------------------------------------------------------------------------------
# Files


def table(**changes: Any) -> dict[str, Any]:
    return {"sentence": "One.", "nodes": 4, "rounds": 3, **changes}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"node": 3}, "object contains unknown field `node`. Compare with the files in scenarios/"),
        ({"links": {"los": 0.1}}, "links: object contains unknown field `los`. "),
        ({"links": {"line": "dls"}}, "links.line: no line is 'dls'. Choose wifi, dsl, fibre,"),
        ({"links": {"line": ["dsl"]}}, "links.line: no line is ['dsl']. Choose wifi, dsl, fibre,"),
        (
            {"fault": [{"kind": "crash", "at": 1, "nodes": [0], "unti": 3}]},
            "fault[0]: object contains unknown field `unti`. ",
        ),
        (
            {"training": {"slow": [{"nodes": [0], "time": 3}]}},
            "training.slow[0]: object contains unknown field `time`. ",
        ),
        (
            {"fault": [{"kind": "crash", "nodes": [0]}]},
            "fault[0]: object missing required field `at`. ",
        ),
        (
            {"fault": [{"kind": "crsh", "at": 1}]},
            "fault[0].kind: invalid value 'crsh'. ",
        ),
        ({"links": {"loss": 2}}, "links.loss: expected `float` <= 1.0. "),
        ({"nodes": "many"}, "nodes: expected `int`, got `str`. "),
        ({"agreement": {"view_second": 3}}, "agreement.view_second: unknown key. Did you mean view_seconds?"),
        ({"agreement": {"view_seconds": 0}}, "agreement.view_seconds: 0 is not valid. Choose 1 to 600"),
        (
            {"fault": [{"kind": "leave", "at": 1, "nodes": [4]}]},
            "fault[0].nodes: there is no node 4. Name nodes from 0 to 3",
        ),
        (
            {"fault": [{"kind": "leave", "at": 1, "nodes": "some"}]},
            "fault[0].nodes: 'some' names no nodes. Write numbers",
        ),
        (
            {"fault": [{"kind": "crash", "at": 9, "until": 3, "nodes": [0]}]},
            "fault[0].until: ends at 3.0, before it begins. Write 9.0 or more",
        ),
        (
            {"fault": [{"kind": "leave", "at": 1, "nodes": "0-9999999999"}]},
            "fault[0].nodes: '0-9999999999' names no nodes. Write numbers",
        ),
        (
            {"fault": [{"kind": "leave", "at": 1, "nodes": "0-999999999"}]},
            "fault[0].nodes: there is no node 999999999. Name nodes from 0 to 3",
        ),
        ({"fault": [{"kind": "leave", "at": 1, "nodes": "3-1"}]}, "fault[0].nodes: '3-1' names no nodes. "),
        ({"fault": [{"kind": "leave", "at": 1, "nodes": "9" * 5_000}]}, "fault[0].nodes: '99999999"),
        ({"expect": {"taken_from": {"0-2": 3}}}, "expect.taken_from.0-2: is not a node's number. Write such as 3"),
        ({"expect": {"taken_from": {"zero": 3}}}, "expect.taken_from.zero: is not a node's number. Write such as"),
        ({"expect": {"taken_from": {"7": 3}}}, "expect.taken_from.7: there is no node 7. Name nodes from 0 to 3"),
        ({"expect": {"members": [7]}}, "expect.members: there is no node 7. Name nodes from 0 to 3"),
    ],
)
def test_a_mistake_names_the_key_and_the_fix(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario_of(table(**changes), "s.toml")
    assert str(caught.value).startswith(f"s.toml: {complaint}")


@pytest.mark.parametrize(("text", "complaint"), [("x = = 3", "not TOML"), ("", "missing required field `sentence`")])
def test_a_file_that_is_no_scenario_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_scenario(tmp_path / "s.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")


def test_a_lie_that_no_liar_tells_is_refused() -> None:
    scenario = scenario_of(table(fault=[{"kind": "liar", "at": 9, "how": "fib", "nodes": [0]}]))
    with pytest.raises(ConfigError, match=r"^fault\[0\].how: no liar does 'fib'. Choose equivocate"):
        simulate(scenario, SEED)


def test_a_named_line_gives_what_the_scenario_does_not() -> None:
    scenario = scenario_of(table(links={"line": "dsl", "loss": 0.25}))
    assert scenario.links == Links(**{**LINES["dsl"].as_links(), "loss": 0.25})
    assert scenario.links.bytes_per_second == 1_250_000


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_is_written_as_it_is_read(name: str) -> None:
    scenario = load_scenario(FOLDER / f"{name}.toml")
    assert scenario_of(tomllib.loads(to_toml(scenario))) == scenario


@pytest.mark.parametrize(
    ("nodes", "found"),
    [([3, 1, 1], [1, 3]), ("0-2 5", [0, 1, 2, 5]), ("all", list(range(7))), ("f", [5, 6]), ("4", [4]), ("", [])],
)
def test_nodes_are_named_in_several_ways(nodes: list[int] | str, found: list[int]) -> None:
    assert scenario_of(table(nodes=7)).pick(nodes) == found


# ---------------------------------------------------------------------------------------------------
# Expectations and the report


def small(**changes: Any) -> Scenario:
    return scenario_of(table(rounds=8, **changes))


UNMET: list[tuple[dict[str, Any], str]] = [
    ({"taken_share_min": 1.0, "taken_from": {"0": 99}}, "contributions of node 0 were taken, expected 99 at least"),
    ({"counted_max": {"1": 3}}, "contributions of node 1 were applied, expected 3 at most"),
    ({"paused": [{"nodes": [1], "since": 0, "until": 5}]}, "from 0 to 5 s, expected none"),
    ({"progress": [{"nodes": "0-1", "since": 0, "until": 5, "rounds": 40}]}, "from 0 to 5 s, expected 40 at least"),
    ({"regroups_min": 1}, "branches begun: 0, expected 1 at least"),
    ({"banned": [2]}, "banned are [], expected [2]"),
    ({"ended": [2]}, "the run is over for [], expected [2]"),
    ({"members": [0, 1]}, "members in the end are [0, 1, 2, 3], expected [0, 1]"),
    ({"left": [3]}, "node 3 has not left properly"),
    ({"views_min": 5}, "the longest round's views beyond its first: 0, expected 5 at least"),
    ({"catch_ups_min": 1}, "states fetched: 0, expected 1 at least"),
    ({"mismatches_min": 1}, "nodes whose root differed: 0, expected 1 at least"),
    ({"resumed_seconds_max": 0.0}, "expected within 0 s of the faults' end"),
]


@pytest.mark.parametrize(("expect", "failure"), UNMET)
def test_an_expectation_that_is_not_met_is_a_failure(expect: dict[str, Any], failure: str) -> None:
    outcome = simulate(small(expect=expect), SEED)
    assert outcome.failures
    assert all(failure in each for each in outcome.failures)


def test_too_many_ticks_are_a_failure() -> None:
    outcome = simulate(small(expect={"events_max": 0.001}, training={"seconds": 30.0}), SEED)
    assert ["ticks a node and round: " in each for each in outcome.failures] == [True]


def test_every_expectation_is_tried() -> None:
    tried = {key for expect, _ in UNMET for key in expect}
    in_scenarios = {"rate_share_min", "regroups_max", "views_max", "empty_rounds_max", "stalls_max"}
    in_scenarios |= {"kept", "mismatches_max", "events_max"}
    assert tried | in_scenarios == set(Expect.__struct_fields__)


def test_a_rate_is_held_against_the_clean_twin() -> None:
    slow = {"seconds": 1, "slow": [{"nodes": "all", "times": 4}]}
    outcome = simulate(small(training=slow, expect={"rate_share_min": 0.5}), SEED)
    assert outcome.clean_rate is not None
    assert len(outcome.failures) == 1
    assert outcome.failures[0].endswith(f"rounds a minute, of {outcome.clean_rate:.2f} when nothing is wrong")


def test_the_summary_says_what_happened() -> None:
    outcome = simulate(small(expect={"rate_share_min": 0.5, "views_min": 3}), SEED)
    lines = {line[:12].strip(): line[12:] for line in summary(outcome, SEED).splitlines()}
    assert lines["scenario"] == "One."
    assert lines["nodes"].startswith("4, seed 1, ")
    assert lines["rounds"].split()[1] == "decided,"
    assert lines["rounds"].endswith("100% of the clean rate")
    assert lines["shut out"] == "banned: nobody; lost a seat: nobody; 0 disconnections"
    assert lines["members"] == "4 in the end"
    assert lines["FAILED"] == "the longest round's views beyond its first: 0, expected 3 at least"


def test_rounds_on_branches_that_lost_are_told_apart() -> None:
    outcome = simulate(load_scenario(FOLDER / "trap-heavier-branch.toml"), 2)
    cluster = outcome.cluster
    decided = history(cluster)
    assert [manifest.round for manifest in decided] == list(range(1, cluster.rounds + 1))
    lost = len(cluster.metrics.manifests) - len(decided)
    assert lost > 100
    lines = {line[:12].strip(): line[12:] for line in summary(outcome, 2).splitlines()}
    a_minute = 60 * cluster.rounds / cluster.calendar.now
    assert lines["rounds"].startswith(f"{len(decided)} decided, and {lost} on branches that lost, ")
    assert rate(cluster) == pytest.approx(a_minute, rel=0.1)
    taken = sum(manifest.taken for manifest in decided)
    assert lines["taken"].startswith(f"{taken:,} contributions, {taken / len(decided):.1f} a round")
    states, payloads = cluster.metrics.states_fetched.total(), cluster.metrics.payloads_fetched.total()
    assert lines["catching up"] == f"{states} states and {payloads:,} payloads fetched"
