"""The cores and memory available to a process, from control groups as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from p2ptrain import capacity

CORES = 64
FREE = 10**12


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine without limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", type("Memory", (), {"available": FREE}))
    monkeypatch.setattr(capacity, "GROUPS_MOUNT", tmp_path)
    monkeypatch.setattr(capacity, "OWN_GROUPS", tmp_path / "own")
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")


def test_a_machine_without_control_groups_is_all_there(root: Path) -> None:
    assert (capacity.cores(), capacity.free_memory_bytes()) == (CORES, FREE)


V2 = {"own": "0::/", "cpu.max": "200000 100000", "memory.max": "4000", "memory.current": "1500"}
V1 = {
    "own": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n1:name=systemd:/docker/ab",
    "cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000",
    "memory/memory.limit_in_bytes": "4000", "memory/memory.usage_in_bytes": "1500",
}  # fmt: skip


@pytest.mark.parametrize("files", [V2, V1], ids=["version 2", "version 1"])
def test_a_container_has_what_it_was_given(files: dict[str, str], root: Path) -> None:
    write(root, files)
    assert (capacity.cores(), capacity.free_memory_bytes()) == (2, 2500)


@pytest.mark.parametrize(
    ("files", "stat"),
    [
        (V2, {"memory.stat": "anon 1000\ninactive_file 300\nactive_file 9\ntotal_inactive_file 1"}),
        (V1, {"memory/memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 300\ntotal_active_file 9"}),
    ],
    ids=["version 2", "version 1"],
)
def test_files_that_were_read_make_way(files: dict[str, str], stat: dict[str, str], root: Path) -> None:
    write(root, files | stat)
    assert capacity.free_memory_bytes() == 2809


def test_a_part_of_a_core_is_one_more_and_other_controllers_limit_nothing(root: Path) -> None:
    write(root, V1 | {"cpu/cpu.cfs_quota_us": "150000"})
    assert capacity.cores() == 2
    write(root, {"own": "5:memory:/a\n4:cpu,cpuacct:/b", "cpu/a/cpu.cfs_quota_us": "1", "cpu/a/cpu.cfs_period_us": "1"})
    assert capacity.cores() == 2


def test_what_is_held_back_from_a_limit_on_counts(root: Path) -> None:
    write(root, V2 | {"memory.high": "3000"})
    assert capacity.free_memory_bytes() == 1500


def test_a_service_is_limited_by_its_own_group_and_those_above(root: Path) -> None:
    write(root, {"own": "0::/system.slice/p2ptrain.service"})
    assert (capacity.cores(), capacity.free_memory_bytes()) == (CORES, FREE)
    write(root, {"system.slice/cpu.max": "300000 100000", "system.slice/p2ptrain.service/cpu.max": "max 100000"})
    write(root, {"system.slice/memory.max": "9000", "system.slice/memory.current": "1000"})
    write(
        root, {"system.slice/p2ptrain.service/memory.max": "max", "system.slice/p2ptrain.service/memory.current": "9"}
    )
    assert (capacity.cores(), capacity.free_memory_bytes()) == (3, 8000)
    write(root, {"system.slice/p2ptrain.service/cpu.max": "50000 100000"})
    assert capacity.cores() == 1


def test_more_than_the_machine_has_is_no_limit(root: Path) -> None:
    write(
        root, {"own": "0::/", "cpu.max": "9900000 100000", "memory.max": "9223372036854771712", "memory.current": "1"}
    )
    assert (capacity.cores(), capacity.free_memory_bytes()) == (CORES, FREE)


def test_who_has_taken_too_much_has_nothing_left(root: Path) -> None:
    write(root, {"own": "0::/", "memory.max": "10", "memory.current": "20"})
    assert capacity.free_memory_bytes() == 0


@pytest.mark.parametrize("text", ["", "nonsense", "max", "0 0", "-1 100000"])
def test_what_is_no_limit_is_passed_by(text: str, root: Path) -> None:
    write(root, {"own": "0::/../../elsewhere", "cpu.max": text, "memory.max": text, "memory.current": text})
    assert (capacity.cores(), capacity.free_memory_bytes()) == (CORES, FREE)


def test_this_machine_can_be_asked() -> None:
    assert 1 <= capacity.cores() <= (os.cpu_count() or 1)
    assert 0 < capacity.free_memory_bytes() <= psutil.virtual_memory().total
