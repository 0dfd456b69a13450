"""CI runs all of its tests: if one is skipped because a program is missing, the run fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = """\
import pytest

@pytest.mark.{marker}
@pytest.mark.skipif(True, reason="no such program here")
def test_that_takes_a_program() -> None: ...

def test_that_takes_nothing() -> None: ...
"""
FROM_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "NO_SKIPS_OF")  # which a test that it starts inherits
SECONDS = 100.0  # seconds are usual: torch is imported


def outcome(tmp_path: Path, marker: str, *options: str) -> tuple[int, str]:
    """Returns the result of a run of two tests, one of which is skipped."""
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(SKIPPED.format(marker=marker))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "-c", "/dev/null", *options],
        cwd=tmp_path, text=True, check=False, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("options", "marker", "status"),
    [
        (("--no-skips-of=browser",), "browser", 1),
        (("--no-skips-of=browser", "-n", "1"), "browser", 1),
        (("--no-skips-of=browser",), "gpu", 0),
        (("--no-skips",), "gpu", 1),
    ],
)
def test_a_run_fails_where_a_test_is_skipped_that_should_have_run(
    options: tuple[str, ...], marker: str, status: int, tmp_path: Path
) -> None:
    found, said = outcome(tmp_path, marker, *options)
    assert (found, "1 skipped that should have run" in said) == (status, bool(status)), said
    assert "1 passed, 1 skipped" in said


def test_ci_skips_no_test_of_deploy_and_none_in_a_browser_that_is_there() -> None:
    steps = re.findall(r"^ *make (.+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert {"test NO_SKIPS_OF=browser", "test-deploy"} <= {*steps}
    said = {
        step: subprocess.run(
            ["make", "--dry-run", *step.split()],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in FROM_MAKE},
            text=True,
            check=True,
            timeout=SECONDS,
            stdout=subprocess.PIPE,
        ).stdout
        for step in ("test NO_SKIPS_OF=browser", "test", "test-deploy")
    }
    assert " --no-skips-of=browser" in said["test NO_SKIPS_OF=browser"]
    assert "--no-skips" not in said["test"], "at a desk there may be no browser"
    assert " --no-skips tests/deploy " in said["test-deploy"]
