"""The agreement benchmark runs, and a formula fits its figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.benchmarks import load


def test_every_part_runs_and_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agreement = load("agreement")
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    parts = ["speed", "growth", "loss", "payload", "straggler"]
    monkeypatch.setattr(sys, "argv", ["agreement.py", "--quick", "--json", str(out), "--plot", str(png)])
    agreement.main()
    found = json.loads(out.read_text())
    assert list(found) == parts
    assert [row["nodes"] for row in found["speed"]] == [20, 40]
    assert all(row["rounds"] >= 2 and row["messages"] > 10_000 for row in found["speed"])
    assert [row["nodes"] for row in found["growth"]["rows"]] == [4, 8, 16, 32]
    assert found["growth"]["fits"]["bytes"]["error"] < 0.2
    assert all(found[part]["seeds"] == 1 and found[part]["least"] > 0.9 for part in ("loss", "straggler"))
    assert 0.3 < found["payload"]["least"] < 0.9, "payloads take their time on a line"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "bytes = " in capsys.readouterr().out
