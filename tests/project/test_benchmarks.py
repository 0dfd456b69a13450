"""The benchmarks run, cover what they claim, and write readable reports."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.benchmarks import load
from tests.helpers.exact_numbers import weights


def test_the_codec_benchmark_measures_both_sides_and_reaches_its_sizes() -> None:
    result = load("codec").measure("1m", 32, 10, 1, 1)
    named = {"parameters", "k", "peers", "threads", "bits_per_coefficient", "payload_bytes", "ours_ms", "float_ms"}
    assert named | {"payload_ratio", "entropy_bits_per_coefficient"} <= set(result)
    assert (result["k"], result["peers"], result["threads"]) == (32, 10, 1)
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


def test_the_learning_benchmark_compares_every_recipe_with_every_rival_and_baseline() -> None:
    learning = load("learning")
    settings = learning.grid()
    assert len({setting.method for setting in settings}) == len(settings)
    systems = {setting.system for setting in settings}
    assert systems == {"full", "distro", "demo", "local", "demo32", *learning.RIVALS}
    assert {setting.inner for setting in settings if setting.system == "full"} == {"adamw", "muon"}
    assert {setting.peers for setting in settings} == {2, 3, 4, 8, 16, 32}
    assert {setting.slow for setting in settings} == {0, 3, 5}
    assert any(setting.delay for setting in settings)
    assert any(setting.fragments > 1 for setting in settings)
    assert any(setting.is_dense and setting.momentum != "0" for setting in settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"system": "full", "rate": "3/1000"},
        {"system": "full", "inner": "muon", "rate": "1/100"},
        {"system": "distro", "outer": "sign"},
        {"system": "local", "inner": "muon", "rate": "1/100", "k": 64, "local_steps": 5, "delay": 1},
        {"system": "local", "inner": "muon", "rate": "1/100", "k": 64, "local_steps": 5, "documents": "apart"},
        {"system": "local", "inner": "muon", "rate": "1/100", "local_steps": 5, "delay": 1, "between": 2},
        {"system": "local", "rate": "3/1000", "k": 4096, "transform": "none", "value_bits": 8, "fragments": 2},
        {"system": "local", "rate": "3/1000", "local_steps": 5, "k": 64, "momentum": "1/2", "outer_rate": "7/10"},
        {"system": "local", "inner": "muon", "rate": "1/100", "local_steps": 5, "speeds": (1, 1, 2, 3)},
        {"system": "local", "inner": "muon", "rate": "1/100", "local_steps": 10, "k": 64, "regions": 2},
        {"system": "local", "inner": "muon", "rate": "1/100", "local_steps": 5, "k": 64, "outer": "radial"},
        {"system": "lowrank", "inner": "muon", "rate": "1/100", "local_steps": 5},
        {"system": "demo32"},
        {"system": "diloco", "rate": "3/1000", "local_steps": 5},
        {"system": "diloco4", "rate": "3/1000", "local_steps": 5},
        {"system": "muloco", "inner": "muon", "rate": "1/100", "local_steps": 5},
        {"system": "sparseloco", "rate": "3/500", "local_steps": 5},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
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
    named = {"system", "outer", "k", "rate", "seed", "steps", "bytes_per_peer_step", "tuning_loss", "validation_loss"}
    assert named <= set(result)
    assert result["steps"] == 30
    assert result["curve"][0][1] == pytest.approx(math.log(256), abs=0.2)
    assert result["validation_loss"] < result["curve"][0][1] - 0.5
    learning.plot([result], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert result["method"] not in learning.table([result]), "its rate is no better than any other"
    assert result["method"] in learning.table([{**result, "rate": rate} for rate in ("1/7", "1/8", "1/9")])


def test_rates_are_tried_until_the_best_is_not_at_an_edge_and_what_is_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = load("learning")
    runs = learning.Runs(tmp_path / "runs.json", 1)
    done: list[str] = []

    def all_of(settings: Any) -> None:
        for each in settings:
            if runs._find(each) is None:
                done.append(each.rate)
                loss = abs(math.log2(float(Fraction(each.rate)) / 0.008))
                runs.results.append(dataclasses.asdict(each) | {"tuning_loss": loss, "method": each.method})

    monkeypatch.setattr(runs, "all", all_of)
    (winner,) = runs.tuned([learning.Setting("full", rate="1/1000")])
    assert winner["rate"] == "1/125"
    assert done == ["1/2000", "1/1000", "1/500", "1/250", "1/125", "2/125"]


@pytest.mark.parametrize("bits", [1, 2])
def test_levels_of_the_rivals_are_near_those_of_least_error(bits: int) -> None:
    rivals = load("rivals")
    uniform = weights(3, (1, 4096))  # between -1/2 and 1/2
    drawn = uniform.abs() if bits == 1 else (2 * uniform).clamp(-0.999, 0.999).erfinv()
    found = rivals.levels(drawn, bits)
    assert len(found.unique()) == 2**bits
    error = float((found - drawn).square().mean() / (drawn - drawn.mean()).square().mean())
    assert error < (0.26 if bits == 1 else 0.13), "a quarter of a uniform's variance, 0.12 of a normal's"


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
