"""What all tests share."""

from __future__ import annotations

import os
import signal
import sys
from itertools import groupby

import pytest
from hypothesis import HealthCheck, settings

# Before any test imports torch: two processes that use both cores run five times slower than with a thread each.
os.environ["OMP_NUM_THREADS"] = "1"

# Examples are slow on a busy machine, which is no fault of the code: pytest's timeout is the deadline. In CI
# the same examples are tried every time, so that a red run can be repeated; at a desk they differ.
settings.register_profile(
    "p2ptrain",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="CI" in os.environ,
)
settings.load_profile("p2ptrain")


# A shell ignores Ctrl-C for what it runs in the background; so would each node that a test starts, and not end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="a test that is skipped fails the run: what it takes is missing"
    )
    parser.addoption("--no-skips-of", metavar="MARKER", help="the same, for tests with this marker")


IN_EVERY_RUN = ("test_daemon_life.py", "test_daemon_start.py")  # a swarm begins, is killed, and goes on


@pytest.hookimpl(tryfirst=True)  # -m selects by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of real swarms, and spreads them: the rest keeps the processors busy while daemons wait."""
    waiting = [each for each in items if each.path.parent.name == "swarm"]
    rest = [each for each in items if each.path.parent.name != "swarm"]
    for each in waiting:
        if each.path.name not in IN_EVERY_RUN:
            each.add_marker("daemons")
    for each in items if sys.platform != "linux" else []:
        if each.get_closest_marker("linux"):
            each.add_marker(pytest.mark.skip(reason="asks Linux"))
    files = [list(each) for _, each in groupby(rest, key=lambda each: each.path)]
    if files:
        share = len(waiting) / len(files)
        items.clear()
        for number, file in enumerate(files):
            items += [*file, *waiting[round(number * share) : round((number + 1) * share)]]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-skips") or config.getoption("--no-skips-of"):
        config.pluginmanager.register(
            NoSkips("" if config.getoption("--no-skips") else config.getoption("--no-skips-of"))
        )


class NoSkips:
    """For `make test-deploy`, which is there to see all of its tests run, and for CI, which has a browser."""

    def __init__(self, marker: str) -> None:
        """Of tests with this marker; "": of all."""
        self.marker, self.skipped = marker, 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.skipped += report.skipped and (not self.marker or self.marker in report.keywords)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.write_line(f"{self.skipped} skipped that should have run", red=True)


@pytest.fixture(autouse=True)
def _without_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have set variables for a node of their own."""
    for name in [name for name in os.environ if name.upper().startswith("P2PTRAIN_")]:
        monkeypatch.delenv(name)
