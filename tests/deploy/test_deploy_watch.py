"""Every metric and label that the alerts and the Grafana dashboard use exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.deploy import DEPLOY, promtool, read_yaml, run
from tests.helpers.web import site

PROMETHEUS, GRAFANA = DEPLOY / "prometheus", DEPLOY / "grafana"
DASHBOARD = GRAFANA / "dashboard.json"
# What Prometheus adds to each series, and the two that it makes itself.
ADDED, OWN = {"job", "instance"}, {"up"}
METRIC = re.compile(r"\b((?:p2ptrain|process)_[a-z0-9_]+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPED = re.compile(r"\b(?:by|without|on)\s*\(([^)]*)\)")
SHOWN = re.compile(r"\$labels\.(\w+)|\{\{\s*(?!\$)(\w+)\s*\}\}")
# What an operator has to hear of, whatever else there is.
WANTED = {
    "P2ptrainNoRound", "P2ptrainRootMismatch", "P2ptrainLossNotFinite", "P2ptrainDiskDegraded", "P2ptrainEventLoopLag",
    "P2ptrainNodeDown", "P2ptrainHalted", "P2ptrainSplit", "P2ptrainDiskFillsUp", "P2ptrainDamagedFiles",
}  # fmt: skip

Series = dict[str, dict[str, set[str]]]  # values of each label, by metric


@pytest.fixture
async def series() -> Series:
    """Returns the metrics of a node that has values for all of them."""
    async with site() as here:
        text = (await here.get("/metrics"))[2].decode()
    found: Series = {name: {} for name in OWN}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in read_yaml(PROMETHEUS / "alerts.yml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def unknown(query: str, series: Series) -> Iterator[str]:
    """Returns the metrics, labels and label values in a query that no node has."""
    bare = GROUPED.sub("", query)
    named = list(METRIC.finditer(bare))
    labels: set[str] = set(ADDED)
    for metric, matchers in (found.groups() for found in named):
        if metric not in series:
            yield metric
            continue
        labels |= series[metric].keys()
        for label, sign, value in MATCHER.findall(matchers or ""):
            if label in ADDED:
                continue
            if label not in series[metric]:
                yield f"{metric}{{{label}}}"
            elif sign == "=" and value not in series[metric][label]:
                yield f'{metric}{{{label}="{value}"}}'
    yield from (
        label for group in GROUPED.findall(query) for label in re.split(r"\s*,\s*", group) if label not in labels
    )
    if not named:
        yield f"nothing in {query}"


async def test_every_alert_and_every_panel_asks_for_what_a_node_has(series: Series) -> None:
    assert len(rules()) >= len(WANTED) and len(queries()) > 15
    asked = [rule["expr"] for rule in rules()] + queries()
    assert {query: found for query in asked if (found := list(unknown(query, series)))} == {}
    shown = [
        ([rule["expr"]], text) for rule in rules() for text in rule["annotations"].values()
    ] + [([target["expr"]], target["legendFormat"]) for panel in panels() for target in panel["targets"]]  # fmt: skip
    for (query,), text in shown:
        have = ADDED.union(*(series[metric].keys() for metric, _ in METRIC.findall(GROUPED.sub("", query))))
        assert {a or b for a, b in SHOWN.findall(text)} <= have, text


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("p2ptrain_gone > 1", ["p2ptrain_gone"]),
        ("rate(p2ptrain_tokens[5m])", ["p2ptrain_tokens"]),
        ('p2ptrain_health{kind="hallted"}', ['p2ptrain_health{kind="hallted"}']),
        ('p2ptrain_health{sort="halted"}', ["p2ptrain_health{sort}"]),
        ("sum by (sort) (p2ptrain_health)", ["sort"]),
        ("vector(1)", ["nothing in vector(1)"]),
        ('sum by (kind, instance) (p2ptrain_health{kind="halted",job="p2ptrain"})', []),
    ],
)
async def test_a_metric_or_label_that_no_node_has_is_found(series: Series, query: str, found: list[str]) -> None:
    assert list(unknown(query, series)) == found


# ---------------------------------------------------------------------------------------------------
# Prometheus


@pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
def test_promtool_takes_the_rules_and_the_config(name: str, tmp_path: Path) -> None:
    assert run(promtool(), "check", "rules", "alerts.yml", cwd=PROMETHEUS)[0] == 0
    (tmp_path / "alerts.yml").write_bytes((PROMETHEUS / "alerts.yml").read_bytes())
    (tmp_path / "token").write_text("of this test")
    config = re.sub(r"/etc/p2ptrain/token[.a-z]*", "token", (PROMETHEUS / name).read_text())
    (tmp_path / name).write_text(config)
    status, said = run(promtool(), "check", "config", name, cwd=tmp_path)
    assert (status, f"{len(rules())} rules found" in said) == (0, True), said


def test_promtool_takes_what_the_dashboard_asks(tmp_path: Path) -> None:
    asked = [query.replace("$__rate_interval", "1m").replace("$node", ".*") for query in queries()]
    made = [{"record": f"panel_{number}", "expr": query} for number, query in enumerate(asked)]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": made}]}))
    status, said = run(promtool(), "check", "rules", "--lint=none", "panels.yml", cwd=tmp_path)
    assert status == 0, said


async def test_promtool_takes_the_metrics(tmp_path: Path) -> None:
    async with site() as here:
        (tmp_path / "metrics").write_bytes((await here.get("/metrics"))[2])
    assert run("/bin/sh", "-c", '"$0" check metrics < metrics', promtool(), cwd=tmp_path) == (0, "")


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    status, said = run(promtool(), "test", "rules", "alerts_test.yml", cwd=PROMETHEUS)
    assert (status, "SUCCESS" in said) == (0, True), said


def test_every_alert_is_tried_both_ways() -> None:
    tried: dict[str, set[bool]] = {}
    for case in read_yaml(PROMETHEUS / "alerts_test.yml")["tests"]:
        for each in case["alert_rule_test"]:
            tried.setdefault(each["alertname"], set()).add(bool(each["exp_alerts"]))
    assert tried == {rule["alert"]: {True, False} for rule in rules()}
    assert tried.keys() >= WANTED


@pytest.mark.parametrize("instead", ['label_replace(vector(1), "a", "b", "", "")', "vector(1) > 2"])
def test_the_alerts_tests_fail_for_each_that_always_fires_and_each_that_never_does(
    instead: str, tmp_path: Path
) -> None:
    changed = read_yaml(PROMETHEUS / "alerts.yml")
    for rule in (rule for group in changed["groups"] for rule in group["rules"]):
        rule["expr"] = instead
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(changed))
    (tmp_path / "alerts_test.yml").write_bytes((PROMETHEUS / "alerts_test.yml").read_bytes())
    status, said = run(promtool(), "test", "rules", "alerts_test.yml", cwd=tmp_path)
    assert status == 1
    assert set(re.findall(r"alertname: (\w+)", said)) == {rule["alert"] for rule in rules()}


def test_every_alert_says_how_bad_it_is_whose_it_is_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}
        whose = "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert whose or rule["alert"] == "P2ptrainNobodyIsWatched", rule["alert"]


def test_prometheus_scrapes_every_node_of_the_swarm_with_its_token() -> None:
    (job,) = read_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    services = read_yaml(DEPLOY / "compose.yaml")["services"]
    nodes = [f"{name}:8420" for name in services if name == "bootstrap" or name.startswith("node")]
    assert (job["job_name"], job["static_configs"]) == ("p2ptrain", [{"targets": nodes}])
    assert job["authorization"] == {"type": "Bearer", "credentials_file": "/etc/p2ptrain/token.reader"}
    assert all(f'job="{job["job_name"]}"' in query for query in queries())


# ---------------------------------------------------------------------------------------------------
# Grafana


def test_the_dashboard_can_be_provisioned_and_nothing_overlaps_on_it() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identities)) == len(identities)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    (source,) = read_yaml(GRAFANA / "provisioning/datasources/p2ptrain.yaml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = read_yaml(GRAFANA / "provisioning/dashboards/p2ptrain.yaml")["providers"]
    mounted = dict(each.split(":")[:2] for each in read_yaml(DEPLOY / "compose.yaml")["services"]["grafana"]["volumes"])
    assert mounted["./grafana/dashboard.json"] == f"{provider['options']['path']}/dashboard.json"
    names = {each["name"]: each["type"] for each in dashboard["templating"]["list"]}
    assert names == {"datasource": "datasource", "node": "query"}
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}


async def test_the_dashboards_list_of_nodes_is_of_a_metric_that_there_is_from_the_start(series: Series) -> None:
    (node,) = (each for each in json.loads(DASHBOARD.read_text())["templating"]["list"] if each["name"] == "node")
    asked = re.fullmatch(r'label_values\((\w+)\{job="p2ptrain"\}, instance\)', node["query"]["query"])
    assert asked is not None and asked[1] in series
    async with site() as here:
        here.told.is_starting = True
        assert f"\n{asked[1]}{{" in (await here.get("/metrics"))[2].decode()
