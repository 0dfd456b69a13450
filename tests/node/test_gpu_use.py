"""Whether other programs use the GPU: what the driver tells, with a library like its own, and when training pauses."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest
import torch

from p2ptrain.config import LimitsConfig
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.node import gpu_use
from p2ptrain.node.gpu_use import BUSY_PERCENT, FREE_SECONDS, LOOK_SECONDS, UNTOLD, CardUse, GpuWatch, use_of
from p2ptrain.node.limits import MachineLimits, reasons_to_pause
from p2ptrain.observe.build import unreadiness_of
from tests.helpers.memory_swarm import swarm
from tests.helpers.net import at, skipping_time, until

ME, GAME, DESKTOP = os.getpid(), 7_777, 5_555
CUDA = torch.device("cuda:0")
NOON = datetime.fromisoformat("2026-03-29T12:00")


class SharedCard:
    """A card, and its handle: what NVML tells of it. The samples are None if the driver does not support them."""

    def __init__(self) -> None:
        self.compute = [ME]
        self.samples: list[tuple[int, int, int]] | None = []  # process, time, percent
        self.status_of_samples = pynvml.NVML_ERROR_NOT_FOUND

    def processes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.compute]

    def utilization(self, since: int) -> list[Any]:
        if self.samples is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        new = [each for each in self.samples if each[1] > since]
        if not new:
            raise pynvml.NVMLError(self.status_of_samples)
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=percent) for pid, at, percent in new]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SharedCard:
    """A card that the driver takes for the device that it is."""
    monkeypatch.setattr(gpu_use, "handle_of", lambda card: card)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", SharedCard.processes)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", SharedCard.utilization)
    return SharedCard()


def use_of_card(card: SharedCard) -> CardUse:
    return CardUse(cast(torch.device, card))


# ---------------------------------------------------------------------------------------------------
# What the driver tells


def test_a_program_that_keeps_the_card_busy_is_seen_and_this_node_is_none(card: SharedCard) -> None:
    use = use_of_card(card)
    assert not use.is_by_others()
    card.samples = [(ME, 10, 98), (DESKTOP, 10, BUSY_PERCENT - 1)]
    assert not use.is_by_others()
    card.samples += [(ME, 20, 60), (GAME, 20, BUSY_PERCENT)]
    assert use.is_by_others()
    assert not use.is_by_others(), "those samples are old"
    card.samples += [(GAME, 30, 5), (DESKTOP, 31, 4), (GAME, 32, 9)]
    assert use.is_by_others(), "7 % and 4 %"
    card.samples += [(GAME, 40, 0), (GAME, 41, 12)]
    assert not use.is_by_others(), "6 % on average"


def test_samples_that_make_no_sense_are_left_out(card: SharedCard) -> None:
    card.samples = [(GAME, 10, 40)]
    use = use_of_card(card)
    assert use.is_by_others()
    card.samples += [(987_654_321, 2**63, 4_000_000)]  # not initialised
    assert not use.is_by_others()
    card.samples += [(GAME, 20, 40)]
    assert use.is_by_others(), "that sample's time counts for nothing"


def test_where_the_time_is_not_told_nothing_is(card: SharedCard) -> None:
    card.samples = None
    with pytest.raises(UNTOLD, match="Not Supported"):
        use_of_card(card).is_by_others()


def test_a_driver_that_does_not_list_this_node_tells_nothing(card: SharedCard) -> None:
    for compute in ([], [GAME]):
        card.compute = compute
        with pytest.raises(OSError, match="does not list this process itself"):
            use_of_card(card).is_by_others()


@pytest.mark.parametrize("status", [pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_INSUFFICIENT_SIZE])
def test_no_samples_and_more_than_there_was_room_for_wait_for_the_next_look(card: SharedCard, status: int) -> None:
    card.status_of_samples = status
    use = use_of_card(card)
    assert not use.is_by_others()
    card.samples = [(GAME, 10, 40)]
    assert use.is_by_others()


def test_a_driver_that_fails_tells_nothing(card: SharedCard) -> None:
    card.status_of_samples = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(UNTOLD, match="GPU is lost"):
        use_of_card(card).is_by_others()


# ---------------------------------------------------------------------------------------------------
# When training pauses


class CardLooks:
    """A watch of a card that tells what the test says, at times that it says."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.watch = GpuWatch(CUDA, lambda: True, use_of, lambda: self.now)

    def after(self, seconds: float, is_by_others: bool) -> bool:
        self.now += seconds
        self.watch.note(is_by_others)
        return self.watch.is_busy


