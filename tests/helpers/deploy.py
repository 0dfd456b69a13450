"""Helpers for tests of deploy/: paths, parsers and optional tools."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TOOL_SECONDS = 100.0  # seconds are usual, of a busy machine


def tool(name: str, brings: str) -> str:
    """Returns a program's path, beside Python or on PATH; skips the test if it is not installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"takes {name}: {brings}")
    return found


def promtool() -> str:
    return tool("promtool", "apt-get install prometheus")


def run(*command: str | Path, cwd: Path | None = None, **more: Any) -> tuple[int, str]:
    """Runs a command; returns the exit status and all output."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, text=True, check=False, timeout=TOOL_SECONDS,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more,
    )  # fmt: skip
    return done.returncode, done.stdout


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def read_documents(path: Path) -> dict[str, Any]:
    """Reads Kubernetes objects by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}
