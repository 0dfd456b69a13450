"""The dashboard with a scripted node: its numbers, live changes, and difficult contents."""

from __future__ import annotations

import json
from contextlib import suppress
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, Route
from playwright.sync_api import Error as PlaywrightError

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.observe.build import OWN_DATA
from p2ptrain.observe.guard import Guard
from tests.helpers.dashboard import (
    CHARTS,
    GONE,
    NO_LIBRARY,
    PHONE,
    REFUSED,
    DashboardServer,
    a_page,
    hurried,
    in_a_browser,
    is_as_wide_as_the_screen,
    lively_peers,
    lively_rounds,
    numbers_in,
    numbers_on,
    until_drawn,
    until_number,
    until_shown,
    until_text,
)
from tests.helpers.web import ME, PEER, a_round, every_complaint, told_of

pytestmark = in_a_browser
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
RIGHT_TO_LEFT = "\u202egnol si siht\u202c שלום مرحبا"
LONG = "w" * 1_000


def text_of(page: Page, element: str) -> str:
    return page.locator(f"#{element}").inner_text()


# ---------------------------------------------------------------------------------------------------
# Numbers


def test_the_numbers_on_the_page_are_those_of_the_status(browser: Browser, node: DashboardServer) -> None:
    node.told.now["mine"]["energy_joules"] = 4.5e6
    with a_page(browser, node.url) as page:
        until_shown(page)
        told = json.loads(page.request.get(f"{node.url}/status").text())
        assert numbers_on(page) == numbers_in(told)
        shown = {name: text_of(page, name) for name in ("loss", "tokens-per-second", "mine-share", "mine-hours")}
        assert shown == {"loss": "2.5000", "tokens-per-second": "123", "mine-share": "25%", "mine-hours": "0.02"}
        assert text_of(page, "run-name") == told["run_name"]
        assert text_of(page, "state-root") == told["state_root"]
        assert text_of(page, "doing") == "Round 8: agreeing, try 2, 2 contributions here."
        assert page.locator("#phases [aria-current]").get_attribute("data-phase") == "agree"
        assert "at least 2 members signed that their model after round 6 was bit for bit this node's." in text_of(
            page, "agreement"
        )
        assert "A small run" in text_of(page, "health") and told["health"][0] in text_of(page, "health")
        assert page.locator("#traffic tbody tr").first.inner_text().split() == ["gossip", "1", "B", "10", "B"]
        assert "upload at most 1.0 kB/s, download no limit" in text_of(page, "limits")
        assert text_of(page, "energy") == "1.25 kWh"
        assert "42 ms" in page.locator("#peers tbody tr").first.inner_text()
        node.change(mine=told["mine"] | {"energy_joules": None})
        until_text(page, "energy", "not reported")


def test_rounds_show_in_words_in_a_table_and_as_charts(browser: Browser, node: DashboardServer) -> None:
    node.told.lived = [a_round(1) | {"loss": 2.25}, a_round(2) | {"loss": None, "mine_taken": []}, a_round(3)]
    with a_page(browser, node.url, draws=True) as page:
        until_shown(page)
        until_text(page, "shown", "3 rounds on this page")
        rows = page.locator("#rounds tbody tr").all_inner_texts()
        assert [row.split("\t") for row in rows] == [
            ["3", "2.5000", "1.88", "2", "taken", "1", "030303030303"],
            ["2", "–", "1.88", "2", "not taken", "1", "020202020202"],
            ["1", "2.2500", "1.88", "2", "taken", "1", "010101010101"],
        ]
        assert text_of(page, "c-loss") == "2.5000 in round 3; the lowest is 2.2500, in round 1."
        assert text_of(page, "c-bytes") == "9.0 kB sent and received in 3 rounds, 3.0 kB each."
        assert text_of(page, "c-phases") == "Round 3: train 1.00 s, collect 0.25 s, agree 0.13 s, apply 0.50 s."
        assert text_of(page, "c-speed") == "Round 3, waiting included: this node 273, the swarm 546."
        assert text_of(page, "c-bandwidth") == "Round 3: 533 B/s sent, 1.1 kB/s received."
        assert text_of(page, "c-taken") == "Round 3: 2 taken, 0 too late, none refused."
        until_drawn(page, 3)
        drawn = page.evaluate(
            "(names) => names.map((name) => document.getElementById(`chart-${name}`).data.map((each) => [...each.y]))",
            list(CHARTS),
        )
        assert drawn[0] == drawn[1] == [[2.25, None, 2.5]]
        assert drawn[2] == [[1.0] * 3, [0.25] * 3, [0.125] * 3, [0.5] * 3]
        assert drawn[3] == [[1_024 / 1.875] * 3, [512 / 1.875] * 3]
        assert drawn[4] == [[1_000 / 1.875] * 3, [2_000 / 1.875] * 3]
        assert drawn[5] == [[2] * 3, [0] * 3, [0] * 3]
        moved = page.evaluate("() => [...document.getElementById('chart-bytes').data[0].x]")
        assert moved == [3_000, 6_000, 9_000]


