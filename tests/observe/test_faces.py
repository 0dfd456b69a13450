"""Every figure of the schema shows up in every interface: a changed value changes each of them."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from prometheus_client.core import Metric

from p2ptrain.observe.app import OF_ROUND, of_figures
from p2ptrain.observe.export import figures_section, rows_of
from p2ptrain.observe.figures import FigureField, figures_of
from p2ptrain.observe.progress import lines_of
from p2ptrain.observe.schema import RoundRecord, Status
from p2ptrain.observe.tracking import tracked_of
from tests.helpers.dashboard import DashboardServer, a_page, hurried, in_a_browser, until_shown, until_text
from tests.helpers.web import STATUS, a_record, a_round, a_status

OF_STATUS, OF_A_ROUND = figures_of(Status), figures_of(RoundRecord)
FOLLOW = {"mine.share", "seconds", "perplexity"}  # from other figures
SET_STATUS = [each for each in OF_STATUS if each.name not in FOLLOW]
SET_ROUND = [each for each in OF_A_ROUND if each.name not in FOLLOW]


def another(value: Any, figure: FigureField) -> Any:
    match value:
        case bool():
            return not value
        case str():
            return "train"
        case dict():
            return {(figure.figure.values or ("late",))[0]: 70_001}
        case list() | tuple():
            return []
        case int():
            return 2 * value + 70_001
    return (value or 0.0) + 864_000.0  # whole, for those that have to be


def changed(told: dict[str, Any], figure: FigureField) -> dict[str, Any]:
    """Returns the answer with another value of this figure."""
    told = deepcopy(told) | ({"is_member": False} if figure.name == "is_admitted" else {})
    *way, last = figure.path
    place = told
    for name in way:
        place = place[name]
    if figure.figure.key:
        place[last] |= {figure.figure.key: 70_001}
    else:
        place[last] = another(place.get(last), figure)
    return told


def exposed(metrics: Any) -> list[tuple[str, dict[str, str], float]]:
    found: list[Metric] = list(metrics)
    return [(each.name, each.labels, each.value) for family in found for each in family.samples]


def names(figures: Any) -> Any:
    return pytest.mark.parametrize("figure", figures, ids=lambda each: each.name)


@names(SET_STATUS)
def test_a_figure_of_the_status_shows_in_json_metrics_terminal_and_report(figure: FigureField) -> None:
    before, after = (
        a_status(each) for each in (STATUS | {"is_member": figure.name == "is_member"}, changed(STATUS, figure))
    )
    assert figure.found(before) != figure.found(after)
    told = [json.loads(each.model_dump_json()) for each in (before, after)]
    assert figure.found(told[0]) != figure.found(told[1])
    assert exposed(of_figures(Status, before)) != exposed(of_figures(Status, after))
    assert figures_section(told[0]) != figures_section(told[1])
    assert lines_of(told[0]) != lines_of(told[1])


@names(SET_ROUND)
def test_a_figure_of_a_round_shows_in_json_metrics_trackers_and_report(figure: FigureField) -> None:
    before, after = (a_record(each) for each in (a_round(7), changed(a_round(7), figure)))
    told = [json.loads(each.model_dump_json()) for each in (before, after)]
    assert figure.found(told[0]) != figure.found(told[1])
    assert exposed(of_figures(RoundRecord, before, OF_ROUND)) != exposed(of_figures(RoundRecord, after, OF_ROUND))
    assert tracked_of(before) != tracked_of(after)
    assert figure.found(rows_of([before])[0]) != figure.found(rows_of([after])[0])


@pytest.mark.parametrize(("model", "figures"), [(Status, OF_STATUS), (RoundRecord, OF_A_ROUND)])
def test_names_of_metrics_and_trackers_are_those_of_one_figure_each(
    model: Any, figures: tuple[FigureField, ...]
) -> None:
    found = [(each.figure.metric or each.name, each.figure.labels) for each in figures]
    assert len({*map(str, found)}) == len(found)
    tracked = [each.figure.tracked or each.name for each in figures if model is RoundRecord]
    assert len({*tracked}) == len(tracked)


# ---------------------------------------------------------------------------------------------------
# The page


def in_chromium(test: Any) -> Any:
    for mark in in_a_browser:
        test = mark(test)
    return test


TEXT = "() => document.getElementById('main').innerText + document.querySelector('header').innerText"


@in_chromium
def test_every_figure_of_the_status_shows_on_the_dashboard(browser: Browser, node: DashboardServer) -> None:
    usual = {**STATUS, "since_applied_seconds": 86_400.0 * 9, "uptime_seconds": 86_400.0 * 9}  # changes once an hour
    with a_page(browser, node.url) as page:
        hurried(page, ASK=50)  # each field takes two answers
        until_shown(page)
        for each in SET_STATUS:
            before = settled(page, node, usual | ({"is_member": False} if each.name == "is_admitted" else {}))
            node.change(**changed(node.told.now, each))
            page.wait_for_function(f"(before) => ({TEXT})() !== before", arg=before)


def settled(page: Page, node: DashboardServer, usual: dict[str, Any]) -> str:
    """Returns the page's texts once it shows this status, which is recognised by a marker."""
    settled.count = getattr(settled, "count", 0) + 1  # type: ignore[attr-defined]
    name = f"run-{settled.count}"  # type: ignore[attr-defined]
    node.change(**usual | {"run_name": name})
    until_text(page, "run-name", name)
    return str(page.evaluate(TEXT))


@in_chromium
def test_every_figure_of_a_round_shows_on_the_dashboard(browser: Browser, node: DashboardServer) -> None:
    node.told.lived = []
    with a_page(browser, node.url) as page:
        until_shown(page)
        for number, each in enumerate(SET_ROUND):
            texts = []
            for lived in (a_round(1), changed(a_round(1), each)):
                node.told.lived = [lived | {"round": number + 1}]
                page.reload()
                until_text(page, "shown", "1 round ")
                page.wait_for_function("() => document.querySelector('#rounds tbody tr') !== null")
                texts.append(str(page.locator("#main").inner_text()))
            assert texts[0] != texts[1], each.name
