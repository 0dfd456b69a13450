"""`make gpu` without a GPU: all its parts work, so that on the day only the hardware is new."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import Report, codec, model, node, programs, steps, swarm, wheels
from benchmarks.gpu import __main__ as launcher
from benchmarks.gpu.compiling import COMPILING, Compiled
from benchmarks.gpu.counted import Counting, counting
from benchmarks.gpu.tests import Results
from p2ptrain.exact.kernels import launches
from p2ptrain.net.transport import TransportError
from tests.gpu.test_on_a_device import chosen_cases
from tests.helpers.golden import BITS
from tests.helpers.trainer import Trainer

ROOT = Path(__file__).parents[2]
IMPORTED = """
import json, re, sys
from importlib import metadata
sys.path[:0] = ["."]
import benchmarks.gpu.tests, benchmarks.gpu.swarm, benchmarks.gpu.codec, benchmarks.gpu.steps, benchmarks.gpu.learning
import benchmarks.gpu.machine, benchmarks.gpu.model, benchmarks.gpu.programs, benchmarks.gpu.node
import pytest, xdist, execnet, tests.helpers.golden, tests.helpers.exact_numbers, tests.helpers.trainer

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

def used():
    return {canonical(each) for name in [*sys.modules] for each in owners.get(name.partition(".")[0], ())}

owners = metadata.packages_distributions()
there = closure(["torch", "numpy", "safetensors", "tokenizers"])
parts = used() - there

import importlib, pkgutil
for name in ("cli", "daemon", "node", "observe", "net"):
    package = importlib.import_module(f"p2ptrain.{name}")
    for each in pkgutil.walk_packages(package.__path__, f"p2ptrain.{name}."):
        importlib.import_module(each.name)
import multiaddr, netaddr  # a daemon does, once it runs
print(json.dumps([sorted(parts), sorted(used()), sorted(there)]))
"""


def report(tmp_path: Path, seconds: float = 100.0) -> Report:
    return Report(tmp_path / "part.json", "cpu", small=True, seconds=seconds)


@pytest.fixture(scope="module")
def imported() -> list[set[str]]:
    """Returns what the parts import, what a daemon imports as well, and what comes with torch and transformers."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, check=True, timeout=100, stdout=subprocess.PIPE)
    return [set(each) for each in json.loads(done.stdout)]


def test_the_wheels_are_all_that_is_imported_besides_torch_numpy_and_transformers(imported: list[set[str]]) -> None:
    """safetensors and tokenizers come with transformers."""
    parts, _, _ = imported
    assert parts - {"p2ptrain"} <= set(wheels.PACKAGES)
    of_others = {"packaging", "typing-extensions"}  # of torch and transformers, but maybe too old there
    assert set(wheels.PACKAGES) - of_others <= parts
    locked = (ROOT / "constraints.txt").read_text()
    names = (*wheels.PACKAGES, *wheels.NODE_PACKAGES, *wheels.NODE_SOURCES)
    assert len(names) == len(set(names))
    assert [each for each in names if f"\n{each}==" not in locked] == []


def test_the_wheels_are_also_all_that_a_daemon_imports(imported: list[set[str]]) -> None:
    _, whole, there = imported
    own = {*wheels.NODE_PACKAGES, *wheels.NODE_SOURCES}
    assert whole - there - {"p2ptrain"} <= own | set(wheels.PACKAGES)
    assert own <= whole


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


# ---------------------------------------------------------------------------------------------------
# The launcher


def sleeping(name: str, out: Path, device: str, seconds: float, small: bool) -> list[str]:
    rest = 60 if name == "hangs" else 0
    code = f"pathlib.Path({str(out)!r}).write_text(json.dumps(dict(one=1))); time.sleep({rest})"
    return [sys.executable, "-c", f"import json, pathlib, time; {code}"]