def test_staleness_tokens_and_the_norm_of_the_update_have_charts(browser: Browser, node: DashboardServer) -> None:
    node.told.lived = [
        a_round(number) | {"staleness_mean": number / 2, "update_norm": 3.0 - number} for number in (1, 2)
    ]
    with a_page(browser, node.url, draws=True) as page:
        until_shown(page)
        until_text(page, "shown", "2 rounds on this page")
        drawn = {}
        for name in ("staleness_mean", "update_norm", "tokens_so_far", "swarm_tokens_so_far"):
            place = page.locator(f"#chart-{name}")
            place.scroll_into_view_if_needed()
            page.wait_for_function("(id) => document.getElementById(id).dataset.last === '2'", arg=f"chart-{name}")
            drawn[name] = place.evaluate("(chart) => [...chart.data[0].y]")
        assert drawn == {
            "staleness_mean": [0.5, 1.0],
            "update_norm": [2.0, 1.0],
            "tokens_so_far": [512, 1_024],
            "swarm_tokens_so_far": [1_024, 2_048],
        }
        assert text_of(page, "c-staleness_mean") == "Round 2: 1."


def test_a_swarm_of_256_says_what_to_look_at_first_and_why(browser: Browser, node: DashboardServer) -> None:
    peers = [each | {"is_admitted": True, "is_member": True} for each in lively_peers(256)]
    node.told.known = peers
    with a_page(browser, node.url, screen=PHONE) as page:
        until_shown(page)
        until_text(page, "peers-note", "256 known")
        assert not page.locator("#concerns").is_visible(), "all is well"
        gone, slow = peers[200], peers[100]
        gone |= {"heard_seconds": 4_000.0, "taken_lately": 0}
        slow |= {"tokens_per_second_mean": 1.0, "standing": "on trial"}
        until_text(page, "concerns", "not heard")
        told = page.locator("#concerns li")
        for number, each in enumerate((gone, slow)):
            assert f"…{each['peer_id'][-8:]}" in told.nth(number).inner_text()
        rows = page.locator("#peers tbody tr")
        assert rows.count() == 256
        first, second = (rows.nth(number).inner_text() for number in (0, 1))
        assert gone["peer_id"][-8:] in first and "silent for 1 h 6 min" in first and "missed 50 of 50" in first
        assert "498 times slower" in second and second.count("on trial") == 1
        assert is_as_wide_as_the_screen(page)
    with a_page(browser, node.url) as page:
        until_text(page, "peers", "0 of the last 50")


def test_each_peer_has_its_speed_arrival_and_delay_and_who_is_banned_says_why(
    browser: Browser, node: DashboardServer
) -> None:
    unknown = {name: None for name in PEER if name.startswith(("arrival", "tokens_per", "staleness"))}
    liar = PEER | unknown | {"peer_id": "12D3KooWliar", "ban": "two for one round", "is_member": False, "points": 0.0}
    node.told.known = [PEER, liar]
    with a_page(browser, node.url) as page:
        until_shown(page)
        until_text(page, "peers", "two for one round")
        heads = page.locator("#peers thead th").all_inner_texts()
        first, second = (page.locator("#peers tbody tr").nth(row).locator("th, td").all_inner_texts() for row in (0, 1))
        shown = dict(zip(heads, zip(first, second, strict=True), strict=True))
        dash = "–"
        assert {name: shown[name] for name in ("Tokens/s", "Comes after", "Delay")} == {
            "Tokens/s": ("512\nmean 499", dash),
            "Comes after": ("4.50 s\nmean 5.25 s", dash),
            "Delay": ("1\nmean 0.25", dash),
        }
        assert "banned: two for one round" in shown["Standing"][1]


