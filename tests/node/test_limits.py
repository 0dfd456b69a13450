"""The limits: when the node trains, for what share of the time, and in how much memory. Clock and battery are fakes."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.config import LimitsConfig, NodeConfig, RecipeConfig, RunConfig
from p2ptrain.config.node import StorageConfig
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.errors import ConfigError, DeviceError, TooLargeError
from p2ptrain.exact.shortage import mega
from p2ptrain.loop.channel import make_shared
from p2ptrain.node import limits as limits_module
from p2ptrain.node import pacing
from p2ptrain.node.home import Home
from p2ptrain.node.limits import (
    MachineLimits,
    choose_settings,
    disk_demand,
    is_on_battery,
    is_within,
    over_memory,
    reasons_to_pause,
    refuse_disk,
    refuse_too_large,
    resident_bytes,
    rest_seconds,
)
from p2ptrain.node.pacing import Pacing
from p2ptrain.observe.build import unreadiness_of
from p2ptrain.train import memory as memory_module
from p2ptrain.train.memory import PassSettings, demands_of, need_of
from tests.helpers.cli import p2ptrain
from tests.helpers.memory_swarm import swarm
from tests.helpers.net import skipping_time, until

RESTING = complaint(Code.OUTSIDE_HOURS, hours="22:00-07:00", until="22:00")
UNPLUGGED = complaint(Code.ON_BATTERY)


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-03-29T{text}")


# ---------------------------------------------------------------------------------------------------
# Decisions


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("", ["00:00", "12:00", "23:59"], []),
        ("09:00-17:30", ["09:00", "12:00", "17:29:59"], ["08:59:59", "17:30", "00:00", "23:59"]),
        ("22:00-07:00", ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ("00:00-12:00", ["00:00", "11:59"], ["12:00", "23:59"]),
        ("12:00-00:00", ["12:00", "23:59"], ["00:00", "11:59"]),
    ],
)
def test_hours_begin_when_they_say_and_may_go_over_midnight(hours: str, inside: list[str], outside: list[str]) -> None:
    assert [time for time in inside + outside if is_within(hours, at(time))] == inside


def test_each_reason_to_pause_holds_for_itself() -> None:
    limits = LimitsConfig(hours="22:00-07:00")
    assert reasons_to_pause(limits, at("23:00"), is_on_battery=False) == []
    assert reasons_to_pause(limits, at("12:00"), is_on_battery=False) == [RESTING]
    assert reasons_to_pause(limits, at("23:00"), is_on_battery=True) == [UNPLUGGED]
    assert reasons_to_pause(limits, at("12:00"), is_on_battery=True) == [RESTING, UNPLUGGED]
    anyway = LimitsConfig(on_battery="train")
    assert reasons_to_pause(anyway, at("12:00"), is_on_battery=True) == []


@pytest.mark.parametrize(
    ("worked", "percent", "rest"), [(1.0, 100, 0.0), (1.0, 50, 1.0), (2.0, 25, 6.0), (0.5, 80, 0.125), (1.0, 1, 99.0)]
)
def test_rest_makes_work_that_share_of_the_time(worked: float, percent: int, rest: float) -> None:
    assert rest_seconds(worked, percent) == pytest.approx(rest)
    assert worked / (worked + rest) == pytest.approx(percent / 100)


def test_memory_over_its_limit_is_complained_of() -> None:
    assert over_memory(LimitsConfig(), 10**12) is None
    assert over_memory(LimitsConfig(memory_bytes=10**9), 10**9) is None
    told = complaint(Code.OVER_MEMORY, used_bytes=10**9 + 1, limit_bytes=10**9)
    assert over_memory(LimitsConfig(memory_bytes=10**9), 10**9 + 1) == told
    assert "1,000,000,001 bytes are in use, and limits.memory_bytes allows 1,000,000,000;" in told.text
    assert resident_bytes() > 50 * 10**6  # torch alone is more


SHARES = """
import mmap
import sys
shared = mmap.mmap(int(sys.argv[1]), 10**8)
shared[:] = bytes(10**8)
print(flush=True)
sys.stdin.read()
"""


def test_memory_that_processes_share_is_counted_once() -> None:
    descriptor, command = make_shared(10**8), [sys.executable, "-c", SHARES]
    before, both = resident_bytes(), subprocess.PIPE
    with mmap.mmap(descriptor, 10**8) as shared:
        shared[:] = bytes(10**8)
        with ExitStack() as stack:
            for _ in range(2):
                child = subprocess.Popen([*command, str(descriptor)], stdin=both, stdout=both, pass_fds=[descriptor])
                stack.enter_context(child)
                assert child.stdout is not None
                child.stdout.readline()
            assert 0.9e8 < resident_bytes() - before < 1.8e8
    os.close(descriptor)


def config_of(memory: int) -> NodeConfig:
    chosen = {"name": "cpu", "half_state": False, "checkpointing": False, "sequences_per_pass": 8}
    device = NodeConfig().device.model_copy(update=chosen)
    return NodeConfig().model_copy(update={"limits": LimitsConfig(memory_bytes=memory), "device": device})


def test_a_run_that_does_not_fit_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunConfig.model_validate({"name": "large"})
    (main,) = demands_of(run, config_of(0))
    with caplog.at_level("INFO"):
        refuse_too_large(run, Home(config_of(0)))
    assert "run large needs about" in caplog.text, "what it takes is told before it is taken"
    assert "weights 3 MB + gradient 3 MB + residual 3 MB + inner state 7 MB + activations" in caplog.text
    refuse_too_large(run, Home(config_of(main.needed)))
    with pytest.raises(ConfigError, match=r"^limits\.memory_bytes: run large needs about .*weights .* Raise it"):
        refuse_too_large(run, Home(config_of(main.needed - 1)))
    # Less than nothing: what this process, of many tests, has taken counts as free.
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda: -resident_bytes())
    refuse_too_large(run, Home(config_of(0)))
    assert "are free now. Close other programs" in caplog.text, "others may leave: a warning"
    monkeypatch.setattr(memory_module, "memory_bytes", lambda: main.least)
    with pytest.raises(TooLargeError, match=r"but there are only .* Set device\.sequences_per_pass = 1, so that less"):
        refuse_too_large(run, Home(config_of(0)))
    small = config_of(0).device.model_copy(update={"sequences_per_pass": 1})
    refuse_too_large(run, Home(config_of(0).model_copy(update={"device": small})))
    monkeypatch.setattr(memory_module, "memory_bytes", lambda: main.least - 1)
    with pytest.raises(
        TooLargeError, match=r"even with one sequence per pass, but there are only .*device\.checkpointing"
    ):
        refuse_too_large(run, Home(config_of(0)))


def test_what_the_run_before_has_saved_makes_room_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig.model_validate({"name": "before"}).sealed(
        manifest="aa" * 32, initial_root="bb" * 32, founders=["cc" * 32]
    )
    heir = run.model_copy(update={"seed": run.seed + 1})
    home = Home(NodeConfig(storage=StorageConfig(directory=str(tmp_path))))
    need = need_of(run)
    needed = disk_demand(run, home, need).needed
    saved = home.of_run(run.id) / "payloads" / "one"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(os.urandom(needed * 9 // 10))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed * 7 // 10))
    assert disk_demand(run, home, need).level != "failed"
    assert disk_demand(heir, home, need).level == "failed", "another run"
    monkeypatch.setattr(Home, "ancestors", lambda _, at: (run.id,) if at.id == heir.id else ())
    refuse_disk(heir, disk_demand(heir, home, need))


def test_what_the_owner_has_left_open_is_chosen_so_that_a_run_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunConfig.model_validate({"name": "large", "model": {"preset": "5m"}})

    def needed(config: NodeConfig, **device: object) -> int:
        (main,) = demands_of(run, config.model_copy(update={"device": config.device.model_copy(update=device)}))
        return main.needed

    for settings, chosen in (
        ({}, [{}, {"sequences_per_pass": 3}, {"sequences_per_pass": 1}]),
        ({"sequences_per_pass": 8}, [{}, {"half_state": True, "checkpointing": True}]),
        ({"sequences_per_pass": 8, "half_state": False}, [{}, {"checkpointing": True}]),
    ):
        config = NodeConfig.model_validate({"device": {"name": "cpu"} | settings})
        for expected in chosen:
            size = needed(config, **expected)
            for limit, there in ((0, size), (size, 10**12)):
                monkeypatch.setattr(memory_module, "memory_bytes", lambda there=there: there)
                home = Home(config.model_copy(update={"limits": LimitsConfig(memory_bytes=limit)}))
                with caplog.at_level("INFO"):
                    choose_settings(run, home)
                refuse_too_large(run, home)
                device = home.config.device
                assert {name: value for name, value in device if value != getattr(config.device, name)} == expected
    assert "device.checkpointing = true, chosen for run large" in caplog.text
    monkeypatch.setattr(memory_module, "memory_bytes", lambda: size - 1)
    with pytest.raises(TooLargeError):
        refuse_too_large(run, Home(config))


def test_a_run_that_does_not_fit_a_gpu_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU here, the test fakes the answers to the queries."""
    run = RunConfig.model_validate({"name": "large", "model": {"preset": "100m"}})
    need = need_of(run, PassSettings(autocast=True, device="cuda", audits=True))
    least = need_of(run, PassSettings(autocast=True, device="cuda", sequences_per_pass=1, audits=True))
    there = [need.trainer, need.trainer]
    config = NodeConfig.model_validate({"device": {"half_state": False, "checkpointing": False, "compile": False}})
    monkeypatch.setattr(memory_module, "find_device", lambda config: (torch.device("cuda:0"), True))
    monkeypatch.setattr(memory_module, "is_usable", lambda device: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: tuple(there))
    with caplog.at_level("INFO"):
        refuse_too_large(run, Home(config))
    assert (
        f"and {mega(need.trainer)} of cuda:0 (agreed weights 386 MB + weights 386 MB + gradient 386 MB + residual"
        in caplog.text
    )
    assert "are free now" not in caplog.text
    there[:] = need.trainer - 1, least.trainer
    refuse_too_large(run, Home(config))
    assert "of cuda:0 are free now" in caplog.text
    there[1] -= 1
    with pytest.raises(TooLargeError, match=r"of cuda:0 \(agreed weights .* even with one sequence per pass"):
        refuse_too_large(run, Home(config))

    def full(device: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.raises(DeviceError, match=r"cuda:0 cannot be opened: CUDA error: out of memory\. Close"):
        refuse_too_large(run, Home(config))


# ---------------------------------------------------------------------------------------------------
# The machine


@pytest.mark.parametrize(
    ("battery", "expected"),
    [
        (None, False),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=False), True),
        (SimpleNamespace(power_plugged=None), False),
    ],
)
def test_only_a_battery_that_is_in_use_counts(battery: object, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module.psutil, "sensors_battery", lambda: battery)
    assert is_on_battery() is expected


