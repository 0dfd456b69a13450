"""Notifications to a supervisor over a real socket, and a real node under the restrictions of its systemd unit."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from pathlib import Path
from time import monotonic

import pytest

from p2ptrain.node import notify as module
from p2ptrain.node.notify import TELL_SECONDS, TEXT_MAX, SystemdNotifier, notify
from p2ptrain.observe.http import STARTING
from tests.helpers.daemons import SECONDS, TEST_SECONDS, DaemonSwarm, swarm_in
from tests.helpers.supervisor import SupervisorEnd

SANDBOX = Path(__file__).parents[1] / "helpers/sandbox.py"
WAITS_SECONDS_MAX = 2.0  # on a busy machine, for nothing


@pytest.fixture(params=["path", pytest.param("abstract", marks=pytest.mark.linux)])
def supervisor(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SupervisorEnd]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@p2ptrain test {os.getpid()}"
    heard = SupervisorEnd(name)
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    yield heard
    heard.socket.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1_000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def test_what_is_said_arrives_in_one_datagram(supervisor: SupervisorEnd) -> None:
    assert notify(READY="1", STATUS="round 7")
    assert supervisor.listen() == [{"READY": "1", "STATUS": "round 7"}]


def test_a_text_with_line_ends_is_no_other_message_and_a_long_one_is_cut(supervisor: SupervisorEnd) -> None:
    assert notify(STATUS="a name\nREADY=1\r\nSTOPPING=1")
    assert notify(STATUS="x" * 10_000)
    assert supervisor.listen() == [{"STATUS": "a name READY=1 STOPPING=1"}, {"STATUS": "x" * TEXT_MAX}]


@pytest.mark.parametrize("name", ["", "relative/path", "/nowhere/notify", "@nobody listens to this", "vsock:2:1"])
def test_without_a_supervisor_nothing_is_said_and_nothing_goes_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    assert not notify(READY="1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not notify(READY="1")
    SystemdNotifier().look(lambda: pytest.fail("nobody wants to know"), False)


def test_a_supervisor_that_does_not_listen_holds_nobody_up_and_hears_later_that_the_node_is_ready(
    supervisor: SupervisorEnd, clock: Callable[[float], None]
) -> None:
    count = 0
    while notify(STATUS="x" * TEXT_MAX):
        count += 1
        assert count < 10_000
    began, notifier = monotonic(), SystemdNotifier()
    notifier.look(lambda: "round 1", False)
    assert monotonic() - began < WAITS_SECONDS_MAX
    assert all("READY" not in each for each in supervisor.listen())
    clock(1)
    notifier.look(lambda: "round 2", False)
    assert supervisor.listen()[-1] == {"READY": "1", "STATUS": "round 2", "WATCHDOG": "1"}


def test_it_is_ready_once_and_beats_as_long_as_it_is_looked_at(
    supervisor: SupervisorEnd, clock: Callable[[float], None]
) -> None:
    notifier = SystemdNotifier()
    for number in range(12):
        notifier.look(lambda number=number: f"round {number}", False)
        clock(1)
    assert supervisor.listen() == [
        {"READY": "1", "STATUS": "round 0", "WATCHDOG": "1"},
        {"STATUS": f"round {TELL_SECONDS:.0f}", "WATCHDOG": "1"},
        {"STATUS": f"round {2 * TELL_SECONDS:.0f}", "WATCHDOG": "1"},
    ]


def test_a_node_that_has_halted_beats_no_more_and_says_why(
    supervisor: SupervisorEnd, clock: Callable[[float], None]
) -> None:
    notifier = SystemdNotifier()
    notifier.look(lambda: "round 1", False)
    clock(TELL_SECONDS)
    notifier.look(lambda: "halted: two certificates", True)
    assert supervisor.listen()[1:] == [{"STATUS": "halted: two certificates"}]


@pytest.mark.parametrize(
    ("interval", "whose", "seconds"),
    [("8000000", "", 2), ("8000000", "own", 2), ("8000000", "1", 5), ("60000000", "", 5), ("0", "", 5), ("x", "", 5)],
)
def test_beats_come_four_times_within_the_patience_of_the_supervisor(
    supervisor: SupervisorEnd, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch,
    interval: str, whose: str, seconds: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("WATCHDOG_USEC", interval)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if whose == "own" else whose)
    notifier = SystemdNotifier()
    for _ in range(20):
        notifier.look(lambda: "", False)
        clock(1)
    assert len(supervisor.was_told("WATCHDOG")) == 20 // seconds


# ---------------------------------------------------------------------------------------------------
# Real daemons


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[DaemonSwarm]:
    with swarm_in(tmp_path) as swarm:
        yield swarm


def lives_under(supervisor: SupervisorEnd, swarm: DaemonSwarm, name: str, *prefix: str) -> None:
    """Runs a node from start to end, and checks what the supervisor is told."""
    own = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "4000000", "P2PTRAIN_LIMITS__NICE": "19"}
    node = swarm.first(**own)
    node.prefix = prefix
    node.start()
    node.until(lambda: supervisor.was_told("READY"), SECONDS)
    assert supervisor.heard[0] == {"STATUS": STARTING}
    assert node.status()["addresses"], "it takes part when it says so"
    node.until_applied(2)
    beats = len(supervisor.was_told("WATCHDOG"))
    node.until(lambda: len(supervisor.was_told("WATCHDOG")) > beats)
    assert any(" · loss " in each and " · root " in each for each in supervisor.was_told("STATUS"))
    assert supervisor.was_told("READY") == ["1"]
    assert supervisor.was_told("STOPPING") == []
    node.signal(signal.SIGTERM)
    assert node.until_ended() == 0
    assert supervisor.was_told("STOPPING") == ["1", "1"]
    assert any(each.startswith("leaving the run") for each in supervisor.was_told("STATUS"))
    assert supervisor.was_told("STATUS")[-1].endswith(": saving the state")


@pytest.mark.timeout(TEST_SECONDS)
def test_a_node_tells_its_supervisor_its_life(supervisor: SupervisorEnd, swarm: DaemonSwarm) -> None:
    lives_under(supervisor, swarm, os.environ["NOTIFY_SOCKET"])


@pytest.mark.timeout(TEST_SECONDS)
def test_a_node_trains_under_what_its_unit_forbids(
    swarm: DaemonSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("systemd-analyze") is None or find_library("seccomp") is None:
        pytest.skip("takes systemd-analyze and libseccomp")
    supervisor = SupervisorEnd(str(tmp_path / "notify"))
    try:
        lives_under(supervisor, swarm, str(tmp_path / "notify"), sys.executable, str(SANDBOX))
    finally:
        supervisor.socket.close()