def test_a_frame_says_that_the_library_of_its_chart_loads_until_it_is_there(
    browser: Browser, node: DashboardServer
) -> None:
    asked: list[Route] = []
    states = "[...document.querySelectorAll('.chart')].map((each) => each.dataset.state)"
    with a_page(browser, node.url) as page:
        page.route("**/plotly.min.js", lambda route: asked.append(route))  # noqa: PLW0108  # playwright marks it
        page.reload()
        until_shown(page)
        while not asked:
            page.evaluate("() => new Promise(requestAnimationFrame)")
        assert set(page.evaluate(f"() => {states}")) == {"Loading the chart library …"}
        shown = page.evaluate("() => getComputedStyle(document.querySelector('.chart'), '::before').content")
        assert "Loading" in shown
        page.unroute("**/plotly.min.js")  # the page before the reload may have asked too, and this one not yet
        for each in asked:
            with suppress(PlaywrightError):
                each.fulfill(body=NO_LIBRARY, content_type="text/javascript")
        page.wait_for_function(f"() => {states}.every((each) => each === '')")
    with a_page(browser, node.url, expected=("Failed to load resource", "net::ERR_FAILED")) as page:
        page.route("**/plotly.min.js", lambda route: route.abort())
        page.reload()
        page.wait_for_function(f"() => {states}.every((each) => each.includes('could not be loaded'))")


def test_what_happens_shows_without_a_reload(browser: Browser, node: DashboardServer) -> None:
    with a_page(browser, node.url) as page:
        until_shown(page)
        until_text(page, "shown", "7 rounds")
        page.evaluate("() => { window.mine = 'still here' }")
        node.change(applied_round=8, round=9, phase="train", step=4, loss=2.25)
        node.live(a_round(8) | {"loss": 2.25, "refused": {"bad payload": 2}})
        node.say("somebody got a seat: 3 members")
        until_number(page, "applied-round", 8)
        until_text(page, "doing", "Round 9: step 4 of training")
        until_text(page, "c-loss", "2.2500 in round 8")
        until_text(page, "c-taken", "refused: bad payload 2")
        until_text(page, "log", "somebody got a seat: 3 members")
        node.told.known = [PEER | {"refused": {"too many at once": 7}}]
        until_text(page, "peers", "too many at once 7")
        node.change(**told_of(complaint(Code.STALLED)))
        until_text(page, "state-text", "Needs a look")
        node.change(**told_of())
        until_text(page, "state-text", "All is well")
        assert page.evaluate("() => window.mine") == "still here"
        assert numbers_on(page) == numbers_in(node.told.now)


def test_whether_all_have_the_same_model_is_said_as_far_as_the_node_knows(
    browser: Browser, node: DashboardServer
) -> None:
    with a_page(browser, node.url) as page:
        until_shown(page)
        for change, verdict, words in (
            ({"certified_round": 0}, "unknown", "has not certified any round"),
            ({"certified_round": 5}, "unknown", "cannot compare"),
            ({"certified_round": 7}, "same", "after round 7"),
            (
                {"quorum": 5, "fault_tolerance": {"liars": 2, "crashes": 2, "mode": "byzantine"}},
                "same",  # of whom two may lie
                "at least 3 members signed that their model after round 7 was bit for bit this node's, and",
            ),
            ({"roster": [ME]}, "same", "Yes: this node is the only member, and signed its own model after round 7."),
            (told_of(complaint(Code.QUARANTINED)), "other", "differs from the certified"),
        ):
            node.change(**change)
            until_text(page, "agreement", words)
            assert page.locator("#agreement").get_attribute("data-verdict") == verdict


# ---------------------------------------------------------------------------------------------------
# The line to the node


