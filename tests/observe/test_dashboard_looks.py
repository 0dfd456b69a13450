"""Accessibility of the dashboard: small screens, light and dark, keyboard, screen reader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from p2ptrain.core.complaints import Code, complaint
from tests.helpers.dashboard import (
    DESK,
    PHONE,
    SECONDS,
    DashboardServer,
    a_node,
    a_page,
    in_a_browser,
    is_as_wide_as_the_screen,
    lively,
    until_drawn,
    until_shown,
    until_text,
)
from tests.helpers.web import told_of

pytestmark = in_a_browser
TEXT_CONTRAST, LARGE_CONTRAST, LINE_CONTRAST = 4.5, 3.0, 3.0  # WCAG 2.2, level AA
LARGE_PIXELS = 24.0

# Every piece of text that can be seen, with its colour, those of what lies behind it (the nearest first), and its size.
TEXTS = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    const box = element.getBoundingClientRect();
    const style = getComputedStyle(element);
    if (!node.textContent.trim() || box.width <= 1 || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (["SCRIPT", "NOSCRIPT", "STYLE"].includes(element.tagName) || element.closest(".unseen, noscript")) continue;
    const behind = [];
    for (let each = element; each; each = each.parentElement) behind.push(getComputedStyle(each).backgroundColor);
    const colour = element instanceof SVGElement ? style.fill : style.color;
    found.push([node.textContent.trim().slice(0, 40), colour, behind, parseFloat(style.fontSize)]);
  }
  return found;
}"""
SMALLEST = """() => Math.min(...[...document.querySelectorAll("p, dd, li, td, th, code, figcaption")]
  .filter((each) => each.checkVisibility()).map((each) => parseFloat(getComputedStyle(each).fontSize)))"""
COLOURS = """() => {
  const style = getComputedStyle(document.documentElement);
  const made = document.createElement("i");
  document.body.append(made);
  const found = {};
  for (const name of ["card", "train", "collect", "agree", "apply", "bad", "accent"]) {
    made.style.color = style.getPropertyValue(`--${name}`);
    found[name] = getComputedStyle(made).color;
  }
  made.remove();
  return found;
}"""


@pytest.fixture(scope="module")
def node() -> Iterator[DashboardServer]:
    with a_node() as node:
        lively(node, 40)
        yield node


def channels(colour: str) -> tuple[list[float], float]:
    """Parses a colour: red, green and blue from 0 to 1, and opacity."""
    numbers = [float(each) for each in re.findall(r"[\d.]+", colour)]
    assert colour.startswith("rgb") and len(numbers) in (3, 4), colour
    return [each / 255 for each in numbers[:3]], numbers[3] if len(numbers) == 4 else 1.0


def luminance(colour: list[float]) -> float:
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in colour]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: list[float], other: list[float]) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def over(layers: list[str]) -> list[float]:
    """Blends layers of colours, the nearest first."""
    seen = [1.0, 1.0, 1.0]
    for layer in reversed(layers):
        colour, cover = channels(layer)
        seen = [cover * new + (1 - cover) * old for new, old in zip(colour, seen, strict=True)]
    return seen


def test_the_contrast_is_computed_as_the_standard_says() -> None:
    white, black, grey = [1.0] * 3, [0.0] * 3, [118 / 255] * 3
    assert round(contrast(black, white), 6) == 21.0
    assert (contrast(grey, white) > 4.5, contrast([119 / 255] * 3, white) > 4.5) == (True, False)
    assert over(["rgba(0, 0, 0, 0)", "rgba(0, 0, 0, 0.5)", "rgb(255, 255, 255)"]) == [0.5] * 3


# ---------------------------------------------------------------------------------------------------
# Screens and colours


@pytest.mark.parametrize("width", [320, 360, 768, 1_920])
def test_nothing_is_wider_than_the_screen(browser: Browser, node: DashboardServer, width: int) -> None:
    with a_page(browser, node.url, screen={"width": width, "height": 740}) as page:
        until_shown(page)
        until_text(page, "peers-note", "11 known")
        assert is_as_wide_as_the_screen(page)
        least = page.evaluate(SMALLEST)
        assert least >= 12


def test_text_and_lines_stand_out_from_what_lies_behind_them_by_day_and_by_night(
    browser: Browser, node: DashboardServer
) -> None:
    drawn_on = "() => document.getElementById('chart-loss').layout.paper_bgcolor"
    with a_page(browser, node.url, draws=True) as page:
        until_shown(page)
        until_text(page, "peers-note", "11 known")
        until_drawn(page, 40)
        _look_at_colours(page, node, is_dark=False)
        by_day = page.evaluate(drawn_on)
        page.emulate_media(color_scheme="dark")
        page.locator("#chart-loss").scroll_into_view_if_needed()
        page.wait_for_function(
            "(by_day) => document.getElementById('chart-loss').layout.paper_bgcolor !== by_day", arg=by_day
        )
        _look_at_colours(page, node, is_dark=True)


def _look_at_colours(page: Page, node: DashboardServer, *, is_dark: bool) -> None:
    for codes in ([], [Code.STALLED, Code.CATCHING_UP, Code.CRASH_ONLY], [Code.QUARANTINED]):
        told = told_of(*map(complaint, codes))
        node.change(**told)
        until_text(page, "health", [*told["health"], "No complaints"][0])
        texts = page.evaluate(TEXTS)
        assert len(texts) > 150
        faint = [
            (text, colour, behind)
            for text, colour, layers, pixels in texts
            if contrast(over([colour, *layers]), behind := over(layers))
            < (LARGE_CONTRAST if pixels >= LARGE_PIXELS else TEXT_CONTRAST)
        ]
        assert faint == []
    node.change(**told_of())
    lines = {name: channels(colour)[0] for name, colour in page.evaluate(COLOURS).items()}
    card = lines.pop("card")
    assert {name for name, colour in lines.items() if contrast(colour, card) < LINE_CONTRAST} == set()
    seen = over([page.evaluate("() => getComputedStyle(document.body).backgroundColor")])
    assert (luminance(seen) < 0.1) == is_dark


