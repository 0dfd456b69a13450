"""A frame of the dashboard in the terminal: its contents, in the page's words, on screens of all sizes."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.observe.schema import SameModel
from p2ptrain.observe.top import poll
from p2ptrain.observe.top_frame import chart, duration, hours, sparkline, spread
from tests.helpers.top import LINE, Answering, shown
from tests.helpers.web import ME, OTHER, PEER, STATUS, a_round, a_status, told_of


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 10, ""),
        ([1.0], 0, ""),
        ([3.0, 3.0], 10, "▁▁"),
        ([0.0, 7.0], 10, "▁█"),
        ([float(n) for n in range(8)], 8, "▁▂▃▄▅▆▇█"),
        ([float(n // 2) for n in range(16)], 8, "▁▂▃▄▅▆▇█"),
        ([7.0, 0.0, 3.0], 2, "█▁"),
    ],
)
def test_a_sparkline_goes_from_the_least_to_the_largest(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def test_a_chart_is_a_sparkline_of_several_rows() -> None:
    assert chart([15.0, 0.0, 7.0, 8.0], 4, rows=2) == ["█  ▁", "█▁██"]
    assert chart([], 4, rows=2) == ["", ""]


def test_a_frame_says_what_the_daemon_says() -> None:
    text = re.sub(" +$", "", shown(poll(Answering(), 1.0)), flags=re.MULTILINE)
    for part in (
        "test", "round 8", "agree", "try 2", "2.5000 nats", "123 tokens/s", "457", "5 contributions, 25.0%", "9,000",
        "2 members", "cdcdcdcdcdcdcdcd", "after round 7", "4.500", "1.500", "train 1.0", "collect 0.2", OTHER[-16:],
        "member", "bad payload 1", "private", "12:34:56 a line", "all is well", "cpu, 100% of the time",
        "2 members, 2 decide; 0 may crash, 0 may lie; 3 may contribute", "25.0% of 20", "0.02 hours",
        "after round 7, 1 s ago; round 6 is certified", "up 1 min", "p2ptrain 1.2.3", "http://127.0.0.1:8420/",
        "loss        2.5000 nats a token, swarm 2.6000, held-out 2.7500, perplexity 15.6\n",
        "2.0 taken", "at most 1.0 KB/s out\n",
    ):  # fmt: skip
        assert part in text, part
    assert "and more" not in text  # of a line of the log its first


def test_complaints_and_pauses_are_told_each_on_a_line() -> None:
    daemon = Answering()
    disk = complaint(Code.DEGRADED, why="the disk is full")
    daemon.answers["status"] |= told_of(disk, complaint(Code.PAUSED), complaint(Code.CRASH_ONLY))
    text = shown(poll(daemon, 1.0))
    assert "degraded: the disk is full\n" in text.replace(" \n", "\n")
    assert "paused by its owner" in text
    assert "crash-only" not in text
    assert "all is well" not in text


def test_bandwidth_is_what_went_between_two_looks() -> None:
    daemon = Answering()
    before = poll(daemon, 10.0)
    daemon.answers = deepcopy(daemon.answers)
    daemon.answers["status"]["bytes"] = {"bytes sent": 10_010, "bytes received": 20}
    assert "sending 5.0 KB/s (10.0 KB), receiving 0 B/s (20 B)" in shown(poll(daemon, 12.0), before)
    daemon.answers = deepcopy(daemon.answers)
    daemon.answers["status"]["bytes"] = {"bytes sent": 5, "bytes received": 5}  # it has begun anew
    assert "sending 5 B, receiving 5 B" in shown(poll(daemon, 14.0), poll(Answering(), 12.0))


def test_loss_has_a_line_over_the_bytes_that_were_moved() -> None:
    daemon = Answering()
    moved = [(0, 0), (500, 500), (0, 0), (40_000, 50_000), (4_000, 5_000)]
    daemon.answers["rounds"]["rounds"] = [
        a_round(number) | {"bytes_sent": sent, "bytes_received": received, "loss": loss}
        for number, (loss, (sent, received)) in enumerate(zip([None, 8.0, 1.0, 4.5, 2.0], moved, strict=True))
    ]
    lines = {line.split("  ")[0]: line.rstrip() for line in shown(poll(daemon, 1.0)).splitlines()}
    assert lines["loss"] == "loss        8.000 █▁▅▂ 2.000"
    assert lines["by bytes"] == "by bytes    1.0 KB ███▁ 100 KB"  # 4.5 is the mean of 8 and 1, 3.25 that of the others
    daemon.answers["rounds"]["rounds"] = [a_round(1) | {"bytes_sent": 0, "bytes_received": 0}] * 3
    assert "by bytes" not in shown(poll(daemon, 1.0))
    daemon.answers["rounds"]["rounds"] = [a_round(1) | {"loss": loss} for loss in (1.0, float("nan"), 3.0)]
    assert "1.000 ▁█ 3.000" in shown(poll(daemon, 1.0))


@pytest.mark.parametrize(
    ("places", "values", "width", "steps"),
    [
        ([], [], 5, []),
        ([1], [1.0], 5, []),
        ([1, 1], [1.0, 2.0], 5, []),
        ([0, 10], [1.0, 2.0], 0, []),
        ([0, 10], [1.0, 2.0], 5, [1.0, 2.0]),
        ([0, 90, 95, 100], [4.0, 3.0, 2.0, 1.0], 5, [4.0, 4.0, 4.0, 2.0]),
        ([0, 1, 50, 100], [4.0, 2.0, 3.0, 1.0], 2, [3.0, 2.0]),
    ],
)
def test_steps_over_bytes_are_even(places: list[int], values: list[float], width: int, steps: list[float]) -> None:
    assert spread(places, values, width) == steps


def test_bytes_by_purpose_are_told_whole_the_most_first() -> None:
    daemon = Answering()
    daemon.answers["status"]["traffic"] = {
        "gossip": {"sent": 1_000, "received": 2_000},
        "payloads": {"sent": 4_000_000, "received": 3_000_000},
        "data": {"sent": 0, "received": 0},
    }
    said = [line.rstrip() for line in shown(poll(daemon, 1.0)).splitlines() if line.startswith("out/in")]
    assert said == ["out/in      payloads 4.0 MB/3.0 MB, gossip 1.0 KB/2.0 KB"]
    narrow = shown(poll(daemon, 1.0), width=50)
    assert "payloads 4.0 MB/3.0 MB" in narrow
    assert "gossip" not in narrow
    daemon.answers["status"]["traffic"] = {}
    assert "out/in" not in shown(poll(daemon, 1.0))


@pytest.mark.parametrize(("joules", "text"), [(None, ""), (0.0, "about 0.00 kWh"), (5.4e9, "about 1,500.00 kWh")])
def test_electricity_is_told_where_the_device_reports_it(joules: float | None, text: str) -> None:
    daemon = Answering()
    daemon.answers["status"]["mine"]["energy_joules"] = joules
    shown_now = shown(poll(daemon, 1.0))
    assert ("kWh" in shown_now) == (joules is not None)
    assert text in shown_now


def test_whoever_has_points_against_it_comes_first() -> None:
    daemon = Answering()
    daemon.answers["peers"]["peers"] = [
        PEER | {"peer_id": f"peer {number}", "points": 0.0, "is_member": number < 8} for number in range(9)
    ] + [PEER | {"peer_id": "liar", "points": 9.0, "is_member": False, "observed": {"malformed": 2, "late": 31}}]
    text = shown(poll(daemon, 1.0), width=200, height=20)
    assert text.index("liar") < text.index("peer 0")
    assert "late 31, malformed 2" in text
    assert "offered" in text
    assert "peer 8" not in text


def test_alone_is_said_only_by_whoever_is() -> None:
    daemon = Answering()
    daemon.answers["peers"]["peers"] = []
    assert "no peers yet" not in shown(poll(daemon, 1.0))  # it has a peer, and does not tell of it
    daemon.answers["status"]["peers"] = []
    assert "no peers yet" in shown(poll(daemon, 1.0))


def test_the_head_says_what_the_phase_waits_for() -> None:
    daemon = Answering()
    assert "step 3" not in shown(poll(daemon, 1.0))
    daemon.answers["status"] |= {"phase": "train", "view": 0}
    assert "step 3" in shown(poll(daemon, 1.0))
    daemon.answers["status"] |= {"phase": "collect"}
    assert "waiting for 1 contribution\n" in shown(poll(daemon, 1.0))


@pytest.mark.parametrize(
    ("seconds", "told"), [(59.9, "59 s"), (3_599.0, "59 min"), (3_660.0, "1 h 1 min"), (90_000.0, "1 d 1 h")]
)
def test_times_are_told_as_a_person_would(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_hours_are_exact_while_they_are_few() -> None:
    assert [hours(each) for each in (70.0, 35_000.0, 36_000.0, 36e6)] == ["0.02", "9.72", "10.0", "10,000.0"]


@pytest.mark.parametrize("width", [20, 40, 69, 80, 140, 300])
@pytest.mark.parametrize("peers", [0, 1, 200])
def test_any_width_holds_a_frame_and_many_peers_fit_the_height(width: int, peers: int) -> None:
    daemon = Answering()
    daemon.answers["peers"]["peers"] = [PEER | {"peer_id": f"12D3KooW{number:044}"} for number in range(peers)]
    text = shown(poll(daemon, 1.0), width=width, height=30)
    if width >= 40:
        assert len(text.splitlines()) <= 30
    assert ("more" in text) == (peers == 200)
    assert "round 8" in text or width < 40


def test_a_young_node_has_a_frame() -> None:
    daemon = Answering()
    daemon.answers["status"] |= {"loss": None, "swarm_tokens_per_second": None, "state_root": "", "is_member": False}
    daemon.answers["rounds"]["rounds"] = []
    assert "- nats a token" in shown(poll(daemon, 1.0))
    daemon.answers["rounds"]["rounds"] = [a_round(1) | {"loss": None}]
    shown(poll(daemon, 1.0))


def test_what_a_terminal_would_obey_does_not_reach_it() -> None:
    daemon = Answering()
    daemon.answers["status"] |= told_of(complaint(Code.DEGRADED, why="\x1b[2Jgone"))
    daemon.answers["peers"]["peers"][0] |= {"refused": {"\x1b]0;x\x07": 1}}
    daemon.answers["peers"]["peers"][0] |= {"observed": {"\x9b31m": 1}}
    daemon.answers["log"]["lines"] = [LINE | {"message": "[bold]\x1b[31m"}]
    daemon.answers["status"] |= {
        "release": "\x1b[1m",
        "http": "\u202eptth",
        "traffic": {"\x1bc": {"sent": 1, "received": 1}},
    }
    text = shown(poll(daemon, 1.0), width=200)
    assert not any(char in text for char in "\x9b\u202e")
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]?[31m" in text  # and rich's marks are text


# ---------------------------------------------------------------------------------------------------
# Whether all have the same model


LIARS = {"fault_tolerance": {"liars": 1, "crashes": 1, "mode": "byzantine"}, "quorum": 3}
VERDICTS: list[tuple[dict[str, Any], str, str]] = [
    (
        {},
        "same",
        "Yes: at least 2 members signed that their model after round 6 was bit for bit this node's.",
    ),
    (
        LIARS,
        "same",
        "Yes: at least 2 members signed that their model after round 6 was bit for bit this node's, "
        "and at most 1 of them may lie.",
    ),
    (
        {"quorum": 1},
        "same",
        "Yes: at least 1 member signed that their model after round 6 was bit for bit this node's.",
    ),
    (
        {"quorum": 1, "roster": [ME]},
        "same",
        "Yes: this node is the only member, and signed its own model after round 6.",
    ),
    ({"certified_round": 0}, "unknown", "Not known yet: the roster has not certified any round."),
    (
        {"certified_round": 1_005},
        "unknown",
        "The roster has certified round 1,005, which this node did not apply, so it cannot compare.",
    ),
    (
        told_of(complaint(Code.QUARANTINED), complaint(Code.STALLED)),
        "other",
        "No: this node's model differs from the certified one. It is fetching the right one.",
    ),
]


@pytest.mark.parametrize(("changes", "verdict", "text"), VERDICTS)
def test_the_verdict_says_what_was_signed_and_no_more(changes: dict[str, Any], verdict: str, text: str) -> None:
    daemon = Answering()
    status = a_status(daemon.answers["status"] | deepcopy(changes) | {"counters": {}})
    assert status.same_model == SameModel(verdict=verdict, text=text)  # type: ignore[arg-type]
    daemon.answers["status"] = status.model_dump(mode="json")
    for width in (60, 80, 200):  # none of its words is cut off
        assert text.replace(" ", "") in re.sub(r"\s", "", shown(poll(daemon, 1.0), width=width))


def test_own_results_that_were_wrong_are_told_where_there_are_any() -> None:
    daemon = Answering()
    assert "Wrong results of this node: 2." in shown(poll(daemon, 1.0), width=200)
    daemon.answers["status"]["counters"] = {}
    assert "wrong" not in shown(poll(daemon, 1.0), width=200)


# ---------------------------------------------------------------------------------------------------
# Screens of all sizes


ALWAYS = ("round 8", "all is well", "2.5000 nats", "2 members, 3 decide", "same model", "4.500", "q quits")
LEFT_OUT = ("out/in", "by bytes", "hours of training", "after round 7,", "receiving", "a round")


@pytest.mark.parametrize(
    ("width", "height", "missing", "lines_of_log"),
    [(200, 50, (), 5), (80, 24, (), 1), (60, 20, ("out/in", "by bytes", "hours of training", "after round 7,"), 0),
     (60, 17, LEFT_OUT, 0)],
)  # fmt: skip
def test_a_low_screen_keeps_what_matters(width: int, height: int, missing: tuple[str, ...], lines_of_log: int) -> None:
    daemon = Answering()
    daemon.answers["peers"]["peers"] = [PEER | {"peer_id": f"12D3KooW{number:044}"} for number in range(60)]
    daemon.answers["log"]["lines"] = [LINE] * 9
    daemon.answers["status"] = a_status(STATUS | LIARS).model_dump(mode="json")  # the longest verdict
    text = shown(poll(daemon, 1.0), width=width, height=height)
    assert len(text.splitlines()) <= height
    for part in ALWAYS:
        assert part in text
    assert tuple(part for part in LEFT_OUT if part not in text) == missing
    assert text.count("  member  ") >= 3
    assert text.count("12:34:56 a line") == lines_of_log


def test_complaints_take_the_place_of_what_matters_less() -> None:
    daemon = Answering()
    daemon.answers["status"] |= told_of(*(complaint(Code.DEGRADED, why=f"trouble {number}") for number in range(5)))
    daemon.answers["peers"]["peers"] = [PEER] * 60
    daemon.answers["log"]["lines"] = [LINE] * 9
    text = shown(poll(daemon, 1.0), width=80, height=24)
    assert len(text.splitlines()) <= 24
    assert "trouble 4" in text
    assert OTHER[-16:] in text
    assert "by bytes" not in text
