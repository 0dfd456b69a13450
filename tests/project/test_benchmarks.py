"""The benchmarks run, and write readable reports."""

from __future__ import annotations

import ast
import asyncio
import importlib
import math
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.benchmarks import load
from tests.helpers.docs import ROOT


def test_the_codec_benchmark_measures_both_sides_and_reaches_its_sizes() -> None:
    result = load("codec").measure("1m", 32, 10, 1, 1)
    assert 9.318 < result["bits_per_coefficient"] <= 9.9
    assert result["payload_ratio"] >= 9
    assert all(result[name] > 0 for name in ("ours_ms", "float_ms", "matmul_ms", "time_ratio"))


def test_our_decode_of_its_own_payload_is_the_float_demos_within_rounding() -> None:
    """Both sides do the same work: our votes decode to what DeMo would add for one sender."""
    codec = load("codec")
    shapes = [(128, 192)]
    gradient = codec.torch.randn(shapes[0], generator=codec.torch.Generator().manual_seed(1))
    ours, floats = codec.Ours(shapes, 32), codec.FloatDeMo(shapes, 32, matmul=False)
    contribution = ours.encode([gradient])
    ((indices, values),) = floats.encode([gradient])
    for chunk in range(6):
        theirs = dict(zip(indices[chunk].tolist(), values[chunk].sign().tolist(), strict=True))
        mine = dict(zip(contribution.indices[chunk].tolist(), contribution.values[chunk].tolist(), strict=True))
        assert len(theirs.items() & mine.items()) >= 31  # the weakest may be chosen otherwise
    one, other = codec.torch.zeros(shapes[0]), codec.torch.zeros(shapes[0])
    ours.aggregate([contribution], [one])
    floats.decode([[(indices, values.sign())]], [other])
    assert (one.sign() == other.sign()).float().mean() > 0.95


@pytest.mark.parametrize(
    "changes",
    [
        {"system": "full", "rate": "3/1000"},
        {"system": "distro", "outer": "sign"},
        {"system": "local", "inner": "muon", "rate": "1/100", "k": 64, "local_steps": 5, "delay": 1},
        {"system": "local", "inner": "muon", "rate": "1/100", "local_steps": 5, "speeds": (1, 1, 2, 3)},
        {"system": "lowrank", "inner": "muon", "rate": "1/100", "local_steps": 5},
        {"system": "demo32"},
        {"system": "muloco", "inner": "muon", "rate": "1/100", "local_steps": 5},
        {"system": "sparseloco", "rate": "3/500", "local_steps": 5},
    ],
    ids=lambda changes: changes["system"],
)
def test_a_simulated_run_learns_and_reports(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = load("learning")
    monkeypatch.setattr(learning, "CACHE", tmp_path / "corpus")
    size = learning.SIZES["quick"]
    monkeypatch.setitem(learning.SIZES, "quick", replace(size, steps=30))
    learning.prepare_corpus(bool(changes.get("documents")))
    result = learning.run(learning.Setting(**changes))
    assert result["steps"] == 30
    assert result["curve"][0][1] == pytest.approx(math.log(256), abs=0.2)
    assert result["validation_loss"] < result["curve"][0][1] - 0.5
    learning.plot([result], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert result["method"] in learning.table([{**result, "rate": rate} for rate in ("1/7", "1/8", "1/9")])


def test_liars_who_praise_one_another_count_for_longer_than_those_who_audit_as_others_do() -> None:
    audits = load("audits")
    measured, praised = (
        max(audits.rounds_counted("batch 8, later", "own less five means", 0, praises=praises))
        for praises in (False, True)
    )
    assert praised > 2 * measured


def test_the_cost_of_audits_is_a_share_of_all_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    load("audits").weigh(2)
    nobody, data, three, _ = capsys.readouterr().out.splitlines()
    assert nobody.startswith("0 liars of 10, ")
    assert three.startswith("3 liars of 10, ")
    assert re.search(r" [1-9]\d* audits, 0\.0\d+% of [\d.,]+ MB heard \(reports [1-9]", nobody)
    assert re.search(r"data that auditors fetch, a sequence a piece: [1-9][\d.]* MiB a node and round", data)


def test_the_checkpoint_benchmark_writes_and_copies_the_same_bytes(tmp_path: Path) -> None:
    benchmark = load("checkpoint")
    result = benchmark.turn(benchmark.a_trainer("1m", tmp_path), tmp_path, 1)
    assert set(result) == {"bytes", "copy", "pause", "write", "cp"}
    assert all(value > 0 for value in result.values())
    assert result["bytes"] > 3 * 4 * 1_000_000  # weights twice, and the residual
    assert not list((tmp_path / "checkpoints").iterdir())  # turns do not fill the disk


def test_the_benchmark_of_copies_finds_each_payload_hashed_and_unpacked_once(tmp_path: Path) -> None:
    """A peer hashes a payload once and unpacks it once, and so does its author."""
    copies = load("copies")
    found = asyncio.run(copies.a_round("1m", tmp_path, 2))
    assert [found[f"{name} hashed"] for name in ("author", "peer")] == [1.0, 1.0]
    assert found["unpacked"] == 1.0


PROGRAMS = [
    path for path in sorted((ROOT / "benchmarks").rglob("*.py")) if "tests." in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_what_a_benchmark_takes_from_the_tests_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tests":
            found = importlib.import_module(node.module or "")
            missing = [each.name for each in node.names if not hasattr(found, each.name)]
            assert [name for name in missing if find_spec(f"{node.module}.{name}") is None] == []
