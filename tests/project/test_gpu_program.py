"""`make gpu` without a GPU: all its parts work, so that on the day only the hardware is new."""

from __future__ import annotations

import fcntl
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import Peak, Report, codec, learning, ratio, steps, swarm, wheels
from benchmarks.gpu import __main__ as program
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
    before = torch.get_float32_matmul_precision()
    swarm.main(report(tmp_path))
    assert torch.get_float32_matmul_precision() == before, "or what runs later in this process computes otherwise"
    found = json.loads((tmp_path / "part.json").read_text())
    assert len(found) == len(swarm.RECIPES) * len(swarm.PRECISIONS)
    assert all(each["roots_equal"] and each["rounds"] == swarm.ROUNDS_SMALL for each in found.values())
    assert not any(each["incomplete"] for each in found.values())
    assert all(each["training_differs"] for name, each in found.items() if "bf16" in name)
    real, calls = Trainer.apply, itertools.count()

    def apply(self: Trainer, round_number: int, payloads: Any, own: Any) -> None:
        real(self, round_number, payloads, own)
        if next(calls) % 4 == 3:
            self.replica.weights[7] = torch.nextafter(self.replica.weights[7], torch.tensor(9.0))

    monkeypatch.setattr(Trainer, "apply", apply)
    with pytest.raises(SystemExit, match="roots differ"):
        swarm.main(report(tmp_path))


def test_swarms_train_in_processes_of_their_own_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "workers", lambda _: 2)
    monkeypatch.setattr(swarm, "ROUNDS_SMALL", 1)
    swarm.main(report(tmp_path))
    found = json.loads((tmp_path / "part.json").read_text())
    assert len(found) == len(swarm.RECIPES) * len(swarm.PRECISIONS)
    assert all(each["roots_equal"] and each["rounds"] == 1 for each in found.values())


def test_a_swarm_that_shows_too_little_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="local, bf16: the time was over after 0 rounds"):
        swarm.main(report(tmp_path, seconds=0.0))
    found = json.loads((tmp_path / "part.json").read_text())
    assert all(each["incomplete"] for each in found.values())
    same = {"roots_equal": True, "incomplete": False, "training_differs": False}
    on_gpu = Report(tmp_path / "part.json", "cuda", small=False, seconds=1.0)
    assert "shown nothing" in str(swarm.fault_of(same, on_gpu))
    assert swarm.fault_of(same | {"training_differs": True}, on_gpu) is None


def test_a_codec_that_gives_other_bits_on_the_device_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec.main(report(tmp_path))
    found = json.loads((tmp_path / "part.json").read_text())
    assert found["roots_equal"] and all(found[f"1m, k={k}, roots_equal"] for k in codec.KS)
    real, roots = codec.state_root, itertools.count()
    monkeypatch.setattr(codec, "state_root", lambda state: real(state + next(roots)))
    with pytest.raises(SystemExit, match="roots differ"):
        codec.main(report(tmp_path))


def test_the_codec_leaves_out_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "LEAST_SECONDS", {"1m": 1_000.0})
    codec.main(report(tmp_path))
    found = json.loads((tmp_path / "part.json").read_text())
    assert list(found) == ["1m", "roots_equal"] and "left_out" in found["1m"]


def test_a_size_or_a_setting_that_fails_leaves_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first size runs out of memory, and the last setting has no compiler."""
    real = steps.setting

    def setting(part: Report, config: Any, shape: Any, what: str) -> Any:
        if what == "compile":
            raise subprocess.CalledProcessError(1, "gcc")
        return real(part, config, shape, what)

    def measure(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(steps, "setting", setting)
    monkeypatch.setattr(steps, "measure", measure)
    with pytest.raises(SystemExit, match="1m"):
        steps.main(report(tmp_path))
    found = json.loads((tmp_path / "part.json").read_text())
    assert found["1m"] == {"failed": "no memory"}
    assert "gcc" in found["1m, compile"]["failed"]
    assert found["1m, checkpointing"]["step_ms"] > 0


def test_without_a_peak_of_memory_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may not let a process reset its own."""
    peak = Peak(codec.CPU)
    block = torch.ones(10_000_000)
    assert peak.taken_mb is None or 39 < peak.taken_mb < 80
    del block

    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refused)
    assert Peak(codec.CPU).taken_mb is None
    assert ratio(3.0, None) is None


FOLDER_OF_TESTS = """
import pytest

def test_good():
    pass

def test_bad():
    assert 1 == 2

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass

def test_that_takes_the_process_down():
    import os
    os._exit(7)
"""
TESTS = """
import sys
from pathlib import Path
from benchmarks.gpu import Report, tests

tests.FOLDER = Path(sys.argv[1])
tests.main(Report(Path(sys.argv[2]), "cpu", small=True, seconds=10.0))
"""


@pytest.mark.parametrize("ends_early", [False, True])
def test_each_test_is_reported_as_soon_as_it_has_ended(tmp_path: Path, ends_early: bool) -> None:
    """Also what is skipped without being expected, and what precedes a crash."""
    folder, out = tmp_path / "tests", tmp_path / "part.json"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    tests = FOLDER_OF_TESTS if ends_early else FOLDER_OF_TESTS.rpartition("def ")[0]
    (folder / "test_some.py").write_text(tests)
    command = [sys.executable, "-c", TESTS, str(folder), str(out)]
    status = subprocess.run(command, cwd=ROOT, check=False, timeout=100, capture_output=True).returncode
    found = json.loads(out.read_text())
    assert status == (7 if ends_early else 1)
    assert found.pop("outcomes", None) == (None if ends_early else {"passed": 1, "failed": 1, "skipped": 1})
    assert "assert 1 == 2" in found.pop("test_bad")["failed"]
    assert found == {"test_good": "passed", "test_skipped": {"skipped": "Skipped: not here"}}


