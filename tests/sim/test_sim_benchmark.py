"""The agreement benchmark runs, and its formula is the one that its figures follow."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "agreement.py"


@pytest.fixture(scope="module")
def agreement() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agreement_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_runs_and_is_written_down(
    agreement: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    parts = ["speed", "growth", "loss", "straggler"]
    monkeypatch.setattr(sys, "argv", ["agreement.py", "--quick", "--json", str(out), "--plot", str(png)])
    agreement.main()
    found = json.loads(out.read_text())
    assert list(found) == parts
    assert [row["nodes"] for row in found["speed"]] == [20, 40]
    assert all(row["rounds"] >= 2 and row["messages"] > 10_000 for row in found["speed"])
    assert [row["nodes"] for row in found["growth"]["rows"]] == [4, 8, 16, 32]
    assert found["growth"]["fits"]["bytes"]["error"] < 0.2
    assert all(found[part]["seeds"] == 1 and found[part]["least"] > 0.9 for part in ("loss", "straggler"))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "bytes = " in capsys.readouterr().out


def test_the_fit_finds_the_formula_behind_the_figures(agreement: ModuleType) -> None:
    sizes = [(4, 4), (16, 16), (64, 64), (256, 256), (1_000, 256)]
    rows = [{"nodes": n, "members": m, "bytes": 300 * n + 200 * m + 16 * n * m} for n, m in sizes]
    terms = {"N": lambda n, m: n, "M": lambda n, m: m, "N M": lambda n, m: n * m}
    found = agreement.fit(rows, "bytes", terms)
    assert found["factors"] == pytest.approx({"N": 300, "M": 200, "N M": 16})
    assert found["error"] == pytest.approx(0.0, abs=1e-9)


def test_a_part_that_is_not_there_is_refused(agreement: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["agreement.py", "sped"])
    with pytest.raises(SystemExit) as caught:
        agreement.main()
    assert caught.value.code == 2
