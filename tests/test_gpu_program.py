"""`make gpu` without a GPU: what it is made of does its work, so that only the hardware is new on the day."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import Report, codec, learning, swarm, wheels
from benchmarks.gpu import __main__ as program
from p2ptrain.learn.trainer import Trainer

ROOT = Path(__file__).parents[1]
IMPORTED = """
import json, re, sys
from importlib import metadata
sys.path[:0] = [".", "tests"]
import benchmarks.gpu.tests, benchmarks.gpu.swarm, benchmarks.gpu.codec, benchmarks.gpu.steps, benchmarks.gpu.learning
import pytest, golden_known, known, trainer_known

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
    assert all("==" in pin for pin in wheels.pinned())


def test_a_swarm_whose_roots_differ_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of the comparison: one trainer of four is off by the last bit of one weight."""
    swarm.main(report(tmp_path))
    found = json.loads((tmp_path / "part.json").read_text())
    assert len(found) == len(swarm.RECIPES) * len(swarm.PRECISIONS)
    assert all(each["roots_equal"] and each["rounds"] == swarm.ROUNDS_SMALL for each in found.values())
    assert any(each["training_differs"] for each in found.values())
    real, calls = Trainer.apply, itertools.count()

    def apply(self: Trainer, round_number: int, payloads: Any) -> None:
        real(self, round_number, payloads)
        if next(calls) % 4 == 3:
            self.recipe.agreed[7] = torch.nextafter(self.recipe.agreed[7], torch.tensor(9.0))

    monkeypatch.setattr(Trainer, "apply", apply)
    with pytest.raises(SystemExit, match="roots differ"):
        swarm.main(report(tmp_path))


def test_a_codec_that_gives_other_bits_on_the_device_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec.main(report(tmp_path))
    assert json.loads((tmp_path / "part.json").read_text())["roots_equal"]
    real, roots = codec.state_root, itertools.count()
    monkeypatch.setattr(codec, "state_root", lambda state: real(state + next(roots)))
    with pytest.raises(SystemExit, match="roots differ"):
        codec.main(report(tmp_path))


def test_a_part_that_breaks_or_hangs_leaves_the_others_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fails after its first figure, one never ends, one is well."""
    parts = {
        "breaks": "import sys; open(sys.argv[2], 'w').write('{\"first\": 1}'); sys.exit(3)",
        "hangs": "while True: pass",
        "works": "import sys; open(sys.argv[2], 'w').write('{\"all\": 2}')",
    }
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        name = command[2].rpartition(".")[2]
        return real([sys.executable, "-c", parts[name], *command[3:]], **options)

    monkeypatch.setattr(program.subprocess, "run", run)
    monkeypatch.setattr(program, "LIMITS", {"breaks": (5, 20), "hangs": (5, 2), "works": (5, 20)})
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--small", "--json", str(out)])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 1
    told = json.loads(out.read_text())
    assert {name: (part["status"], part["figures"]) for name, part in told["parts"].items()} == {
        "breaks": (3, {"first": 1}),
        "hangs": ("out of time", {}),
        "works": (0, {"all": 2}),
    }
    assert told["machine"]["device"] == "cpu" and told["small"]


def test_the_parts_fit_in_nine_minutes_and_a_tiny_run_in_three() -> None:
    """What is started last gets what the others leave, and at least half a minute of it."""
    whole, tiny = (sum(limits[small] for limits in program.LIMITS.values()) for small in (0, 1))
    assert whole + program.LEARNING_LEAST_SECONDS <= program.TOTAL_SECONDS < 540
    assert program.SMALL_SECONDS < 180
    assert tiny >= program.SMALL_SECONDS, "each has room on a busy machine: all together end in time anyway"


def test_without_a_device_it_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="make gpu SMALL=1"):
        program.main()


def test_text_for_learning_is_what_is_installed_and_ends_at_its_size() -> None:
    files = learning.text_files(10**6)
    sizes = [path.stat().st_size for path in files]
    assert 9 * 10**5 < sum(sizes) <= 10**6
    assert len({path.parts[-2] for path in files}) > 5
