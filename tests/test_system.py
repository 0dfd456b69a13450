"""What Linux and macOS do differently: Linux's halves as they are, those of macOS with stand-ins for its calls."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from p2ptrain import system
from p2ptrain.errors import ConfigError
from p2ptrain.net.libp2p import process
from p2ptrain.net.libp2p.process import Ports
from p2ptrain.system import SOCKET_PATH_BYTES_MAX, UNKNOWN_TO_FULLFSYNC, fsync, since_boot

SECONDS = 60.0
FULLFSYNC = 51  # <sys/fcntl.h> of macOS


@pytest.fixture
def darwin(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(sys, "platform", "darwin")
    return monkeypatch


# ---------------------------------------------------------------------------------------------------
# Syncing


class Syncs:
    """Stands in for fcntl and os.fsync, and notes what was called."""

    def __init__(self, patch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.called: list[str] = []
        self._code = code
        patch.setattr(fcntl, "F_FULLFSYNC", FULLFSYNC, raising=False)
        patch.setattr(fcntl, "fcntl", self._full)
        patch.setattr(os, "fsync", lambda descriptor: self.called.append("fsync"))

    def _full(self, descriptor: int, command: int) -> int:
        assert command == FULLFSYNC
        self.called.append("full")
        if self._code:
            raise OSError(self._code, os.strerror(self._code))
        return 0


def test_linux_syncs_with_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = Syncs(monkeypatch)
    monkeypatch.setattr(sys, "platform", "linux")
    fsync(0)
    assert syncs.called == ["fsync"]


def test_macos_empties_the_disks_cache(darwin: pytest.MonkeyPatch) -> None:
    syncs = Syncs(darwin)
    fsync(0)
    assert syncs.called == ["full"]


@pytest.mark.parametrize("code", UNKNOWN_TO_FULLFSYNC)
def test_a_file_system_that_cannot_is_synced_as_far_as_it_can(code: int, darwin: pytest.MonkeyPatch) -> None:
    syncs = Syncs(darwin, code)
    fsync(0)
    assert syncs.called == ["full", "fsync"]


def test_a_disk_that_fails_is_not_asked_again(darwin: pytest.MonkeyPatch) -> None:
    """A second call may succeed without the data that the first has lost."""
    syncs = Syncs(darwin, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        fsync(0)
    assert syncs.called == ["full"]


# ---------------------------------------------------------------------------------------------------
# Clock, files, paths, ports


def test_the_clock_since_boot_counts_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    assert since_boot() >= time.monotonic() - 1.0
    monkeypatch.setattr(time, "clock_gettime", lambda clock: {time.CLOCK_MONOTONIC: 7.0}[clock])
    monkeypatch.setattr(sys, "platform", "darwin")
    assert since_boot() == 7.0


@pytest.mark.parametrize(
    ("platform", "before", "after"),
    [
        ("darwin", (256, resource.RLIM_INFINITY), [(system.OPEN_FILES, resource.RLIM_INFINITY)]),
        ("darwin", (256, 4_096), [(4_096, 4_096)]),
        ("darwin", (20_000, resource.RLIM_INFINITY), []),
        ("linux", (256, 4_096), []),
    ],
)
def test_macos_lets_a_node_open_more_files(
    platform: str, before: tuple[int, int], after: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: before)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append(limits))
    system.allow_open_files()
    assert found == after


def test_a_sockets_path_may_be_as_long_as_is_said() -> None:
    with tempfile.TemporaryDirectory(prefix="p2p-", dir="/tmp") as directory:
        longest = f"{directory}/".ljust(SOCKET_PATH_BYTES_MAX, "x")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(longest)
        with socket.socket(socket.AF_UNIX) as bound, pytest.raises(OSError, match="too long"):
            bound.bind(longest + "x")


@pytest.mark.parametrize("is_held", [True, False])
def test_a_port_is_held_for_p2pd_only_where_that_takes_no_connections(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "HOLDS_PORTS", is_held)
    ports = Ports(("/ip4/127.0.0.1/tcp/0",))
    number = int(ports.listen[0].rpartition("/")[2])
    try:
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.1", number))
            except OSError:
                assert is_held
            else:
                assert not is_held
                other.listen()
                with pytest.raises(ConfigError):
                    ports.take_again()
    finally:
        ports.close()


# ---------------------------------------------------------------------------------------------------
# Processes that do not outlive us

# kqueue's events for the ends of processes, by asking again and again.
KQUEUE = """
import os, select, time
select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT = -5, 1, 0x80000000
select.kevent = lambda *event: event
def is_there(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
class kqueue:
    def control(self, events, most):
        assert all(each[1:] == (-5, 1, 0x80000000) for each in events) and most == 1
        while all(is_there(each[0]) for each in events):
            time.sleep(0.01)
select.kqueue = kqueue
"""
PARENT = """
import subprocess, sys, time
sys.platform = "darwin"
from p2ptrain.system import Tie, tied_to_us
command = tied_to_us(Tie[sys.argv[1]], [sys.executable, "-c", sys.argv[3]])
command[4] = sys.argv[2] + command[4]
child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
print("ended", child.returncode, flush=True)
time.sleep(600)
"""
# Says which signal it gets, and its number.
CHILD = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda number, frame: (print("got", number, flush=True), os._exit(0)))
print("runs", flush=True)
time.sleep(600)
"""


def parent_of(tie: str, program: str) -> tuple[subprocess.Popen[str], int]:
    """Starts a process whose child is tied to it as on macOS; returns it, and the child's number."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, tie, KQUEUE, program],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, SECONDS)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for kqueue reads /proc")
@pytest.mark.parametrize(("tie", "said"), [("KILL_WITHOUT_INPUT", ""), ("END_WITH_PARENT", "got 15\n")])
def test_on_macos_a_watcher_ends_a_process_whose_parent_has_gone(tie: str, said: str) -> None:
    parent, child = parent_of(tie, CHILD)
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "runs\n"
        tied = psutil.Process(child)
        family = [tied, *tied.children()]
        assert len(family) == 2, "the process and what watches it"
        parent.kill()
        assert parent.stdout.read() == said
    assert until_gone(family) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for kqueue reads /proc")
def test_on_macos_the_watcher_ends_with_the_process_that_it_watches() -> None:
    parent, child = parent_of("END_WITH_PARENT", CHILD)
    with parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "runs\n"
            (watcher,) = psutil.Process(child).children()
            os.kill(child, signal.SIGTERM)
            assert (parent.stdout.readline(), parent.stdout.readline()) == ("got 15\n", "ended 0\n")
            assert until_gone([watcher]) == []
        finally:
            parent.kill()


def test_who_has_gone_before_the_process_began_is_noticed() -> None:
    command = system.tied_to_us(system.Tie.END_WITH_PARENT, [sys.executable, "-c", "print('runs')"])
    command[5] = "1"  # not this process
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (1, "")


# ---------------------------------------------------------------------------------------------------
# A child's memory

GREEDY = """
import sys, time
sys.platform = "darwin"
from p2ptrain.data import tokenizer_trial
tokenizer_trial.MEMORY_BYTES = 2**28
tokenizer_trial.limit_memory()
print(tokenizer_trial.WATCHERS[0].pid, flush=True)
taken = bytearray(int(sys.argv[1]))
time.sleep(float(sys.argv[2]))
print("is here", flush=True)
"""


@pytest.mark.skipif(shutil.which("ps") is None, reason="ps says how much memory a process has")
@pytest.mark.parametrize(
    ("size", "seconds", "status", "said"), [(2**29, 60, -signal.SIGKILL, ""), (2**20, 1, 0, "is here\n")]
)
def test_on_macos_a_child_that_takes_too_much_memory_is_killed(
    size: int, seconds: float, status: int, said: str
) -> None:
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", GREEDY, str(size), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as child:
        assert child.stdout is not None
        watcher = psutil.Process(int(child.stdout.readline()))
        assert (child.stdout.read(), child.wait(SECONDS)) == (said, status)
    assert until_gone([watcher]) == []
