"""The wheel alone, in an empty environment, gives everything that a checkout does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain import __version__

ROOT = Path(__file__).parents[2]


def done(directory: Path, *command: str | Path) -> str:
    """Runs a command outside of the checkout, and returns its output."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    own |= {"HOME": str(directory), "OMP_NUM_THREADS": "1", "P2PTRAIN_NETWORK__NAT": "false"}
    ended = subprocess.run(command, cwd=directory, env=own, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout[-3_000:] + ended.stderr[-3_000:]
    return ended.stdout


@pytest.mark.timeout(900)
def test_pip_alone_gives_commands_examples_dashboard_and_demo(tmp_path: Path) -> None:
    locked = tmp_path / "versions.txt"  # without hashes, which take a newer pip than an empty environment has
    locked.write_text("\n".join(re.findall(r"^[\w.-]+==[^\s;]+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)))
    here = Path(sys.executable).parent
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path)
    subprocess.run([here / "pip", "wheel", *options, ROOT], check=True)
    (wheel,) = tmp_path.glob("p2ptrain-*.whl")
    done(tmp_path, sys.executable, "-m", "venv", tmp_path / "empty")
    bin_ = tmp_path / "empty" / "bin"
    # As `make setup` does: torch from PIP_FIND_LINKS where there is one, then everything at the versions of the lock.
    given = ("--quiet", "--disable-pip-version-check", "--constraint", locked)
    torch = [bin_ / "pip", "install", *given, "--no-index", "--no-deps", "torch"]
    subprocess.run(torch, check=False, stderr=subprocess.DEVNULL)
    done(tmp_path, bin_ / "pip", "install", *given, wheel)
    p2ptrain = bin_ / "p2ptrain"
    assert done(tmp_path, p2ptrain, "--version").split() == ["p2ptrain", __version__]
    run = tmp_path / "tiny.toml"
    run.write_text(done(tmp_path, p2ptrain, "config", "example", "tiny"))
    assert run.read_bytes() == (ROOT / "examples" / "tiny.toml").read_bytes()
    assert "OK, a run" in done(tmp_path, p2ptrain, "config", "check", run)
    assets = Path(
        done(tmp_path, bin_ / "python", "-c", "from p2ptrain.observe.app import ASSETS; print(ASSETS)").strip()
    )
    assert assets.is_relative_to(tmp_path / "empty"), "not the checkout's"
    assert (assets / "index.html").exists()
    done(tmp_path, p2ptrain, "demo", "--nodes", "2", "--rounds", "8")
