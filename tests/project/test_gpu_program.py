"""`make gpu` without a GPU: all its parts work, so that on the day only the hardware is new."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import Report, codec, swarm, wheels
from tests.helpers.trainer import Trainer

ROOT = Path(__file__).parents[2]
IMPORTED = """
import json, re, sys
from importlib import metadata
sys.path[:0] = ["."]
import benchmarks.gpu.tests, benchmarks.gpu.swarm, benchmarks.gpu.codec, benchmarks.gpu.steps, benchmarks.gpu.learning
import benchmarks.gpu.machine
import pytest, tests.helpers.golden, tests.helpers.exact_numbers, tests.helpers.trainer

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def closure(names):
    seen, todo = set(), list(names)
    while todo:
        name = canonical(todo.pop())
        if name not in seen:
            seen.add(name)
            try:
                needed = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            todo += [re.match(r"[A-Za-z0-9._-]+", each)[0] for each in needed if "extra ==" not in each]
    return seen

owners = metadata.packages_distributions()
used = {canonical(each) for name in [*sys.modules] for each in owners.get(name.partition(".")[0], ())}
print(json.dumps(sorted(used - closure(["torch", "numpy", "safetensors", "tokenizers"]))))
"""


def report(tmp_path: Path, seconds: float = 100.0) -> Report:
    return Report(tmp_path / "part.json", "cpu", small=True, seconds=seconds)


def test_the_wheels_are_all_that_is_imported_besides_torch_numpy_and_transformers() -> None:
    """safetensors and tokenizers come with transformers."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, check=True, timeout=100, stdout=subprocess.PIPE)
    imported = set(json.loads(done.stdout)) - {"p2ptrain"}
    assert imported <= set(wheels.PACKAGES)
    assert "hivemind" not in wheels.PACKAGES
    of_others = {"packaging", "typing-extensions"}  # of torch and transformers, but maybe too old there
    assert set(wheels.PACKAGES) - of_others <= imported
    locked = (ROOT / "constraints.txt").read_text()
    assert [each for each in wheels.PACKAGES if f"\n{each}==" not in locked] == []


def test_a_swarm_whose_roots_differ_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the power of the comparison: one of four trainers is off by the last bit of one weight."""
    monkeypatch.setattr(swarm, "ROUNDS_SMALL", 1)
    with monkeypatch.context() as patch:
        patch.setattr(swarm, "workers", lambda _: 2)  # processes of their own, as on a GPU
        swarm.main(report(tmp_path))
    found = json.loads((tmp_path / "part.json").read_text())
    assert len(found) == len(swarm.RECIPES) * len(swarm.PRECISIONS)
    assert all(each["roots_equal"] and each["rounds"] == 1 for each in found.values())
    real, calls = Trainer.apply, itertools.count()

    def apply(self: Trainer, round_number: int, payloads: Any, own: Any) -> None:
        real(self, round_number, payloads, own)
        if next(calls) % 4 == 3:
            self.replica.weights[7] = torch.nextafter(self.replica.weights[7], torch.tensor(9.0))

    monkeypatch.setattr(Trainer, "apply", apply)
    with pytest.raises(SystemExit, match="roots differ"):
        swarm.main(report(tmp_path))


def test_a_swarm_that_shows_too_little_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="local, bf16: the time was over after 0 rounds"):
        swarm.main(report(tmp_path, seconds=0.0))
    found = json.loads((tmp_path / "part.json").read_text())
    assert all(each["incomplete"] for each in found.values())
    same = {"roots_equal": True, "incomplete": False, "training_differs": False}
    on_gpu = Report(tmp_path / "part.json", "cuda", small=False, seconds=1.0)
    assert "shown nothing" in str(swarm.fault_of(same, on_gpu))
    assert swarm.fault_of(same | {"training_differs": True}, on_gpu) is None


@pytest.mark.timeout(300)
def test_a_codec_that_gives_other_bits_on_the_device_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "KS", (32,))
    codec.main(report(tmp_path))
    found = json.loads((tmp_path / "part.json").read_text())
    assert found["roots_equal"] and all(found[f"1m, k={k}, roots_equal"] for k in codec.KS)
    real, roots = codec.state_root, itertools.count()
    monkeypatch.setattr(codec, "state_root", lambda state: real(state + next(roots)))
    with pytest.raises(SystemExit, match="roots differ"):
        codec.main(report(tmp_path))