def launch(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, str], limits: dict[str, tuple[int, int]], *options: str
) -> int:
    """Runs the launcher with these lines of Python as parts; each gets its file's name in sys.argv[1]."""

    def command(name: str, out: Path, device: str, seconds: float, small: bool) -> list[str]:
        code = parts.get(name, "open(sys.argv[1], 'w').write('{\"device\": \"of a test\"}')")
        return [sys.executable, "-c", "import subprocess, sys, time\n" + code, str(out)]

    monkeypatch.setattr(program, "command", command)
    monkeypatch.setattr(program, "LIMITS", limits)
    monkeypatch.setattr(program, "LAST", list(limits)[-1])
    monkeypatch.setattr(sys, "argv", ["gpu", "--small", *options])
    with pytest.raises(SystemExit) as ended:
        program.main()
    return int(ended.value.code or 0)


def test_a_part_that_breaks_or_hangs_leaves_the_others_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fails after its first figure, one leaves half a file, one never ends, one is well."""
    parts = {
        "breaks": "open(sys.argv[1], 'w').write('{\"first\": 1}'); sys.exit(3)",
        "half": "open(sys.argv[1], 'w').write('{\"first\": ')",
        "hangs": "time.sleep(100)",
        "works": "open(sys.argv[1], 'w').write('{\"all\": 2}')",
    }
    out = tmp_path / "gpu.json"
    limits = {"breaks": (5, 20), "half": (5, 20), "hangs": (5, 2), "works": (5, 20)}
    assert launch(monkeypatch, parts, limits, "--json", str(out)) == 1
    told = json.loads(out.read_text())
    found = {name: (part["status"], part["figures"]) for name, part in told["parts"].items()}
    assert found.pop("half")[0].startswith("0, and its figures cannot be read")
    assert found == {"breaks": (3, {"first": 1}), "hangs": ("out of time", {}), "works": (0, {"all": 2})}
    assert told["machine"] == {"device": "of a test"} and told["small"]


def test_what_a_part_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part and its child hold a lock for as long as one of them lives."""
    lock, out = tmp_path / "lock", tmp_path / "gpu.json"
    code = "import fcntl, os; file = open({!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); os.fork(); time.sleep(60)"
    parts = {"hangs": code.format(str(lock))}
    start = time.monotonic()
    assert launch(monkeypatch, parts, {"hangs": (5, 3)}, "--only", "hangs", "--seconds", "3", "--json", str(out)) == 1
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert time.monotonic() - start < 40, "it was ended"


def test_one_part_alone_leaves_the_others_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the machine that it was taken on."""
    out, limits = tmp_path / "gpu.json", {"first": (5, 20), "second": (5, 20)}
    write = "open(sys.argv[1], 'w').write('{\"%s\": %s}')"
    parts = {"machine": write % ("gpu", 1), "first": write % ("a", 1), "second": write % ("b", 1)}
    assert launch(monkeypatch, parts, limits, "--json", str(out)) == 0
    parts = {"machine": write % ("gpu", 2), "second": write % ("b", 2)}
    assert launch(monkeypatch, parts, limits, "--json", str(out), "--only", "second") == 0
    told = json.loads(out.read_text())
    assert told["machine"] == {"gpu": 2}
    assert [(name, part["figures"]) for name, part in told["parts"].items()] == [
        ("first", {"a": 1}),
        ("second", {"b": 2}),
    ]
    assert told["parts"]["first"]["machine"] == {"gpu": 1} and "machine" not in told["parts"]["second"]
    out.write_text("{")
    monkeypatch.setattr(sys, "argv", ["gpu", "--small", "--json", str(out), "--only", "second"])
    with pytest.raises(SystemExit, match="no file of figures"):
        program.main()
    assert out.read_text() == "{"


def test_a_tiny_run_does_not_take_the_place_of_a_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch(monkeypatch, {}, {"only": (5, 20)}) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpu-small.json"]


def test_the_parts_fit_in_nine_minutes_and_a_tiny_run_in_three() -> None:
    """The last part gets the remaining time, but at least a minute."""
    whole, tiny = (sum(limits[small] for limits in program.LIMITS.values()) for small in (0, 1))
    assert whole <= program.TOTAL_SECONDS <= 500, "to import torch and to end a part takes seconds as well"
    assert program.SMALL_SECONDS < 180
    assert tiny >= program.SMALL_SECONDS, "each has room on a busy machine: all together end in time anyway"
    *others, last = program.LIMITS
    assert last == program.LAST and program.LIMITS[last][0] >= 60
    left = program.TOTAL_SECONDS
    for name in others:
        left -= program.limit_of(name, left, False, None)
    assert program.limit_of(last, left, False, None) >= program.LIMITS[last][0]
    left = 100.0  # the machine was slow to start: what is last has its time all the same
    assert program.limit_of("steps", left, False, None) == left - program.LIMITS[last][0]
    assert program.limit_of("codec", 500.0, False, ["codec", "steps"]) == 250.0, "alone, they share all of the time"


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