# ---------------------------------------------------------------------------------------------------
# Keyboard and screen reader

FOCUS = """() => {
  const element = document.activeElement;
  const style = getComputedStyle(element);
  return [element.id || element.className || element.textContent, element.tagName, style.outlineStyle,
    parseFloat(style.outlineWidth), element.getBoundingClientRect().top + scrollY];
}"""


def test_a_keyboard_reaches_everything_and_shows_where_it_is(browser: Browser, node: DashboardServer) -> None:
    with a_page(browser, node.url) as page:
        until_shown(page)
        until_text(page, "peers-note", "11 known")
        page.keyboard.press("Tab")
        name, _, outline, width, _ = page.evaluate(FOCUS)
        assert (name, outline, width) == ("skip", "solid", 3)
        assert page.locator(".skip").bounding_box()["y"] >= 0  # type: ignore[index]
        page.keyboard.press("Enter")
        assert page.evaluate("() => document.activeElement.id") == "main"
        stops: list[Any] = []
        while not stops or stops[-1][1] != "BODY":
            page.keyboard.press("Tab")
            stops.append(page.evaluate(FOCUS))
            assert len(stops) < 30, "a trap"
        stops.pop()
        assert [outline for _, _, outline, width, _ in stops] == ["solid"] * len(stops)
        links = [name for name, tag, *_ in stops if tag == "A"]
        assert links == ["status", "peers", "rounds", "metrics"]
        assert sum("scroll" in name for name, *_ in stops) >= 4, "what scrolls can be scrolled"
        tops = [top for *_, top in stops[:3]]
        assert tops == sorted(tops)


def test_a_screen_reader_finds_its_way(browser: Browser, node: DashboardServer) -> None:
    with a_page(browser, node.url, draws=True) as page:
        until_shown(page)
        until_text(page, "peers-note", "11 known")
        until_drawn(page, 40)
        _look_at_structure(page)
        _look_at_tables(page)
        _look_at_names(page)
        banner = page.locator("#banner")
        assert (banner.get_attribute("role"), banner.get_attribute("aria-live")) == ("status", "polite")
        assert page.locator("[aria-live=assertive], [role=alert]").count() == 0
        assert page.locator("#log-scroll").get_attribute("aria-live") == "off", "it says too much to be read out"
        assert page.locator("#phases [aria-current=step]").count() == 1


def _look_at_structure(page: Page) -> None:
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.title() == "tiny-stories-124m · p2ptrain"
    for landmark in ("header", "main", "footer", "nav"):
        assert page.locator(landmark).count() == 1, landmark
    levels = page.evaluate("() => [...document.querySelectorAll('h1, h2, h3')].map((each) => Number(each.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((each) => each.id)")
    named = [each for each in ids if not re.match(r"(topdefs|defs|clip|legend|g[0-9a-f])", each)]  # plotly's own
    assert len(named) == len(set(named))


def _look_at_tables(page: Page) -> None:
    tables = page.locator("table")
    assert tables.count() == 3
    for n in range(3):
        table = tables.nth(n)
        assert table.locator("caption").inner_text().strip()
        heads = table.locator("thead th")
        assert heads.count() == table.locator("thead th[scope=col]").count() >= 3
        assert all(each.strip() for each in heads.all_text_contents())
        rows = table.locator("tbody tr")
        assert rows.count() == table.locator("tbody th[scope=row]").count() >= 5
        assert table.evaluate(
            "(t) => [...t.tBodies[0].rows].every((r) => r.cells.length === t.tHead.rows[0].cells.length)"
        )


def _look_at_names(page: Page) -> None:
    """Checks that everything with a role or focus has a name, and each chart a description."""
    tree = page.locator("body").aria_snapshot()
    for role in ("banner", "main", "contentinfo", "navigation", "region", "img", "table", "list", "log"):
        assert re.search(rf"^\s*- {role}\b", tree, re.MULTILINE), role
    for role in ("navigation", "region", "img", "table", "log", "link"):
        found = re.findall(rf"^\s*- {role}\b(.*)$", tree, re.MULTILINE)
        assert [each for each in found if not re.match(r' "[^"]+"', each)] == [], role
    charts = page.locator(".chart[role=img]")
    assert charts.count() == 17  # seven made by hand, and one for each figure of a round that has no place in these
    for n in range(7):
        for attribute in ("aria-labelledby", "aria-describedby"):
            target = charts.nth(n).get_attribute(attribute)
            assert len(page.locator(f"#{target}").inner_text()) > 8


def test_without_scripts_the_page_says_where_the_numbers_are(browser: Browser, node: DashboardServer) -> None:
    context = browser.new_context(java_script_enabled=False, viewport=PHONE)
    page = context.new_page()
    page.goto(node.url, timeout=SECONDS * 1_000)
    assert "This page needs JavaScript" in page.inner_text("body")
    assert page.locator("noscript a[href='/status']").count() == 1
    context.close()
    assert DESK["width"] > PHONE["width"]
