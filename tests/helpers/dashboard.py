"""The dashboard in a real browser (Chromium, driven by playwright), with a scripted node.

Whatever a page complains of (its console, errors of scripts, the policy) fails the test that opened it.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

from p2ptrain.observe.app import ASSETS
from p2ptrain.observe.http import LINES_KEPT
from p2ptrain.observe.schema import LogLine
from tests.helpers.web import ME, OTHER, PEER, Site, a_round, site, told_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SECONDS = 60.0  # within which everything shows, also on a busy machine
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}
CHARTS = ("loss", "bytes", "phases", "speed", "bandwidth", "taken")
# What the browser itself reports of a node that went away; no fault of the page's.
GONE = ("net::ERR_CONNECTION", "net::ERR_EMPTY_RESPONSE", "net::ERR_INCOMPLETE_CHUNKED", "net::ERR_NETWORK")
REFUSED = ("status of 503", "status of 401")

in_a_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]

# In place of the charts' library, where a test is about something else: 4.8 MB take seconds on a busy machine.
NO_LIBRARY = "window.Plotly = { react: async () => {} }"

# The place of each number in the page, and where it comes from.
NUMBERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "applied-round": lambda status: status["applied_round"],
    "loss": lambda status: status["loss"],
    "held-out-loss": lambda status: status["held_out_loss"],
    "perplexity": lambda status: status["perplexity"],
    "tokens-per-second": lambda status: status["tokens_per_second"],
    "swarm-tokens-per-second": lambda status: status["swarm_tokens_per_second"],
    "peer-count": lambda status: len(status["peers"]),
    "admitted": lambda status: status["admitted"],
    "share": lambda status: status["mine"]["share"],
    "mine-applied": lambda status: status["mine"]["applied"],
    "mine-of-all": lambda status: status["mine"]["applied_of_all"],
    "mine-share": lambda status: status["mine"]["share"],
    "mine-tokens": lambda status: status["mine"]["tokens"],
    "mine-hours": lambda status: status["mine"]["training_seconds"],
    "certified-round": lambda status: status["certified_round"],
    "mismatches": lambda status: status["counters"].get("root mismatches", 0),
    "root-round": lambda status: status["applied_round"],
    "roster-count": lambda status: len(status["roster"]),
    "quorum": lambda status: status["quorum"],
    "may-crash": lambda status: status["fault_tolerance"]["crashes"],
    "may-lie": lambda status: status["fault_tolerance"]["liars"],
}
SHOWN = """() => Object.fromEntries([...document.querySelectorAll("main data[id]")].map(
    (each) => [each.id, each.getAttribute("value")]))"""


def numbers_on(page: Page) -> dict[str, float | None]:
    """Returns the page's exact numbers, which it has for programs."""
    found: dict[str, str | None] = page.evaluate(SHOWN)
    assert found.keys() == NUMBERS.keys()
    return {name: float(value) if value else None for name, value in found.items()}


def numbers_in(status: dict[str, Any]) -> dict[str, float | None]:
    return {name: number(status) for name, number in NUMBERS.items()}


# ---------------------------------------------------------------------------------------------------
# The node


class DashboardServer:
    """A server in its own thread, so that a test can block on its page."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_up, self._is_over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="a node's server")
        self.site: Site

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with site() as self.site:
            self._is_up.set()
            await self._is_over.wait()

    def start(self) -> None:
        self._thread.start()
        assert self._is_up.wait(SECONDS)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    @property
    def told(self) -> Any:
        return self.site.told

    @property
    def url(self) -> str:
        return self.site.url

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Blocks the server, which neither answers nor closes connections, like a stopped process."""
        over = threading.Event()
        self._loop.call_soon_threadsafe(over.wait, 2 * SECONDS)
        try:
            yield
        finally:
            over.set()

    def change(self, **what: Any) -> None:
        """Changes the status."""
        self.told.now.update(what)

    def live(self, *rounds: dict[str, Any]) -> None:
        """Applies rounds."""
        self.told.lived = [*self.told.lived, *rounds][-1_000:]
        self.change(applied_round=rounds[-1]["round"])

    def say(self, *messages: str, at: str = "2026-01-01T12:00:00.000+00:00") -> None:
        """Logs lines; only the last ones are kept, as in a node's log."""
        lines = [LogLine(at=at, level="info", message=each) for each in messages]
        self.told.said = [*self.told.said, *lines][-LINES_KEPT:]


@contextmanager
def a_node() -> Iterator[DashboardServer]:
    node = DashboardServer()
    node.start()
    try:
        yield node
    finally:
        node.close()


def a_lively_round(number: int, luck: random.Random) -> dict[str, Any]:
    times = {f"{phase}_seconds": luck.uniform(0.8, 1.2) * usual for phase, usual in
             (("train", 6.0), ("collect", 1.2), ("agree", 0.4), ("apply", 0.5))}  # fmt: skip
    return {
        **a_round(number),
        **times,
        "loss": 2.1 + 5.4 * math.exp(-number / 180) + luck.gauss(0, 0.03),
        "contributors": [ME, OTHER, *("another", "and one more")[: luck.randint(0, 2)]],
        "mine_taken": [number] if luck.random() < 0.9 else [],
        "bytes_sent": luck.randint(2_000_000, 2_600_000),
        "bytes_received": luck.randint(6_000_000, 8_000_000),
        "late": int(luck.random() < 0.1),
        "root": f"{luck.getrandbits(256):064x}",
    }


def lively_rounds(count: int, first: int = 1) -> list[dict[str, Any]]:
    luck = random.Random(first)
    return [a_lively_round(number, luck) for number in range(first, first + count)]


def a_name(luck: random.Random) -> str:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz23456789"
    return "12D3KooW" + "".join(luck.choice(letters) for _ in range(44))