def test_a_node_that_starts_is_waited_for(browser: Browser, node: DashboardServer) -> None:
    node.told.is_starting = True
    with a_page(browser, node.url, expected=REFUSED) as page:
        until_text(page, "banner", "The node is starting")
        assert text_of(page, "state-text") == "Starting"
        node.told.is_starting = False
        until_shown(page)
        page.wait_for_function("() => document.getElementById('banner').textContent === ''")
        assert numbers_on(page) == numbers_in(node.told.now)


def test_what_is_told_twice_shows_once(browser: Browser, node: DashboardServer) -> None:
    with a_page(browser, node.url) as page:
        until_shown(page)
        until_text(page, "shown", "7 rounds")
        node.say("once")
        until_text(page, "log", "once")
        node.told.now["branch"] = "cd" * 32  # so that the page asks for all rounds
        node.live(a_round(8))
        until_text(page, "shown", "8 rounds")
        node.say("the last")
        until_text(page, "log", "the last")
        assert page.locator("#log li").all_inner_texts() == ["12:00:00\nthe last", "12:00:00\nonce"]
        assert page.locator("#rounds tbody tr").count() == 8


def test_a_node_that_falls_silent_is_said_to_be_away_though_its_line_holds(
    browser: Browser, node: DashboardServer
) -> None:
    with a_page(browser, node.url, expected=GONE) as page:
        hurried(page, ANSWER=1_000)
        until_shown(page)
        page.evaluate("() => { window.mine = 'still here' }")
        with node.frozen():
            until_text(page, "banner", "The node does not answer")
            assert text_of(page, "state-text") == "Away"
            assert page.locator("body.old").count() == 1
        page.wait_for_function("() => document.getElementById('banner').textContent === ''")
        node.change(applied_round=9)
        until_number(page, "applied-round", 9)
        assert page.evaluate("() => window.mine") == "still here"


def test_a_node_that_asks_for_its_token_meanwhile_says_how_to_give_it(browser: Browser, node: DashboardServer) -> None:
    app, token = node.site.app, b"a-secret-of-its-owner"
    with a_page(browser, node.url, expected=REFUSED) as page:
        until_shown(page)
        app.guard = Guard("127.0.0.1", node.site.port, token=token)
        until_text(page, "banner", "The node requires its token. Open this page once with ?token=")
        assert text_of(page, "state-text") == "Locked"
        assert page.locator("body.old").count() == 1
        page.goto(f"{node.url}/?token={quote(token)}")
        until_shown(page)
        assert (page.url, text_of(page, "banner")) == (f"{node.url}/", "")


# ---------------------------------------------------------------------------------------------------
# What is hard to show


def test_every_complaint_is_in_words_for_people_and_in_its_own(browser: Browser, node: DashboardServer) -> None:
    told = every_complaint()
    with a_page(browser, node.url) as page:
        until_shown(page)
        node.change(**told_of(*told))
        until_text(page, "health", told[0].text)  # the last one is told from the first
        rows = page.locator("#health li")
        assert rows.locator("b").all_inner_texts() == [each.title for each in told]
        assert rows.locator("span:not(.raw)").all_inner_texts() == [each.advice for each in told]
        assert rows.locator(".raw").all_inner_texts() == [each.text for each in told]
        assert [row.get_attribute("data-severity") for row in rows.all()] == [each.severity for each in told]


def test_a_run_without_rounds_or_peers_says_so(browser: Browser, node: DashboardServer) -> None:
    node.told.lived, node.told.known = [], []
    node.told.now |= {
        "applied_round": 0, "certified_round": 0, "round": 1, "view": 0, "state_root": "", "loss": None, "roots": {},
        "swarm_tokens_per_second": None, "since_applied_seconds": None, "peers": [], "roster": [],
        "mine": {"applied": 0, "applied_of_all": 0, "share": 0.0, "tokens": 0, "training_seconds": 0.0,
                 "energy_joules": None},
    }  # fmt: skip
    with a_page(browser, node.url) as page:
        until_shown(page)
        page.wait_for_function("() => !document.getElementById('peers-empty').hidden")
        assert page.locator("#rounds-empty").is_visible() and not page.locator("#rounds").is_visible()
        assert not page.locator("#peers").is_visible()
        assert numbers_on(page) == numbers_in(node.told.now)
        assert (text_of(page, "loss"), text_of(page, "state-root")) == ("–", "none yet")
        words = page.locator("body").inner_text()
        assert not [wrong for wrong in ("NaN", "undefined", "null", "Infinity", "[object") if wrong in words]
        node.live(a_round(1))
        until_text(page, "c-loss", "2.5000 in round 1")


