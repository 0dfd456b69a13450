"""Progress for people: a live line on a terminal, a JSON line per round elsewhere."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.observe import progress as module
from p2ptrain.observe.logs import JsonText
from p2ptrain.observe.progress import ProgressLine, line_of, lines_of, peer_lines
from p2ptrain.observe.schema import Status
from p2ptrain.visible import count_of, duration
from tests.helpers.web import PEER, told_of

STATUS: dict[str, Any] = {
    "run_id": "ab" * 32,
    "run_name": "tiny",
    "peer_id": "12D3KooWx",
    "addresses": ["/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWx", "/ip6/2001:db8::7/tcp/4001/p2p/12D3KooWx"],
    "round": 13,
    "phase": "collect",
    "view": 0,
    "applied_round": 12,
    "state_root": "cd" * 32,
    "loss": 2.34567,
    "tokens_per_second": 12_345.6,
    "peers": ["a", "b"],
    "roster": ["a", "b", "c"],
    "quorum": 2,
    "fault_tolerance": {"liars": 0, "crashes": 1, "mode": "crash-only"},
    **told_of(),
    "http": None,
    "bytes": {"bytes sent": 1_234, "bytes received": 56_789_000},
}


def model(told: dict[str, Any]) -> Status:
    return Status.model_construct(**told | {"complaints": [Complaint(**each) for each in told["complaints"]]})


DISK = told_of(complaint(Code.DEGRADED, why="the disk is full"), complaint(Code.NO_PEERS))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1.0 KB"), (99_940, "99.9 KB"), (123_456, "123 KB"), (2.5e6, "2.5 MB"),
     (7e9, "7.0 GB"), (7e13, "70000 GB")],
)  # fmt: skip
def test_a_number_of_bytes_is_told_in_few_characters(size: float, text: str) -> None:
    assert count_of(size) == text


@pytest.mark.parametrize(
    ("seconds", "told"), [(59.9, "59 s"), (3_599.0, "59 min"), (3_660.0, "1 h 1 min"), (90_000.0, "1 d 1 h")]
)
def test_times_are_told_as_a_person_would(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_a_node_in_one_line() -> None:
    assert line_of(model(STATUS)) == (
        "round 13 collect · loss 2.346 · 2 peers · 3 in the roster · 12,346 tokens/s · "
        "sent 1.2 KB, received 56.8 MB · root cdcdcdcdcdcd"
    )
    small = STATUS | told_of(complaint(Code.CRASH_ONLY))
    assert line_of(model(small)) == line_of(model(STATUS))  # in `status` it stands
    new = STATUS | {"loss": None, "state_root": "", "bytes": {}} | DISK
    assert line_of(model(new)) == (
        "round 13 collect · loss - · 2 peers · 3 in the roster · 12,346 tokens/s · "
        "sent 0 B, received 0 B · root - · degraded: the disk is full"
    )


def test_a_speed_that_nobody_knows_is_left_out() -> None:
    unknown = STATUS | {"tokens_per_second": None}
    assert "3 in the roster · sent 1.2 KB" in line_of(model(unknown))
    assert not any(line.startswith("speed") for line in lines_of(unknown).split("\n"))


def test_a_node_in_some_lines() -> None:
    lines = lines_of(STATUS | DISK).split("\n")
    rows = {line[:11].strip(): line[12:] for line in lines if line[:11].strip()}
    assert rows == {
        "run": f"tiny  {'ab' * 32}",
        "peer id": "12D3KooWx",
        "addresses": STATUS["addresses"][0],
        "round": "13, collect; 12 applied",
        "state root": "cd" * 32,
        "loss": "2.3457 nats a token",
        "speed": "12,346 tokens/s",
        "peers": "2",
        "roster": "3 members, of which 2 decide; 1 may crash, 0 may lie",
        "health": "degraded: the disk is full",
        "http": "off",
    }
    assert [line[12:] for line in lines if not line[:11].strip()] == [STATUS["addresses"][1], "no peers"]
    empty = lines_of(STATUS | {"addresses": [], "loss": None, "state_root": ""})
    assert "addresses   none yet\n" in empty
    alone = lines_of(STATUS | {"roster": ["12D3KooWx"], "quorum": 1})
    assert "roster      1 member, of which 1 decides; " in alone
    assert "health      good\n" in empty
    assert "state root  none yet\n" in empty


def test_where_there_is_no_terminal_a_round_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    status = dict(STATUS)
    progress = ProgressLine("json", lambda: model(status))
    with caplog.at_level(logging.INFO):
        progress.start()
        for applied in (12, 12, 13, 13, 13, 12):  # another branch has won, and it goes back
            status["applied_round"] = applied
            progress.tell()
        progress.stop()
    assert len(caplog.records) == 3
    line = json.loads(JsonText().format(caplog.records[0]))
    assert line.pop("at").endswith("+00:00")
    assert line == {
        "level": "info",
        "message": line_of(model(STATUS)),
        "round": 13,
        "phase": "collect",
        "loss": 2.34567,
        "tokens_per_second": 12_345.6,
        "state_root": "cd" * 32,
        "peers": 2,
        "roster": 3,
        "bytes_sent": 1_234,
        "bytes_received": 56_789_000,
    }


@pytest.fixture
def handlers() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers
    yield
    root.handlers = before


@pytest.mark.usefixtures("handlers")
def test_on_a_terminal_one_line_stays_and_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    status, shown = dict(STATUS), io.StringIO()
    monkeypatch.setattr(module, "Console", lambda **_: Console(file=shown, force_terminal=True, width=60))
    progress = ProgressLine("auto", lambda: model(status))
    progress.start()
    progress.tell()
    status["round"] = 14
    progress.tell()
    progress.stop()
    progress.stop()
    assert "round 14 collect" in shown.getvalue()
    assert shown.getvalue().count("\n") <= 2  # it is overwritten, not repeated


@pytest.mark.usefixtures("handlers")
def test_a_terminal_obeys_nothing_that_a_peer_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown, evil = io.StringIO(), "\x1bcX \u009b2J \x07 \u202eY [red]Z"
    monkeypatch.setattr(module, "Console", lambda **_: Console(file=shown, force_terminal=True, width=200))
    progress = ProgressLine("auto", lambda: model(STATUS | told_of(complaint(Code.DEGRADED, why=evil))))
    with caplog.at_level(logging.INFO):
        progress.start()
        logging.getLogger("p2ptrain.daemon").info("a peer has nothing: %s", evil)
        progress.tell()
        progress.stop()
    for obeyed in ("\x1bc", "\u009b", "\x07", "\u202e"):
        assert obeyed not in shown.getvalue()
    words = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())  # without rich's own colours
    assert "a peer has nothing: ?cX ?2J ? ?Y [red]Z" in words
    assert "· degraded: ?cX ?2J ? ?Y [red]Z" in words


@pytest.mark.usefixtures("handlers")
def test_a_log_stays_as_it_is_where_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    before = logging.getLogger().handlers
    ProgressLine("auto", lambda: model(STATUS)).start()  # the test's stderr is no terminal
    assert logging.getLogger().handlers is before


def test_a_peer_is_a_line_with_its_figures_and_who_is_out_is_named_with_the_reason() -> None:
    unknown = PEER | {name: None for name in PEER if name.startswith(("arrival", "tokens_per", "staleness", "latency"))}
    away = {"is_connected": False, "is_member": False, "addresses": []}
    peers = [
        PEER,
        unknown | {"peer_id": "new", "is_member": False, "standing": "on trial", "addresses": ["\x9b2J"]},
        unknown | away | {"peer_id": "liar", "ban": "bad payload", "is_greylisted": True},
        unknown | away | {"peer_id": "flood", "is_greylisted": True, "observed": {"flooding": 10, "late": 1}},
        unknown | away | {"peer_id": "idle", "standing": "suspended", "is_member": True},
        unknown | away | {"peer_id": "accuser", "muted": 90},
    ]
    role = "member".ljust(18)
    assert peer_lines(peers).splitlines() == [
        f"{PEER['peer_id']}  {role}  42 ms      498 tokens/s    after 5.2 s   delay 1  {PEER['addresses'][0]}",
        f"new  on trial{' ' * 62}?2J",
        "liar  banned: bad payload",
        "new  on trial: members measure first whether the contributions come from training",
        "idle  suspended: all members measured, and found no work in the contributions",
        "accuser  audits count again after round 90",
        "flood  kept away: flooding 10, late 1",
        "2 peers",
    ]


def test_a_status_says_why_nobody_can_audit() -> None:
    assert "audits      none" not in lines_of(STATUS)
    assert "\naudits      none, because scripts train" in lines_of(STATUS | {"unaudited": "scripts train as they like"})


def test_the_owner_of_a_node_is_shown_no_control_character_either() -> None:
    shown = lines_of(STATUS | {"run_name": "\x1b]0;pwned\x07", "health": ["\x9b2J"]})
    assert not any(control in shown for control in "\x1b\x07\x9b")
