"""`p2ptrain doctor --measure`: its figures, and what it says where it cannot have them."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.config import MODEL_PRESETS, NodeConfig
from p2ptrain.doctor import examine, measure
from p2ptrain.doctor.findings import Diagnosis
from p2ptrain.doctor.measure import Fit, RoundCost, Speed, measured, summary
from p2ptrain.errors import MemoryShortError
from p2ptrain.train import memory
from tests.helpers.cli import p2ptrain

CPU = NodeConfig.model_validate({"device": {"name": "cpu", "threads": 1}})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("P2PTRAIN_DEVICE__NAME", "cpu")
    monkeypatch.setenv("P2PTRAIN_DEVICE__THREADS", "1")
    monkeypatch.setattr(measure, "MODELS", {"cpu": ("1m",)})
    monkeypatch.setattr(measure, "MATRIX_SIDES", {"cpu": 64})
    monkeypatch.setattr(measure, "STEPS_SECONDS", 0.0)
    monkeypatch.setattr(measure, "TURNS", 1)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


SECONDS = {"train": 2.0, "contribute": 0.25, "check": 0.01, "apply": 0.5, "root": 0.17}


class FakeLearner:
    """A learner and a replica that take as long as `SECONDS` says, by a clock that nothing else moves."""

    clock = 0.0

    def __init__(self, run: Any, device: object, data: object) -> None:
        self.run, self.device, self.replica = run, torch.device("cpu"), self
        self.settled: list[int] = []

    def _take(self, what: str) -> None:
        FakeLearner.clock += SECONDS[what] * (1 if self.settled else 50)  # the first round compiles

    def train(self, share: Any, on_step: Any) -> list[Any]:
        assert share.round == len(self.settled) + 1
        self._take("train")
        return [SimpleNamespace(tokens=700)] * 4

    def contribute(self, number: int) -> bytes:
        self._take("contribute")
        return b"payload"

    def check(self, payload: bytes) -> None:
        self._take("check")

    def apply(self, number: int, payloads: list[bytes]) -> Any:
        assert payloads == [b"payload"] * 8
        self._take("apply")
        return SimpleNamespace(uncounted=lambda payload: None)

    def settle(self, number: int, uncounted: object) -> None:
        self.settled.append(number)

    def root(self) -> bytes:
        assert self.settled
        FakeLearner.clock += SECONDS["root"]
        return b""


def test_a_round_costs_what_it_takes_besides_its_steps_and_the_first_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "Learner", FakeLearner)
    monkeypatch.setattr(measure, "perf_counter", lambda: FakeLearner.clock)
    monkeypatch.setattr(measure, "_speeds", lambda device: iter(()))
    found = list(measured(CPU))
    parts = {"contribute and pack": 250.0, "check 8": 80.0, "apply 8": 500.0, "root": 170.0}
    costs = [each for each in found if isinstance(each, RoundCost)]
    for cost, (recipe, steps) in zip(costs, (("distro", 1), ("local", 10)), strict=True):
        assert cost.parts_ms == pytest.approx(parts)
        assert (cost.model, cost.recipe, cost.steps) == ("1m", recipe, steps)
        assert (cost.tokens_per_second, cost.step_ms, cost.share) == pytest.approx((1_400, 500, 2 / steps))
    assert summary(found).startswith(
        "This machine trains a model of size 1m on a billion tokens in 198.4 hours; a swarm"
    )
    assert "adds 20.0% to that" in summary(found)


def test_the_command_says_of_each_figure_whether_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = p2ptrain(capsys, "doctor", "--measure")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    begins = ["good", *["estimated"] * 2 * len(MODEL_PRESETS), *["measured", "to"] * 2, "measured", "measured", "This"]
    assert [line.split()[0] for line in lines] == begins
    assert [line.split(maxsplit=4)[3] for line in lines if line.startswith("estimated")][:2] == ["distro", "local"]
    assert lines[-4].split("in ms: ")[1].count(" + ") == 3, "contribution, checks, apply and root"
    assert "It has memory for sizes up to " in lines[-1]


def test_programs_get_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = p2ptrain(capsys, "doctor", "--measure", "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert (told["version"], told["device"]["level"]) == (1, "good")
    assert [each["what"] for each in told["measured"]["speeds"]] == ["matrix product, bf16", "matrix product, fp32"]
    assert [(each["model"], each["recipe"]) for each in told["measured"]["rounds"]] == [
        ("1m", "distro"),
        ("1m", "local"),
    ]
    assert [each["model"] for each in told["estimated"]] == [name for name in MODEL_PRESETS for _ in range(2)]
    for each in told["measured"]["rounds"]:
        assert min(each["tokens_per_second"], each["step_ms"], each["share"], *each["parts_ms"].values()) > 0


def test_the_settings_that_make_a_model_fit_a_card_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    card, total = torch.device("cuda:0"), 24 * 10**9
    monkeypatch.setattr(measure, "open_device", lambda config: (card, True))
    monkeypatch.setattr(memory, "find_device", lambda config: (card, True))
    monkeypatch.setattr(memory, "memory_bytes", lambda: 64 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total, total))
    found = list(itertools.islice(measured(CPU), 2 * len(MODEL_PRESETS)))
    fits = {(each.model, each.recipe): each for each in found if isinstance(each, Fit)}
    assert fits["100m", "local"].settings == ("sequences_per_pass = 8",)
    large = fits["1b", "distro"]
    assert (large.is_possible, large.settings, large.total_bytes) == (True, ("sequences_per_pass = 1",), total)
    assert large.needed_bytes <= total
    assert large.line().endswith(" of 24.0 GB, sequences_per_pass = 1")
    assert not fits["1b", "local"].is_possible
    assert fits["1b", "local"].line().endswith("not in 24.0 GB")


@pytest.mark.parametrize("option", [("--bootstrap", "x"), ("--data-dir", "x"), ("--listen", "/ip4/0.0.0.0/tcp/0")])
def test_options_of_the_other_checks_are_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = p2ptrain(capsys, "doctor", "--measure", *option)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_a_device_that_cannot_work_is_not_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Diagnosis("device", "failed", "cuda:1 not found", "Set device.name")
    monkeypatch.setattr(examine, "look_at_device", lambda config: [broken])
    status, out, err = p2ptrain(capsys, "doctor", "--measure")
    assert (status, err) == (1, "")
    assert out.splitlines()[0].split(maxsplit=2) == ["failed", "device", "cuda:1 not found"]
    assert len(out.splitlines()) == 2
    assert json.loads(p2ptrain(capsys, "doctor", "--measure", "--json")[1])["device"]["level"] == "failed"


def test_a_ctrl_c_leaves_what_was_found_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: object) -> Iterator[Speed]:
        yield Speed("copy to the card", 50.0, "GB/s")
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measured", interrupted)
    status, out, err = p2ptrain(capsys, "doctor", "--measure")
    assert (status, err) == (130, "interrupted before all was measured\n")
    assert out.splitlines()[1].split() == ["measured", "copy", "to", "the", "card", "50.000", "GB/s"]
    assert p2ptrain(capsys, "doctor", "--measure", "--json") == (130, "", err)


def test_memory_that_is_short_is_a_line_and_the_estimates_stand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = memory.demands_of
    monkeypatch.setattr(measure, "demands_of", lambda *given: [replace(each, free=10**6) for each in real(*given)])
    status, out, err = p2ptrain(capsys, "doctor", "--measure")
    assert (status, len(out.splitlines())) == (1, 1 + 2 * len(MODEL_PRESETS))
    assert err.startswith("size 1m needs ") and err.endswith("; 1 MB are free. Close other programs\n")


def test_the_largest_model_is_measured_for_which_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MODELS", {"cpu": ("100m", "1m")})
    monkeypatch.setattr(measure, "_cost", lambda learner: learner.run.model.preset)
    monkeypatch.setattr(measure, "_speeds", lambda device: iter(()))
    real = memory.demands_of
    monkeypatch.setattr(measure, "demands_of", lambda *given: [replace(each, free=10**9) for each in real(*given)])
    found: list[Any] = list(measured(CPU))
    assert found[-2:] == ["1m", "1m"]


def test_memory_that_ends_while_it_measures_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "Learner", full)
    with pytest.raises(MemoryShortError, match=r"out of memory while measuring: .* are free"):
        list(measured(CPU))


def test_a_card_that_fails_while_it_measures_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*given: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nand more")

    monkeypatch.setattr(measure, "Learner", lost)
    status, _, err = p2ptrain(capsys, "doctor", "--measure")
    assert (status, len(err.splitlines())) == (1, 1)
    assert err.startswith("the graphics card has failed: CUDA error: unspecified launch failure. ")


def test_a_place_for_files_that_takes_none_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    status, _, err = p2ptrain(capsys, "doctor", "--measure")
    assert (status, len(err.splitlines())) == (1, 1)
    assert err.startswith("the text to train on cannot be written: ") and "TMPDIR" in err