def test_two_hundred_peers_are_all_there_and_the_worst_stands_first(browser: Browser, node: DashboardServer) -> None:
    node.told.known = lively_peers(200)
    ids = [each["peer_id"] for each in node.told.known]
    node.told.now |= {"peers": ids[:160], "roster": ids[:100], "quorum": 67}
    with a_page(browser, node.url, screen=PHONE) as page:
        until_shown(page)
        until_text(page, "peers-note", "160 connected, 200 known")
        assert page.locator("#peers tbody tr").count() == 200
        first = page.locator("#peers tbody tr").first.inner_text()
        assert ids[3][-8:] in first and "bad payload 2" in first and "2.15 points" in first
        assert page.locator("#roster li").count() == 65
        assert text_of(page, "roster").endswith("and 36 more")
        assert is_as_wide_as_the_screen(page)
        same = page.locator("#peers tbody tr").nth(150).element_handle()
        node.told.known = [each | ({"late": 12_345} if n == 0 else {}) for n, each in enumerate(node.told.known)]
        until_text(page, "peers", "12,345")
        assert page.evaluate("(row) => row.isConnected", same), "what has not changed stays as it is"


@pytest.mark.parametrize("screen", [PHONE, {"width": 1280, "height": 900}], ids=["phone", "desk"])
def test_what_peers_say_is_text_and_nothing_else(
    browser: Browser, node: DashboardServer, screen: dict[str, int]
) -> None:
    peers = [
        PEER | {
            "peer_id": f"{text}{n}", "addresses": [text], "refused": {text: 3, f"{text}!": 1}, "observed": {text: 2},
        }
        for n, text in enumerate((HOSTILE, RIGHT_TO_LEFT, LONG))
    ]  # fmt: skip
    node.told.known = peers
    node.told.now |= {
        "run_name": HOSTILE + LONG, "release": LONG, "roster": [each["peer_id"] for each in peers],
        **told_of(complaint(Code.DEGRADED, why=HOSTILE)),
        "peer_id": HOSTILE, "text": HOSTILE + RIGHT_TO_LEFT + LONG,
    }  # fmt: skip
    with a_page(browser, node.url, screen=screen) as page:
        until_shown(page)
        page.wait_for_function("() => document.querySelectorAll('#peers tbody tr').length === 3")
        for n, text in enumerate((HOSTILE, RIGHT_TO_LEFT, LONG)):
            node.say(text, at=f"2026-01-01T12:00:0{n}.000+00:00")
        node.live(a_round(8) | {"refused": {HOSTILE: 1}, "contributors": [HOSTILE, LONG]})
        until_text(page, "log", LONG[:400])
        until_text(page, "c-taken", "refused: <img src=x")
        until_text(page, "log", HOSTILE)
        assert HOSTILE in text_of(page, "health")
        assert text_of(page, "text").startswith(HOSTILE)
        assert len(text_of(page, "text")) == 401
        assert page.title().startswith("<img src=x")
        assert page.evaluate("() => document.querySelectorAll('img, body script, #log script').length") == 0
        assert page.evaluate("() => window.hacked") is None
        assert is_as_wide_as_the_screen(page)


def test_what_the_model_writes_is_shown_as_text_and_nothing_until_it_has_written(
    browser: Browser, node: DashboardServer
) -> None:
    node.change(text="", held_out_loss=None, held_out_round=None)
    with a_page(browser, node.url) as page:
        until_shown(page)
        assert not page.locator("#text-card").is_visible()
        assert text_of(page, "held-out-of") == "not measured yet"
        for text in (HOSTILE, "</bdi></p><style>*{display:none}</style>", "{{constructor}}&lt;b&gt;", "the next one"):
            node.change(text=text, text_round=1_200, held_out_loss=2.0, held_out_round=1_200)
            until_text(page, "text", text)
            assert text_of(page, "text") == text
            assert page.evaluate("() => document.getElementById('text').children.length") == 0
        assert text_of(page, "text-of") == "Sampled here from the agreed weights after round 1,200."
        assert (text_of(page, "held-out-loss"), text_of(page, "perplexity")) == ("2.0000", "7.389")
        assert page.evaluate("() => window.hacked") is None
        node.change(text="")
        page.wait_for_function("() => document.getElementById('text-card').hidden")


