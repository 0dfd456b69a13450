"""Runs tests/gpu in several processes, and reports each result at once, with what it took.

Most of the time of a test on a card goes into compiling its programs, which one core does.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import Report, run_part
from benchmarks.gpu.compiling import COMPILING

FOLDER = Path(__file__).parents[2] / "tests" / "gpu"
CUDA_ALONE = {"test_what_it_takes_is_what_was_told", "test_a_card_tells_what_it_draws"}  # skipped on a CPU
PROCESSES_MAX, CORES_EACH = 10, 1.5  # a test has a card wait for its core
SLOWEST = 8  # tests whose time is told
FAILURE_CHARACTERS = 2_000  # of what pytest says, its end


class Results:
    """A pytest plugin that reports each test, and files that cannot be imported."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.compiling = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.location[2]] += report.duration
        self.compiling += dict(report.user_properties).get(COMPILING, 0.0) if report.when == "teardown" else 0.0
        if report.outcome != "passed" or report.when == "call":
            self._tell(report.location[2], report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self._tell(report.nodeid, report)

    def _tell(self, name: str, report: Any) -> None:
        self.outcomes[name] = report.outcome
        if report.outcome == "passed":
            self.report.add(name, "passed")
        else:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.report.add(name, {report.outcome: why[-FAILURE_CHARACTERS:]})


def main(report: Report) -> None:
    os.environ |= {"GPU_TESTS_DEVICE": str(report.device), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    results = Results(report)
    processes = max(2, min(PROCESSES_MAX, int(len(os.sched_getaffinity(0)) / CORES_EACH)))
    spread = ["-p", "xdist.plugin", "-n", str(processes), "--dist", "worksteal"]
    status = pytest.main(["-q", str(FOLDER), "-p", "no:cacheprovider", *spread], plugins=[results])
    report.add("outcomes", dict(Counter(results.outcomes.values())))
    report.add("slowest", {name: round(seconds, 1) for name, seconds in results.seconds.most_common(SLOWEST)})
    report.add(COMPILING, round(results.compiling, 1))  # of all processes together
    skipped = {name for name, outcome in results.outcomes.items() if outcome == "skipped"}
    expected = CUDA_ALONE if report.device.type == "cpu" else set()
    if status or skipped != expected:  # skipped is not passed: what this is for was not tried
        sys.exit(f"pytest ends with {int(status)}; skipped against expectation: {sorted(skipped ^ expected)}")


if __name__ == "__main__":
    run_part(__doc__ or "", main)
