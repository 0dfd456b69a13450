"""What the tests of the audit share: a history that was made once, and a copy of a node's directory for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from p2ptrain.config import RunConfig
from tests.helpers.audit import make_history


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[Path]]:
    return make_history(tmp_path_factory.mktemp("history"))


@pytest.fixture
def run(history: tuple[RunConfig, list[Path]]) -> RunConfig:
    return history[0]


@pytest.fixture
def directory(history: tuple[RunConfig, list[Path]], tmp_path: Path) -> Path:
    """Copies the first node's directory."""
    return shutil.copytree(history[1][0], tmp_path / "runs" / history[1][0].name)
