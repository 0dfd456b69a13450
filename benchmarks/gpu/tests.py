"""The tests of tests/gpu, each with its result."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu import Report, run_part

ROOT = Path(__file__).parents[2]


def main(report: Report) -> None:
    environment = os.environ | {"GPU_TESTS_DEVICE": str(report.device), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", f"--junitxml={found}", "-p", "no:cacheprovider"]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode  # noqa: S603
        results = {}
        for case in ElementTree.parse(found).iter("testcase"):  # noqa: S314  # pytest has just written it
            bad = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
            results[case.get("name", "")] = bad[0] if bad else "passed"
    report.add("outcomes", dict(Counter(results.values())))
    report.add("results", results)
    if status or set(results.values()) != {"passed"}:  # skipped is not passed: what this is for was not tried
        sys.exit(1)


if __name__ == "__main__":
    run_part(__doc__ or "", main)