def test_parts_that_run_side_by_side_have_their_figures_also_where_one_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "command", sleeping)
    start = time.monotonic()
    found = launcher.run_parts(["hangs", "ends"], "cpu", 3.0, True, tmp_path)
    assert time.monotonic() - start < 30
    assert {name: (part["status"], part["figures"]) for name, part in found.items()} == {
        "hangs": ("out of time", {"one": 1}),
        "ends": (0, {"one": 1}),
    }


def test_each_part_has_its_share_of_less_time_and_the_last_one_keeps_its_own() -> None:
    steps_seconds, last = launcher.LIMITS["steps"][0], launcher.LIMITS[launcher.LAST][0]
    assert launcher.limit_of("steps", 500.0, False, None) == steps_seconds
    assert launcher.limit_of("steps", 250.0, False, None, 0.5) == steps_seconds / 2
    assert launcher.limit_of("steps", 100.0, False, None) == 100.0 - last
    assert launcher.limit_of(launcher.LAST, 77.0, False, None, 0.5) == 77.0
    usual = sum(limit for limit, _ in launcher.LIMITS.values()) - launcher.LIMITS["swarm"][0]  # beside the tests
    assert usual <= launcher.TOTAL_SECONDS


# ---------------------------------------------------------------------------------------------------
# Programs and tests


def test_compiled_programs_are_counted_apart_from_those_that_were_kept() -> None:
    counts = Compiled()
    counts.note(src=None, times=SimpleNamespace(total=2_500_000), cache_hit=False)
    counts.note(src=None, times=SimpleNamespace(total=9_000_000), cache_hit=True)
    assert counts.figures() == {"programs": 1, "seconds": 2.5, "kept": 1}


def test_the_time_of_each_test_and_of_its_compiler_is_told(tmp_path: Path) -> None:
    results = Results(report(tmp_path))
    for when, seconds in (("setup", 1.0), ("call", 2.0), ("teardown", 0.5)):
        told = {"location": ("", 0, "test_one"), "outcome": "passed", "user_properties": [(COMPILING, 1.25)]}
        results.pytest_runtest_logreport(SimpleNamespace(when=when, duration=seconds, **told))
    assert (results.seconds["test_one"], results.compiling, results.outcomes) == (3.5, 1.25, {"test_one": "passed"})


def test_a_card_gets_one_golden_case_of_each_recipe_rule_bits_and_kind_of_chunk() -> None:
    chosen = chosen_cases()
    assert len(chosen) == len(set(chosen)) < 40
    for name, bits in BITS.items():
        for outer, chunk, each in itertools.product(("normalised", "mean", "sign"), (64, 16), bits):
            k = 32 if chunk == 64 else 5
            wide = f" value_bits={each}" if each > 3 else ""
            assert f"{name} {outer} chunk={chunk} k={k} peers=7{wide}" in chosen
    assert {each for each in chosen if "peers=40" in each and "reach" in each}


def test_the_programs_of_all_rounds_that_are_timed_are_compiled_before(tmp_path: Path) -> None:
    jobs = programs.jobs_of(Report(tmp_path / "part.json", "cuda", small=False, seconds=1.0))
    for size in (steps.FIRST, *steps.LARGER):
        for recipe in {"distro", "local"} & set(size.methods):
            assert {job[2:] for job in jobs.values()} >= {(size.name, recipe, each) for each in size.contributions}


# ---------------------------------------------------------------------------------------------------
# Two nodes


def status(applied: int, tokens: int, seconds: float) -> dict[str, Any]:
    own = {"tokens_per_second": 9.6, "exchange_share": 0.1, "is_overlapping": True, "payload_bytes": 7, "loss": 3.0}
    same = {"same_model": {"verdict": "same"}, "complaints": [{"code": "crash_only"}]}
    return {"applied_round": applied, "tokens": tokens, "training_seconds": seconds, **own, **same}


def pair(*roots: str) -> Any:
    """Makes two nodes of which each has this root after the second round."""

    def one(root: str) -> Any:
        phases = {"train_seconds": 2.0, "collect_seconds": 0.25, "agree_seconds": 0.5, "apply_seconds": 0.25}
        rows = {
            n: {"root": root if n == 2 else "aa", "seconds": 3.0, "contributors": [1, 2], **phases} for n in (1, 2, 3)
        }
        return SimpleNamespace(status=status(3, 700, 9.0), records=lambda: rows)

    return SimpleNamespace(nodes=[one(root) for root in roots], applied=3)


