"""Commands, run in the process of the test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from p2ptrain import cli


def p2ptrain(capsys: pytest.CaptureFixture[str], *arguments: str | Path | int) -> tuple[int, str, str]:
    """Runs a command in this process; returns its exit status, stdout and stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["p2ptrain", *map(str, arguments)])
        status = cli.main()
    captured = capsys.readouterr()
    return status, captured.out, captured.err
