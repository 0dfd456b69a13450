"""The doctor's checks of the machine and the disk, passing and failing, and its output."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import DeviceConfig, NodeConfig, RunConfig, StorageConfig, TrackingConfig
from p2ptrain.doctor import disk, examine, machine
from p2ptrain.doctor.findings import Diagnosis, can_work, json_of, text_of, verdict_of, within
from p2ptrain.doctor.machine import Gpu, Hardware
from p2ptrain.errors import DataError, DeviceError
from p2ptrain.identity import Identity
from p2ptrain.models import hf_model
from p2ptrain.net.transport import TransportError
from p2ptrain.node.home import Home
from p2ptrain.node.limits import disk_demand
from p2ptrain.store.lock import LOCK_NAME, Lock
from p2ptrain.system import OPEN_FILES
from p2ptrain.train.memory import DiskDemand, MemoryDemand, need_of
from tests.helpers import hf_models
from tests.helpers.cli import p2ptrain

RUN = RunConfig.model_validate({"name": "test", "recipe": {"name": "local"}})
NEED = need_of(RUN)
H200 = Gpu("NVIDIA H200", 150 * 10**9, is_bf16=True)
AMD = Gpu("AMD Radeon RX 7900 XTX", 24 * 10**9, is_bf16=True)
OLD = Gpu("GTX 1060", 6 * 10**9, is_bf16=False)


def fine(name: str) -> None:
    pass


def wrong(name: str) -> None:
    raise DeviceError(f"{name} does not multiply matrices exactly", fix="Turn TF32 off")


def broken(name: str) -> None:
    raise RuntimeError("CUDA error: no kernel image\nand more")


def level_of(found: Diagnosis) -> tuple[str, bool]:
    """Returns the level; checks that there is advice exactly if something is wrong."""
    return found.level, bool(found.fix)


GOOD, WARNING, FAILED = ("good", False), ("warning", True), ("failed", True)


# ---------------------------------------------------------------------------------------------------
# Answers and deadlines


def test_a_check_that_hangs_is_given_up_at_its_deadline() -> None:
    released = threading.Event()

    def hang() -> list[Diagnosis]:
        released.wait(60)
        return [Diagnosis("disk", "good", "at last")]

    (found,) = within("disk", hang, 0.05)
    assert (found.what, found.level, found.result) == ("disk", "failed", "no answer within 0 s")
    assert found.fix
    assert [each.level for each in within("disk", hang, 0.05, "warning")] == ["warning"]
    released.set()
    assert within("disk", hang, 60) == [Diagnosis("disk", "good", "at last")]


def test_what_is_found_is_told_line_by_line_with_what_to_do() -> None:
    found = [Diagnosis("python", "good", "3.11.7"), Diagnosis("clock", "warning", "2 s\x1b[2J behind", "Set it")]
    lines = "\n".join(map(text_of, found)).splitlines()
    assert lines[0].split() == ["good", "python", "3.11.7"]
    assert lines[1].split(maxsplit=2) == ["warning", "clock", "2 s?[2J behind"]
    assert lines[2].strip() == "Set it"
    assert len(lines) == 3
    assert verdict_of(found) == "a node can work here: 0 failed, 1 warnings"
    assert can_work(found)
    found.append(Diagnosis("disk", "failed", "full", "Make room"))
    assert verdict_of(found) == "a node cannot work here: 1 failed, 1 warnings"
    told = json_of(found)
    assert (told["version"], told["can_work"]) == (1, False)
    assert told["checks"][1] == {"what": "clock", "level": "warning", "result": "2 s\x1b[2J behind", "fix": "Set it"}


# ---------------------------------------------------------------------------------------------------
# The machine


@pytest.mark.parametrize(
    ("version", "platform", "expected"),
    [
        ((3, 10, 9), "linux", FAILED),
        ((3, 11, 0), "linux", GOOD),
        ((3, 14, 9), "linux", GOOD),
        ((3, 15, 0), "linux", FAILED),
        ((3, 10, 9), "darwin", FAILED),
        ((3, 12, 1), "darwin", WARNING),  # hivemind's wheel has p2pd for it, but no node has run there
        ((3, 12, 1), "win32", FAILED),
    ],
)
def test_python_and_its_system_are_ones_that_hivemind_has_a_wheel_for(
    version: tuple[int, ...], platform: str, expected: tuple[str, bool]
) -> None:
    assert level_of(machine.check_python(version, platform)) == expected


@pytest.mark.parametrize(
    ("version", "expected"), [("", FAILED), ("2.5.1", FAILED), ("2.6.0+cu124", GOOD), ("2.13.0", GOOD), ("3.0", GOOD)]
)
def test_torch_is_there_and_not_too_old(version: str, expected: tuple[str, bool]) -> None:
    assert level_of(machine.check_torch(version)) == expected


@pytest.mark.parametrize(
    ("config", "hardware", "attempt", "level", "says"),
    [
        ({}, Hardware("", ""), fine, "good", "cpu: there is no NVIDIA driver"),
        ({}, Hardware("13.0", "580.1", (H200,)), fine, "good", "bf16"),
        ({}, Hardware("13.0", "580.1", (OLD,)), fine, "good", "it trains in fp32"),
        ({"autocast": "bf16"}, Hardware("13.0", "580.1", (OLD,)), fine, "warning", "without bf16"),
        ({}, Hardware("", "580.1"), fine, "warning", "torch was installed without CUDA"),
        ({}, Hardware("13.0", "470.1"), fine, "warning", "torch cannot use it"),
        ({"name": "cpu"}, Hardware("", "580.1"), fine, "good", "cpu"),
        ({"name": "cuda:1"}, Hardware("13.0", "580.1", (H200,)), fine, "failed", "cuda:1 not found: 1 CUDA"),
        ({"name": "cuda"}, Hardware("", ""), fine, "failed", "driver none"),
        ({}, Hardware("", ""), wrong, "failed", "exactly"),
        ({}, Hardware("13.0", "580.1", (H200,)), wrong, "failed", "exactly"),
        ({}, Hardware("13.0", "580.1", (H200,)), broken, "failed", "no kernel image"),
        (
            {},
            Hardware("13.0", "470.1", trouble="too old"),
            fine,
            "warning",
            "cpu; torch cannot use the graphics card: too",
        ),
        ({"name": "cuda"}, Hardware("13.0", "470.1", trouble="too old"), fine, "failed", "driver 470.1; too old"),
        ({"name": "cpu"}, Hardware("13.0", "470.1", trouble="too old"), fine, "good", "cpu"),
        ({}, Hardware("", "", has_mps=True), fine, "good", "cpu: Apple's GPU (mps) takes the steps, and has no fp64"),
        ({"name": "mps"}, Hardware("", "", has_mps=True), fine, "good", "cpu: Apple's GPU (mps) takes the steps"),
        ({"name": "mps"}, Hardware("", ""), fine, "failed", "mps not found"),
        ({"name": "cpu"}, Hardware("", "", has_mps=True), fine, "good", "cpu"),
        ({}, Hardware("", "", (AMD,), rocm_build="6.4"), fine, "warning", "24.0 GB, ROCm 6.4, bf16; nobody has run"),
        ({}, Hardware("", "", rocm_build="6.4", trouble="too old"), fine, "warning", "graphics card: too old"),
    ],
)
def test_the_device_is_there_and_computes(
    config: dict[str, str], hardware: Hardware, attempt: Callable[[str], None], level: str, says: str
) -> None:
    found = machine.check_device(DeviceConfig.model_validate(config), hardware, attempt)
    assert (found.level, says in found.result) == (level, True)
    assert "and more" not in found.result


def test_the_page_on_gpus_shows_what_the_doctor_says() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/on-a-gpu-server.md").read_text()
    h100 = Hardware("13.0", "580.1", (Gpu("NVIDIA H100 80GB HBM3", 85 * 10**9, is_bf16=True),))
    (shown,) = re.findall(r"^(good .*), \.\.\.$", page, re.MULTILINE)
    assert text_of(machine.check_device(DeviceConfig(), h100, fine)).startswith(f"{shown}, ")
    for hardware, why in (
        (Hardware("13.0", ""), "there is no NVIDIA driver"),
        (Hardware("", "580.1"), "torch was installed without CUDA"),
    ):
        found = machine.check_device(DeviceConfig(), hardware, fine).result
        assert found.startswith("cpu") and why in found and why in page


def test_a_card_that_does_not_answer_is_told_unless_the_processor_is_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(number: int) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nand more")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", busy)
    for name, level in (("auto", "failed"), ("cuda", "failed"), ("cpu", "good")):
        (found,) = examine.examine_device(DeviceConfig(name=name))
        assert found.level == level
        assert (level == "good") == ("cuda:0 cannot be opened: CUDA error: CUDA-capable" not in found.result)
        assert "and more" not in found.result


def test_this_machines_own_device_is_found_and_computes() -> None:
    found = machine.check_device(DeviceConfig(name="cpu"), machine.look_at_hardware(), machine.try_device)
    assert found.level == "good"
    assert found.result in (
        "cpu",
        "cpu; contributions are unpacked in NumPy, because libnative.so was not built for this machine",
    )


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_device_that_computes_slowly_says_why(name: str) -> None:
    found = machine.check_device(
        DeviceConfig(name=name), Hardware("13.0", "580.1", (H200,)), lambda device: "that is slow"
    )
    assert (found.level, found.result.endswith("; that is slow")) == ("good", True)


def room(needed: int, free: int, least: int = 100, total: int = 10_000) -> MemoryDemand:
    return MemoryDemand("main memory", needed, least, free, total, NEED.formula("cpu"))


def test_memory_is_judged_as_the_start_judges_it() -> None:
    (found,) = machine.check_memory([room(1_000, 2_000)], 0)
    assert level_of(found) == GOOD
    for part in ("weights", "gradient", "residual", "inner state", "activations", "checkpoint"):
        assert part in found.result
    close, taken, none = (room(1_000, 1_050), room(1_000, 900), room(99_000, 900, least=10_001))
    assert [level_of(machine.check_memory([each], 0)[0]) for each in (close, taken, none)] == [WARNING, WARNING, FAILED]
    limited = machine.check_memory([room(1_000, 2_000)], 999)
    assert [each.level for each in limited] == ["good", "failed"]
    assert "limits.memory_bytes" in limited[1].fix
    both = machine.check_memory([room(1_000, 2_000), none], 0)
    assert [(each.what, each.level) for each in both] == [("memory", "good"), ("device memory", "failed")]


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(256, 4_096, FAILED), (512, 4_096, WARNING), (1_023, 1_023, WARNING), (1_024, 1_024, GOOD), (2**20, 2**20, GOOD)],
)
def test_open_files_are_enough_for_streams_and_connections(soft: int, hard: int, expected: tuple[str, bool]) -> None:
    assert level_of(machine.check_files(soft, hard)) == expected


def test_on_macos_files_are_counted_as_a_node_may_open_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, resource.RLIM_INFINITY]
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: limits.__setitem__(slice(None), wanted))
    here = examine.Examination(NodeConfig(storage=StorageConfig(directory=str(tmp_path))), is_asked_outside=False)
    found = [each for each in here.look_at_programs() if each.what == "open files"]
    assert found == [Diagnosis("open files", "good", f"{OPEN_FILES:,} open files per process")]


def test_p2pd_is_the_one_that_is_known_and_its_weakness_is_told_where_it_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tcp, quic = "/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/4001/quic-v1"
    assert [level_of(each) for each in machine.check_p2pd((tcp,), "1.1.12")] == [GOOD]
    found = machine.check_p2pd((tcp, quic), "1.1.12")
    assert [level_of(each) for each in found] == [GOOD, WARNING]
    assert "CVE-2024-22189" in found[1].result
    assert [level_of(each) for each in machine.check_p2pd((tcp,), "1.2.0")] == [WARNING]

    def missing() -> Path:
        raise TransportError("p2pd is missing")

    monkeypatch.setattr(machine, "find_binary", missing)
    assert [level_of(each) for each in machine.check_p2pd((tcp,), "1.1.12")] == [FAILED]


# ---------------------------------------------------------------------------------------------------
# The disk


def test_a_check_that_cannot_look_is_a_finding() -> None:
    def refused() -> list[Diagnosis]:
        raise DataError("/var/lib/p2ptrain: cannot be read (Permission denied)")

    (found,) = within("data directory", refused, 10.0)
    assert (level_of(found), found.result) == (FAILED, "/var/lib/p2ptrain: cannot be read (Permission denied)")


def test_a_package_that_the_config_asks_for_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, object] = {}
    monkeypatch.setattr("importlib.util.find_spec", there.get)
    assert machine.check_tracking(TrackingConfig()) == []
    (found,) = machine.check_tracking(TrackingConfig(wandb="figures"))
    assert (level_of(found), found.result) == (FAILED, "tracking.wandb: needs wandb")  # as a start does
    (found,) = machine.check_tracking(TrackingConfig(tensorboard="figures"))
    assert (level_of(found), found.result) == (FAILED, "tracking.tensorboard: needs tensorboard")
    there["wandb"] = object()
    (found,) = machine.check_tracking(TrackingConfig(wandb="figures"))
    assert level_of(found) == GOOD


def test_the_data_directory_is_writable_and_its_owners_alone(tmp_path: Path) -> None:
    assert level_of(disk.check_writable(tmp_path / "not" / "yet")) == GOOD
    assert not (tmp_path / "not").exists()
    tmp_path.chmod(0o700)
    assert level_of(disk.check_writable(tmp_path)) == GOOD
    for mode in (0o755, 0o750, 0o770, 0o777):
        tmp_path.chmod(mode)
        assert level_of(disk.check_writable(tmp_path)) == WARNING
    file = tmp_path / "file"
    file.touch()
    assert level_of(disk.check_writable(file)) == FAILED


def test_a_directory_that_takes_nothing_is_no_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**more: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", refuse)
    found = disk.check_writable(tmp_path)
    assert (found.level, "Read-only file system" in found.result) == ("failed", True)


def test_the_key_is_its_owners_alone_and_a_key(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    assert level_of(disk.check_key(path)) == GOOD
    assert not path.exists()
    identity = Identity.make(path)
    assert identity.peer_id in disk.check_key(path).result
    path.chmod(0o644)
    assert disk.check_key(path) == Diagnosis(
        "key", "failed", f"{path}: others can read or change this private key", f"chmod 600 {path}"
    )
    path.chmod(0o600)
    path.write_bytes(b"nonsense")
    assert level_of(disk.check_key(path)) == FAILED


def test_who_holds_a_lock_is_found_without_taking_it(tmp_path: Path) -> None:
    note, key = tmp_path / "daemon.json", tmp_path / "elsewhere.key"
    assert disk.check_locks(tmp_path, key, note, answers=False).result == "free"
    lock = Lock.of_directory(tmp_path)
    assert disk.holder_of(tmp_path / LOCK_NAME) == os.getpid()
    found = disk.check_locks(tmp_path, key, note, answers=True)
    assert (level_of(found), str(os.getpid()) in found.result) == (GOOD, True)
    found = disk.check_locks(tmp_path, key, note, answers=False)
    assert (level_of(found), "does not answer" in found.result) == (FAILED, True)  # another cannot start here
    lock.release()
    with Lock.of_identity(key):
        found = disk.check_locks(tmp_path, key, note, answers=False)
        assert (level_of(found), f"process {os.getpid()} uses the key" in found.result) == (FAILED, True)
    note.touch()
    found = disk.check_locks(tmp_path, key, note, answers=False)
    assert (level_of(found), "did not end properly" in found.result) == (GOOD, True)
    assert disk.check_locks(tmp_path, key, note, answers=False, locks=tmp_path / "none").level == "warning"
    waiting = tmp_path / "locks"
    status = (tmp_path / LOCK_NAME).stat()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    waiting.write_text(f"1: -> FLOCK  ADVISORY  WRITE 7 {place} 0 EOF\n2: POSIX  ADVISORY  WRITE 8 {place} 0 EOF\nx\n")
    assert disk.holder_of(tmp_path / LOCK_NAME, waiting) is None
    waiting.write_text(f"1: FLOCK  ADVISORY  WRITE 7 {place} 0 EOF\n")
    assert disk.holder_of(tmp_path / LOCK_NAME, waiting) == 7


def test_room_is_compared_with_what_the_run_keeps() -> None:
    needed = NEED.disk(4, RUN.agreement.history_rounds, 8)
    assert needed > 5 * NEED.checkpoint

    def judged(free: int, used: int, kept: int = 4, contributors: int = 8, limit: int = 0) -> tuple[str, bool]:
        terms = kept, RUN.agreement.history_rounds, contributors
        demand = DiskDemand(NEED.disk(*terms), used, free, limit, NEED.disk_formula(*terms))
        return level_of(disk.check_space(demand))

    assert judged(2 * needed, 0) == GOOD
    assert judged(needed + needed // 10, 0) == WARNING
    assert judged(needed - 1, 0) == FAILED
    assert judged(0, needed) == GOOD  # all of it is there
    assert judged(needed, 0, contributors=16) == FAILED
    assert judged(needed, 0, kept=40) == FAILED
    assert judged(2 * needed, 0, limit=needed - 1) == FAILED
    assert judged(needed - 1, 0, limit=needed) == WARNING  # the owner knows more than we do


def test_data_that_are_here_do_not_count_as_room_for_the_rest(tmp_path: Path) -> None:
    config = NodeConfig.model_validate({"storage": {"directory": str(tmp_path)}})
    run = RunConfig(name="x").sealed(manifest="ab" * 32, initial_root="cd" * 32, founders=["ef" * 32])
    before = disk_demand(run, Home(config), need_of(run))
    piece = Home(config).usual_dataset(run.data.manifest) / "pieces" / "1"
    piece.parent.mkdir(parents=True)
    piece.write_bytes(bytes(2**20))
    assert disk_demand(run, Home(config), need_of(run)).used == before.used == 0
    demand = disk_demand(run, Home(config), need_of(run), data_bytes=2**20, of_data=piece.parent.parent)
    assert demand.used >= 2**20


def test_the_disks_speed_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = disk.check_speed(tmp_path / "not yet", NEED, 10**12, probe_bytes=2**21)
    assert "MB/s" in found.result
    assert [*tmp_path.iterdir()] == []
    assert disk.check_speed(tmp_path, NEED, 2**20, probe_bytes=2**21).level == "warning"
    assert level_of(disk.judge_speed(500e6, NEED)) == GOOD
    assert level_of(disk.judge_speed(5e6, None)) == WARNING
    assert level_of(disk.judge_speed(NEED.checkpoint / 61, NEED)) == WARNING


def test_a_disk_that_breaks_while_it_is_measured_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk.os, "fsync", broken)
    found = disk.check_speed(tmp_path, None, 10**12, probe_bytes=2**20)
    assert (level_of(found), "Input/output error" in found.result) == (FAILED, True)


# ---------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PROBE_BYTES", 2**20)
    monkeypatch.setenv("P2PTRAIN_NETWORK__LISTEN", "/ip4/127.0.0.1/tcp/0")
    monkeypatch.setenv("P2PTRAIN_HTTP__PORT", "0")
    monkeypatch.setenv("P2PTRAIN_DEVICE__NAME", "cpu")


@pytest.mark.usefixtures("quick")
def test_it_says_that_a_node_can_work_here_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "node"
    status, out, err = p2ptrain(capsys, "doctor", "--data-dir", directory, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["can_work"]
    names = [each["what"] for each in told["checks"]]
    for name in ("config", "python", "torch", "p2pd", "device", "data directory", "key", "locks", "ports", "http"):
        assert name in names
    assert not directory.exists()


@pytest.mark.usefixtures("quick")
def test_it_fails_where_a_node_cannot_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "identity.key"
    key.write_bytes(b"nonsense")
    monkeypatch.setenv("P2PTRAIN_HTTP__TOKEN_FILE", str(tmp_path / "no token"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        status, out, err = p2ptrain(capsys, "doctor", "--data-dir", tmp_path, "--listen", address)
    assert (status, err) == (1, "")
    assert "failed   key" in out
    assert "failed   http" in out
    assert f"failed   ports            {address} is in use" in out
    assert out.splitlines()[-1].startswith("a node cannot work here: ")


def test_each_thing_is_looked_at_when_what_was_found_before_has_been_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    for name in ("for_daemon", "at_programs", "at_device", "at_directory", "at_ports", "outside", "at_run", "at_speed"):

        def look(*_: object, name: str = name) -> Any:
            looked.append(name)
            return [Diagnosis(name, "good", "")]

        monkeypatch.setattr(examine if name == "at_device" else examine.Examination, f"look_{name}", look)
    for number, found in enumerate(examine.examine(NodeConfig(), None, is_asked_outside=False)):
        assert len(looked) == number
        assert found.what == (looked[-1] if looked else "config")
    assert len(looked) == 8


def test_what_was_found_before_a_ctrl_c_has_been_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[Diagnosis]:
        yield Diagnosis("disk", "good", "large")
        raise KeyboardInterrupt

    monkeypatch.setattr("p2ptrain.doctor.examine.examine", interrupted)
    assert p2ptrain(capsys, "doctor", "--data-dir", tmp_path) == (130, "good     disk             large\n", "")
    assert p2ptrain(capsys, "doctor", "--data-dir", tmp_path, "--json") == (130, "", "")  # half of it is no JSON


@pytest.mark.parametrize("missing", ["torch", "msgspec", "psutil"])
def test_what_is_not_installed_is_named(missing: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"sys.argv = ['p2ptrain', 'doctor', '--data-dir', {str(tmp_path)!r}]\n"
        "from p2ptrain.cli import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert missing in done.stderr
    assert "Reinstall p2ptrain" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_or_an_address_that_is_none_is_the_users_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "node.toml"
    config.write_text("[limits]\nuplaod_bytes_per_second = 1\n")
    status, out, err = p2ptrain(capsys, "doctor", "--config", config)
    assert (status, out) == (2, "")
    assert "Did you mean upload_bytes_per_second?" in err
    assert p2ptrain(capsys, "doctor", "--bootstrap", "/ip4/127.0.0.1/tcp/1")[0] == 2
    short = "/ip4/127.0.0.1/tcp/1/p2p/" + "Q" * 46
    assert p2ptrain(capsys, "doctor", "--bootstrap", short)[0] == 2  # not a key


def test_a_daemon_that_is_stopped_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from p2ptrain.errors import NoDaemonError, P2ptrainError, SilentDaemonError

    def asked(error: P2ptrainError) -> tuple[Diagnosis, bool]:
        def ask(*arguments: object, **more: object) -> None:
            raise error

        monkeypatch.setattr(examine.control, "ask", ask)
        here = examine.Examination(NodeConfig(storage=StorageConfig(directory=str(tmp_path))), is_asked_outside=False)
        return here.look_for_daemon()[0], here.is_answering

    found, answers = asked(SilentDaemonError("the daemon does not answer; it may be suspended"))
    assert (level_of(found), answers) == (WARNING, False)
    found, answers = asked(NoDaemonError("no daemon is running there"))
    assert (level_of(found), answers) == (GOOD, False)
    found, answers = asked(P2ptrainError("it is starting"))
    assert (level_of(found), answers) == (GOOD, True)


def test_a_run_whose_library_is_missing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model.library.cache_clear()
    monkeypatch.setattr(hf_model, "find_spec", lambda name: None)
    run = RunConfig(name="theirs", model=hf_models.hf_model("llama", vocab_size=333))
    here = examine.Examination(NodeConfig(storage=StorageConfig(directory=str(tmp_path))), is_asked_outside=False)
    monkeypatch.setattr(here.home, "runs", lambda: [run])
    found = here.look_at_run()
    what = "model.kind: this run trains a transformers model: pip install 'p2ptrain[hf]'"
    assert found == [Diagnosis("run", "failed", what)]
    hf_model.library.cache_clear()