def test_nodes_tell_their_share_of_training_and_what_a_round_took() -> None:
    found = node.figures_of(pair("bb", "bb"), [status(1, 100, 1.0)] * 2, 10.0)
    assert found["rounds"] == 2 and found["training_share"] == [0.8, 0.8] and found["tokens_per_second"] == 120
    assert found["round_seconds"] == [3.0] * 3 and found["exchange_seconds"] == [1.0] * 3
    assert found["roots_compared"] == 2 and found["roots_equal"]


def test_nodes_whose_roots_differ_are_found() -> None:
    assert not node.figures_of(pair("bb", "cc"), [status(1, 100, 1.0)] * 2, 10.0)["roots_equal"]
    nothing = node.figures_of(pair("bb", "bb"), [status(3, 100, 1.0)] * 2, 10.0)
    assert nothing["roots_compared"] == 0 and not nothing["roots_equal"]


def test_without_p2pd_nodes_are_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise TransportError("p2pd is missing")

    monkeypatch.setattr("p2ptrain.net.libp2p.process.find_binary", refuse)
    node.main(report(tmp_path))
    assert json.loads((tmp_path / "part.json").read_text()) == {"skipped": "p2pd is missing"}


def test_a_node_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    one = node.Node(tmp_path, "first", "cpu", "start", str(tmp_path / "missing.toml"))
    one.process.wait(timeout=60)
    with pytest.raises(node.NodeEndedError, match=r"missing\.toml"):
        one.look()


# ---------------------------------------------------------------------------------------------------
# A model of a card's time


def test_the_model_adds_what_launches_waits_bytes_and_numbers_take() -> None:
    counts = Counting()
    assert model.modelled_ms(counts) == {"host": 0.0, "card": 0.0, "bus": 0.0}
    counts.calls.update({"update": 2, "add": 4, "to host": 1})
    counts.programs["update"], counts.numbers["update"] = 2, 10**9
    counts.to_card, counts.moved = 54 * 10**6, 42 * 10**8
    seconds = 2 * model.PROGRAM_SECONDS + 4 * model.OPERATION_SECONDS + model.WAIT_SECONDS
    host = 1e3 * (seconds + counts.to_card / model.PAGEABLE_BYTES_A_SECOND)
    assert model.modelled_ms(counts) == pytest.approx({"host": host, "card": 23.0 + 1.0, "bus": 1.0}, abs=1e-3)


def test_programs_are_counted_with_the_numbers_before_them() -> None:
    on_card = torch.empty(4, device="meta")
    with counting() as counts:
        launches.launch("update", (3,), on_card, C=32, VOTE_LIMBS=1)
        launches.launch("select", (2,), on_card, AREA=4_096, K=8)
        launches.launch("count_strings", (5, 2), on_card, C=64, K=256, BITS=4)
        launches.launch("chunks", (7,), on_card, LANES=128)
        launches.launch("project", (0,), on_card, C=64)
    assert counts.numbers == {"update": 3_072, "select": 8_192, "count_strings": 2_560, "chunks": 896}
    assert counts.programs == dict.fromkeys(counts.numbers, 1) and counts.launches == 4


def test_a_round_at_124m_runs_each_program_that_the_model_has_a_time_for() -> None:
    stages = {recipe: model.modelled(recipe) for recipe in model.RECIPES}
    ran = {name for each in stages.values() for figures in each.values() for name in figures["programs"]}
    assert set(model.PICOSECONDS) <= ran
    assert {recipe: set(each) for recipe, each in stages.items()} == {
        recipe: set(measured) for recipe, measured in model.MEASURED.items()
    }
    assert all(
        0.001 < figures["ms"] < 100 for each in stages.values() for figures in each.values() if figures["launches"]
    )