def test_a_node_that_trains_on_its_owners_data_says_what_leaves_the_machine(
    browser: Browser, node: DashboardServer
) -> None:
    with a_page(browser, node.url) as page:
        until_shown(page)
        assert not page.locator("#own-data").is_visible()
        node.change(own_data=OWN_DATA)
        until_text(page, "own-data", OWN_DATA)
        assert page.locator("#own-data").is_visible()
        assert text_of(page, "own-data") == f"Training data: {OWN_DATA}."


def test_a_run_without_audits_says_so(browser: Browser, node: DashboardServer) -> None:
    with a_page(browser, node.url) as page:
        until_shown(page)
        assert not page.locator("#unaudited").is_visible()
        node.change(unaudited="scripts train as they like")
        until_text(page, "unaudited", "scripts")
        assert page.locator("#unaudited").is_visible()
        assert text_of(page, "unaudited") == "Nobody can tell whether members train: scripts train as they like."


def test_motions_are_shown_as_text_while_there_are_any_and_then_what_was_decided(
    browser: Browser, node: DashboardServer
) -> None:
    (moved,) = node.told.now["motions"]
    with a_page(browser, node.url) as page:
        until_text(page, "agenda", "That the run go on after round 40 with recipe.k 128 instead of 256")
        assert "1 of 2 needed assent. This node does not. Here a contribution has" in text_of(page, "agenda")
        assert "p2ptrain assent 3f3f3f3f" in text_of(page, "agenda")
        node.change(motions=[], successor=moved | {"text": HOSTILE, "is_mine": True})
        until_text(page, "agenda", "It is decided. This node goes along.")
        assert HOSTILE in text_of(page, "agenda")
        assert not page.evaluate("window.hacked")
        node.change(successor=None)
        page.wait_for_function("() => document.getElementById('agenda-card').hidden")


def test_a_round_that_is_recorded_after_it_shows_as_applied_comes(browser: Browser, node: DashboardServer) -> None:
    node.told.lived = []
    node.live(a_round(1), a_round(2))
    with a_page(browser, node.url) as page:
        hurried(page, ASK=50)
        until_text(page, "shown", "2 rounds")
        with page.expect_response("**/rounds*"):
            node.change(applied_round=3)
        node.live(a_round(3))
        until_text(page, "shown", "3 rounds")


def test_an_hour_of_rounds_makes_the_page_no_larger(browser: Browser, node: DashboardServer) -> None:
    node.told.lived = lively_rounds(400)
    with a_page(browser, node.url, draws=True) as page:
        hurried(page, ASK=50, MORE=200)
        until_shown(page)
        until_text(page, "shown", "400 rounds")
        for first in range(401, 1_201, 100):
            node.live(*lively_rounds(100, first))
            until_text(page, "shown", f"{first + 99:,} rounds")
        for first in range(0, 250, 50):
            node.say(*(f"line {n}" for n in range(first, first + 50)))
            until_text(page, "log", f"line {first + 49}")
        assert page.locator("#log li").count() == 200
        assert "a point is the mean of 4" in text_of(page, "shown")
        until_drawn(page, 1_200)
        points = page.evaluate("() => document.getElementById('chart-loss').data[0].x.length")
        assert points == 300
        sent = sum(each["bytes_sent"] + each["bytes_received"] for first in (1,) for each in lively_rounds(400, first))
        sent += sum(
            each["bytes_sent"] + each["bytes_received"]
            for first in range(401, 1_201, 100)
            for each in lively_rounds(100, first)
        )
        assert page.evaluate("() => document.getElementById('chart-bytes').data[0].x.at(-1)") == sent