def lively_peers(count: int) -> list[dict[str, Any]]:
    luck = random.Random(count)
    kinds = ("public", "relay", "private", "unknown")
    return [
        {
            **deepcopy(PEER),
            "peer_id": a_name(luck),
            "address_kind": kinds[n % len(kinds)],
            "is_connected": n % 5 != 4,
            "is_member": n < 7,
            "is_admitted": n % 9 != 8,
            "offered": 400 - n,
            "applied": 390 - n,
            "late": n % 4,
            "refused": {"bad payload": 2} if n == 3 else {},
            "points": 2.15 if n == 3 else 0.0,
            "observed": {"malformed": 2, "late": 3} if n == 3 else {},
        }
        for n in range(count)
    ]


def lively(node: DashboardServer, rounds: int = 340) -> None:
    """Fills the node with typical data, for screenshots."""
    luck = random.Random(3)
    me, peers = a_name(luck), lively_peers(11)
    lived = lively_rounds(rounds)
    node.told.lived, node.told.known = lived, peers
    root = f"{luck.getrandbits(256):064x}"
    traffic = {"gossip": (48, 61), "messages": (22, 25), "payloads": (740, 2_210), "states": (410, 0), "data": (0, 1.2)}
    node.told.now |= {
        "run_name": "tiny-stories-124m", "peer_id": me, "device": "cuda:0", **told_of(), "uptime_seconds": 8_123.0,
        "round": rounds + 1, "applied_round": rounds, "certified_round": rounds, "roots": {str(rounds): root},
        "state_root": root, "loss": lived[-1]["loss"], "phase": "collect", "view": 0, "held": 6,
        "peers": [each["peer_id"] for each in peers if each["is_connected"]], "admitted": 11,
        "roster": [me, *(each["peer_id"] for each in peers if each["is_member"])][:7], "quorum": 5,
        "fault_tolerance": {"liars": 2, "crashes": 2, "mode": "byzantine"}, "counters": {},
        "tokens_per_second": 2_731.4, "swarm_tokens_per_second": 6_203.0, "contribution_tokens": 16_384,
        "mine": {"applied": 306, "applied_of_all": 2_410, "share": 0.127, "tokens": 5_570_560,
                 "training_seconds": 7_340.0, "energy_joules": 2_300_000.0},
        "traffic": node.told.now["traffic"] | {
            purpose: {"sent": int(sent * 10**6), "received": int(received * 10**6)}
            for purpose, (sent, received) in traffic.items()
        },
    }  # fmt: skip
    node.told.said = [
        LogLine(at="2026-01-01T12:01:11.000+00:00", level="info", message="run tiny-stories-124m, id 4f1c9a"),
        LogLine(at="2026-01-01T12:14:40.120+00:00", level="info", message=f"{me} got a seat: 7 members"),
        LogLine(
            at="2026-01-01T12:31:02.120+00:00", level="warning",
            message="the clock of this machine is wrong",
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------
# The browser


@contextmanager
def a_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def a_page(
    browser: Browser,
    url: str,
    screen: dict[str, int] = DESK,
    scheme: Any = "light",
    expected: tuple[str, ...] = (),
    *,
    draws: bool = False,
) -> Iterator[Page]:
    """Opens a page; `expected` are errors that the test provokes, and `draws` says whether it needs charts."""
    complaints: list[str] = []

    def note(said: ConsoleMessage) -> None:
        if said.type in ("error", "warning") and not any(words in said.text for words in expected):
            complaints.append(f"{said.type}: {said.text}")

    context = browser.new_context(viewport=screen, color_scheme=scheme, locale="en-GB", timezone_id="UTC")
    context.set_default_timeout(SECONDS * 1_000)
    context.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error('policy', e.violatedDirective, e.blockedURI))"
    )
    if not draws:
        context.route("**/plotly.min.js", lambda route: route.fulfill(body=NO_LIBRARY, content_type="text/javascript"))
    page = context.new_page()
    page.on("console", note)
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    try:
        page.goto(url)
        yield page
        assert complaints == []
    finally:
        context.close()


def hurried(page: Page, **milliseconds: int) -> None:
    """Reloads the page with other timeouts."""

    def change(route: Route) -> None:
        script = (ASSETS / "feed.js").read_text()
        for name, least in milliseconds.items():
            script, count = re.subn(rf"(?<=const {name}_MILLISECONDS = )[0-9_]+", str(least), script)
            assert count == 1
        route.fulfill(body=script, content_type="text/javascript")

    page.route("**/assets/feed.js", change)
    page.reload()


def until_shown(page: Page) -> Page:
    page.wait_for_function("() => document.getElementById('main').dataset.round !== undefined")
    return page


def until_text(page: Page, element: str, text: str) -> None:
    """Waits until the element contains this text."""
    page.wait_for_function(
        "([element, text]) => document.getElementById(element).textContent.includes(text)", arg=[element, text]
    )


def until_number(page: Page, element: str, value: float | str) -> None:
    page.wait_for_function(
        "([element, value]) => document.getElementById(element).getAttribute('value') === value",
        arg=[element, str(value)],
    )


def until_drawn(page: Page, last: int) -> None:
    """Scrolls to all charts, and waits until they are drawn up to this round."""
    for name in CHARTS:
        page.locator(f"#chart-{name}").scroll_into_view_if_needed()
        page.wait_for_function("() => document.documentElement.dataset.charts !== undefined")
        assert page.evaluate("() => document.documentElement.dataset.charts") == "ready"
        page.wait_for_function(
            "([id, last]) => document.getElementById(id).dataset.last === last", arg=[f"chart-{name}", str(last)]
        )
    page.evaluate("() => scrollTo(0, 0)")


def is_as_wide_as_the_screen(page: Page) -> bool:
    return bool(page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"))
