"""The dashboard on a slow connection, or one on which only some requests succeed."""

from __future__ import annotations

from itertools import pairwise
from time import monotonic

from playwright.sync_api import Browser, Page, Route

from tests.helpers.dashboard import (
    REFUSED,
    DashboardServer,
    a_page,
    hurried,
    in_a_browser,
    lively,
    until_number,
    until_shown,
    until_text,
)
from tests.helpers.web import a_round

pytestmark = in_a_browser
BUSY = '{"version": 1, "error": "all connections are in use", "fix": ""}'


class Refusing:
    """A proxy that answers requests for rounds as if the node were too busy."""

    def __init__(self, page: Page) -> None:
        self.is_busy = True
        self.is_slow = False
        self.waits: Route | None = None
        self.asked: list[tuple[str, float]] = []  # for how many rounds, and when
        page.route("**/rounds?*", self._answer)

    def _answer(self, route: Route) -> None:
        self.asked.append((route.request.url.rsplit("=", 1)[1], monotonic()))
        if self.is_slow:
            self.waits = route
        elif self.is_busy:
            refuse(route)
        else:
            route.continue_()


def refuse(route: Route) -> None:
    route.fulfill(status=503, content_type="application/json", body=BUSY)


def numbers(page: Page) -> list[str]:
    return [text.split("\t")[0] for text in page.locator("#rounds tbody tr").all_inner_texts()]


def test_rounds_that_do_not_come_are_asked_for_again_and_the_page_says_so(
    browser: Browser, node: DashboardServer
) -> None:
    with a_page(browser, node.url, expected=REFUSED, draws=True) as page:
        until_text(page, "shown", "7 rounds")
        refusing = Refusing(page)
        page.reload()
        until_text(page, "shown", "Rounds not loaded yet.")
        until_text(page, "rounds-empty", "This page keeps trying.")
        node.live(a_round(8), a_round(9))
        until_number(page, "applied-round", 9)
        while len(refusing.asked) < 5:
            page.evaluate("() => new Promise(requestAnimationFrame)")
        refusing.is_busy = False
        until_text(page, "shown", "9 rounds on this page")
        assert "could not be loaded" not in page.inner_text("#shown")
        assert numbers(page) == [str(number) for number in range(9, 1, -1)]
        page.wait_for_function("() => document.getElementById('chart-loss').data?.[0].x.length > 2")
        drawn = page.evaluate("() => [...document.getElementById('chart-loss').data[0].x]")
        assert drawn == [*range(1, 10)], "each once, and in order"
        counts = ["1000", "1000", "200", *["40"] * len(refusing.asked)][: len(refusing.asked)]
        assert [count for count, _ in refusing.asked] == counts
        assert all(after - before > 0.4 for (_, before), (_, after) in pairwise(refusing.asked))


def test_the_numbers_go_on_while_rounds_are_on_their_way(browser: Browser, node: DashboardServer) -> None:
    with a_page(browser, node.url, expected=REFUSED) as page:
        until_text(page, "shown", "7 rounds")
        refusing = Refusing(page)
        refusing.is_slow = True
        page.reload()
        until_shown(page)
        until_text(page, "shown", "Loading rounds …")
        node.live(*(a_round(number) for number in (8, 9, 10)))
        until_number(page, "applied-round", 10)
        assert refusing.waits is not None
        assert [count for count, _ in refusing.asked] == ["1000"], "not once more while they are on their way"
        assert numbers(page) == []
        refusing.is_slow, refusing.is_busy = False, False
        refuse(refusing.waits)
        until_text(page, "shown", "10 rounds on this page")
        assert numbers(page) == [str(number) for number in range(10, 2, -1)]


def test_a_page_that_has_rounds_keeps_them_while_newer_ones_do_not_come(
    browser: Browser, node: DashboardServer
) -> None:
    with a_page(browser, node.url, expected=REFUSED) as page:
        until_text(page, "shown", "7 rounds")
        refusing = Refusing(page)
        node.live(a_round(8))
        until_text(page, "shown", "7 rounds on this page; newer ones could not be loaded yet")
        assert numbers(page) == [str(number) for number in range(7, 0, -1)]
        refusing.is_busy = False
        until_text(page, "shown", "8 rounds on this page")
        assert numbers(page) == [str(number) for number in range(8, 0, -1)]
        assert {count for count, _ in refusing.asked} == {"1"}, "those that it lacks"


def test_through_a_slow_line_a_large_answer_takes_the_time_that_it_needs(
    browser: Browser, node: DashboardServer
) -> None:
    lively(node, 1_000)
    with a_page(browser, node.url) as page:
        until_text(page, "shown", "1,000 rounds")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        slow = {"offline": False, "latency": 40, "downloadThroughput": 30_000, "uploadThroughput": 125_000}
        session.send("Network.emulateNetworkConditions", slow)
        hurried(page, ANSWER=2_500)  # of the five seconds that a fifth of 700 kB take
        until_shown(page)
        until_text(page, "shown", "1,000 rounds")
        assert [each.rsplit("/", 1)[1] for each in asked if "/rounds" in each] == ["rounds?last=1000"]


def test_a_node_that_cannot_answer_for_a_mistake_of_its_own_is_said_to_fail(
    browser: Browser, node: DashboardServer
) -> None:
    with a_page(browser, node.url, expected=("status of 500",)) as page:
        until_text(page, "shown", "7 rounds")
        node.told.now["of no model"] = 1
        until_text(page, "banner", "The node could not answer; its log says why.")
        assert page.inner_text("#state-text") == "Failing"
        assert page.locator("body.old").count() == 1
        del node.told.now["of no model"]
        page.wait_for_function("() => document.getElementById('banner').textContent === ''")