def test_a_machine_that_cannot_tell_counts_as_plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(limits_module.psutil, "sensors_battery", fail)
    assert is_on_battery() is False


def test_a_nice_process_steps_back_with_all_that_it_starts_and_never_forward() -> None:
    code = (
        "import os, subprocess, sys\n"
        "from p2ptrain.node.limits import be_nice\n"
        "before = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "be_nice(0); assert os.getpriority(os.PRIO_PROCESS, 0) == before\n"
        "be_nice(19)\n"
        "be_nice(3)\n"
        "subprocess.run([sys.executable, '-c', 'import os; print(os.nice(0))'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "19"


# ---------------------------------------------------------------------------------------------------
# Guests


class FakeMachine:
    """The fake clock, battery and memory."""

    def __init__(self) -> None:
        self.now, self.is_unplugged, self.resident = at("12:00"), False, 0

    def machine_limits(self, limits: LimitsConfig, daemon: Any) -> MachineLimits:
        driver = daemon.driver
        return MachineLimits(
            limits,
            driver.trainings.pauses,
            driver.worker,
            lambda: self.now,
            lambda: self.is_unplugged,
            lambda: self.resident,
        )


@skipping_time
async def test_a_node_outside_its_hours_votes_and_applies_and_trains_again_inside_them(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        node, machine = made.nodes[3], FakeMachine()
        daemon = node.daemon

        def rounds_trained() -> list[int]:
            return [done[1] for done in node.workshop.replica.chain.done if done[0] == "train"]

        daemon.machine_limits = machine_limits = machine.machine_limits(LimitsConfig(hours="22:00-07:00"), daemon)
        machine_limits.look()
        await made.reach(made.newest + 6)
        before = node.status["counters"].get("contributions taken", 0)
        await made.reach(made.newest + 6)
        status = node.status
        assert status["counters"].get("contributions taken", 0) == before
        assert status["is_paused"]
        assert status["health"] == [RESTING.text]
        assert "22:00-07:00: training resumes at 22:00" in RESTING.text
        assert unreadiness_of(daemon) == []
        assert status["limits"]["hours"] == "22:00-07:00"
        stood, trained = daemon.driver.node.view().state.round, rounds_trained()
        machine.now = at("22:00")
        machine_limits.look()
        assert not node.status["is_paused"]
        await until(lambda: node.status["counters"].get("contributions taken", 0) > before + 2)
        fresh = rounds_trained()[len(trained) :]
        assert fresh and min(fresh) > stood, "and not the round for which the pause has held it"
        made.compare(12)


@skipping_time
async def test_the_owners_pause_and_the_machines_are_lifted_each_by_itself(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        daemon, machine = made.nodes[0].daemon, FakeMachine()
        daemon.machine_limits = machine_limits = machine.machine_limits(LimitsConfig(hours="22:00-07:00"), daemon)
        machine.is_unplugged = True
        machine_limits.look()
        told = await daemon.answer({"do": "pause"})
        assert told["pauses"] == [RESTING.text, UNPLUGGED.text, complaint(Code.PAUSED).text]
        assert made.nodes[0].status["health"] == told["pauses"]
        machine.now = at("23:00")
        machine_limits.look()
        told = await daemon.answer({"do": "resume"})
        assert told == {"is_paused": True, "pauses": [UNPLUGGED.text]}
        assert daemon.driver.trainings.pauses
        machine.is_unplugged = False
        machine_limits.look()
        assert await daemon.answer({"do": "resume"}) == {"is_paused": False, "pauses": []}
        assert not daemon.driver.trainings.pauses


@skipping_time
async def test_limits_of_the_machine_change_at_once_and_what_is_not_possible_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        daemon, machine = made.nodes[0].daemon, FakeMachine()
        daemon.machine_limits = machine.machine_limits(LimitsConfig(), daemon)
        with caplog.at_level(logging.INFO, "p2ptrain.node"):
            told = await daemon.answer({"do": "limit", "hours": "22:00-07:00", "percent": 25, "battery": "train"})
        assert (told["hours"], told["device_percent"], told["on_battery"]) == ("22:00-07:00", 25, "train")
        assert daemon.driver.worker.pacing.percent == 25
        assert daemon.driver.trainings.pauses  # without waiting for the next look
        assert "limits: hours = '22:00-07:00', device_percent = 25" in caplog.text
        for option, wrong in (("hours", "7-8"), ("hours", "07:00-07:00"), ("percent", 0), ("percent", "9"),
                              ("percent", True), ("memory", -1), ("battery", "perhaps"), ("hours", 7)):  # fmt: skip
            with pytest.raises(ConfigError, match=rf"^--{option}: .* is not valid\. Give ") as raised:
                await daemon.answer({"do": "limit", "upload": 7, option: wrong})
            assert repr(wrong) in str(raised.value)
        assert await daemon.answer({"do": "limit"}) == told
        told = await daemon.answer({"do": "limit", "hours": "", "percent": 100, "memory": 1_000})
        assert not daemon.driver.trainings.pauses
        machine.resident = 2_000
        daemon.machine_limits.look()
        (told,) = made.nodes[0].status["complaints"]
        assert (told["code"], told["fields"]) == ("over_memory", {"used_bytes": 2_000, "limit_bytes": 1_000})
        assert unreadiness_of(daemon) == []
        await daemon.answer({"do": "limit", "memory": 0})
        assert made.nodes[0].status["health"] == []


# ---------------------------------------------------------------------------------------------------
# The device's share


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SimpleNamespace(now=0.0, naps=[])

    def sleep(seconds: float) -> None:
        made.naps.append(seconds)
        made.now += seconds

    monkeypatch.setattr(pacing, "sleep", sleep)
    monkeypatch.setattr(pacing, "perf_counter", lambda: made.now)
    return made


def trained(made: Pacing, time: Any) -> None:
    """Takes two steps of one second each."""
    made.rest_before()
    made.begin()
    for step in (1, 2):
        time.now += 1.0
        made.step()
        if step == 1:
            made.rest()


def test_the_device_rests_between_steps_and_what_it_idled_between_rounds_counts(time: Any) -> None:
    made = Pacing(RecipeConfig())
    trained(made, time)
    assert (time.now, time.naps) == (2.0, [])
    made.percent = 50
    trained(made, time)
    assert time.now == pytest.approx(2 + 3)  # a step, a second of rest, and a step, after which others need not wait
    assert max(time.naps) <= pacing.NAP_SECONDS
    assert made.worked == pytest.approx(2)  # rest is no training
    trained(made, time)
    assert time.now == pytest.approx(5 + 4)  # the rest that was owed comes first
    time.now += 0.75
    trained(made, time)
    assert time.now == pytest.approx(9 + 4)
    time.now += 100.0
    trained(made, time)
    assert time.now == pytest.approx(113 + 3)


def test_a_device_that_rests_ends_and_takes_a_new_limit_without_waiting(
    time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, naps = Pacing(RecipeConfig()), list[float]()

    def changed(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            made.percent = 100

    def ended(seconds: float) -> None:
        made.is_stopping = True

    made.percent = 1
    monkeypatch.setattr(pacing, "sleep", changed)
    trained(made, time)
    assert len(naps) == 3, "of 99 seconds, the first three naps"
    made.percent = 1
    monkeypatch.setattr(pacing, "sleep", ended)
    trained(made, time)
    assert made.is_stopping


# ---------------------------------------------------------------------------------------------------
# The command


def test_the_command_orders_limits_and_tells_what_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    orders = []
    held = {
        "upload_bytes_per_second": 0, "download_bytes_per_second": 5_000, "memory_bytes": 10**9,
        "hours": "22:00-07:00", "device_percent": 25, "k_max": 0, "threads": 3, "on_battery": "pause",
        "on_gpu_busy": "ignore",
    }  # fmt: skip

    def ask(directory: Path, order: dict[str, Any]) -> dict[str, Any]:
        orders.append(order)
        return held if order["do"] == "limit" else {"pauses": ["paused on battery: because"]}

    monkeypatch.setattr("p2ptrain.cli.control.ask", ask)
    status, out, err = p2ptrain(
        capsys, "limit", "--data-dir", tmp_path, "--hours", "22:00-07:00", "--percent", "25", "--battery", "pause"
    )
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "upload    no limit",
        "download  5,000 bytes/s",
        "memory    1,000,000,000 bytes",
        "hours     22:00-07:00",
        "percent   25 percent",
        "k         no limit",
        "battery   pause",
        "gpu       ignore",
        "threads   3",
    ]
    assert {key: value for key, value in orders[-1].items() if value is not None} == {
        "do": "limit", "hours": "22:00-07:00", "percent": 25, "battery": "pause"
    }  # fmt: skip
    assert p2ptrain(capsys, "limit", "--data-dir", tmp_path, "--off")[0] == 0
    assert orders[-1] == {"do": "limit", "upload": 0, "download": 0, "hours": "", "percent": 100, "memory": 0}
    count = len(orders)
    for wrong in (
        ["--off", "--hours", ""],
        ["--hours", "25:00-07:00"],
        ["--hours", "07:00-07:00"],
        ["--memory", str(2**50 + 1)],
        ["--upload", str(10**12 + 1)],
        ["--percent", "0"],
        ["--battery", "x"],
        ["--memory", "-1"],
        ["--threads", "0"],
    ):
        assert p2ptrain(capsys, "limit", "--data-dir", tmp_path, *wrong)[0] == 2
    assert len(orders) == count  # the daemon need not hear of it
    assert p2ptrain(capsys, "resume", "--data-dir", tmp_path)[1] == "paused on battery: because\n"