def test_a_card_is_free_only_after_a_while_without_others() -> None:
    looks = CardLooks()
    assert not looks.after(0, False)
    assert looks.after(5, True), "at once"
    assert looks.after(FREE_SECONDS - 1, False)
    assert looks.after(0.5, True), "again, so the while begins anew"
    assert looks.after(FREE_SECONDS - 1, False)
    assert not looks.after(1, False)
    assert not looks.after(5, False)
    assert looks.after(5, True)


def test_it_pauses_only_those_who_want_that() -> None:
    assert reasons_to_pause(LimitsConfig(), NOON, is_on_battery=False, is_gpu_busy=True) == []
    wanted = LimitsConfig(on_gpu_busy="pause")
    assert reasons_to_pause(wanted, NOON, is_on_battery=False, is_gpu_busy=True) == [complaint(Code.GPU_BUSY)]
    assert reasons_to_pause(wanted, NOON, is_on_battery=False) == []


@skipping_time
async def test_a_watch_looks_where_it_is_wanted_and_follows_what_the_owner_changes() -> None:
    asked: list[float] = []
    is_wanted, is_by_others = False, True

    def make(device: torch.device) -> Callable[[], bool]:
        return lambda: bool(asked.append(loop.time())) or is_by_others

    loop = asyncio.get_running_loop()
    watch = GpuWatch(CUDA, lambda: is_wanted, make, loop.time)
    watching = asyncio.create_task(watch.watch())
    await at(loop.time() + 10 * LOOK_SECONDS)
    assert (asked, watch.is_busy) == ([], False)
    is_wanted = True
    await until(lambda: watch.is_busy)
    is_by_others = False
    await until(lambda: not watch.is_busy)
    assert FREE_SECONDS <= asked[-1] - asked[0] <= FREE_SECONDS + 2 * LOOK_SECONDS
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("error", [OSError("no such library"), AttributeError("no function"), RuntimeError("CUDA")])
async def test_a_card_that_does_not_tell_is_said_once_and_pauses_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def make(device: torch.device) -> Callable[[], bool]:
        raise error

    watch = GpuWatch(CUDA, lambda: True, make)
    watch.is_busy = True
    with caplog.at_level(logging.INFO, "p2ptrain.node"):
        await watch.watch()
    assert not watch.is_busy
    [record] = caplog.records
    assert record.getMessage() == (
        f"cannot tell whether other programs use cuda:0, so limits.on_gpu_busy has no effect: {error}"
    )


async def test_a_node_on_a_processor_asks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def make(device: torch.device) -> Callable[[], bool]:
        raise AssertionError("there is no card")

    await GpuWatch(torch.device("cpu"), lambda: True, make).watch()
    assert caplog.records == []


@skipping_time
async def test_a_node_beside_a_game_votes_and_applies_and_trains_again_afterwards(tmp_path: Path) -> None:
    is_busy = True
    async with swarm(tmp_path) as made:
        await made.reach(3)
        node = made.nodes[3]
        daemon = node.daemon
        driver = daemon.driver
        daemon.machine_limits = limits = MachineLimits(
            LimitsConfig(on_gpu_busy="pause", on_battery="train"),
            driver.trainings.pauses,
            driver.worker,
            gpu=lambda: is_busy,
        )
        limits.look()
        await made.reach(made.newest + 6)
        before = node.status["counters"].get("contributions taken", 0)
        await made.reach(made.newest + 6)
        assert node.status["counters"].get("contributions taken", 0) == before
        assert (node.status["is_paused"], node.status["health"]) == (True, [complaint(Code.GPU_BUSY).text])
        assert unreadiness_of(daemon) == []
        told = await daemon.answer({"do": "limit", "gpu": "ignore"})
        assert told["on_gpu_busy"] == "ignore"
        assert not driver.trainings.pauses  # at once
        await daemon.answer({"do": "limit", "gpu": "pause"})
        assert driver.trainings.pauses
        is_busy = False
        limits.look()
        assert not node.status["is_paused"]
        await until(lambda: node.status["counters"].get("contributions taken", 0) > before + 2)
        made.compare(12)
