"""Runs commands in this process."""

from __future__ import annotations

import pytest

from tests.helpers.export import Command


@pytest.fixture
def p2ptrain(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands compute on the processor, with one thread."""
    monkeypatch.setenv("P2PTRAIN_DEVICE__NAME", "cpu")
    monkeypatch.setenv("P2PTRAIN_DEVICE__THREADS", "1")
