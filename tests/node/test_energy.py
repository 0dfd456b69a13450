"""The device's energy, measured with a library like the one of NVIDIA's driver."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pynvml
import pytest
import torch

from p2ptrain.node import gpu_use
from p2ptrain.node.gpu_use import READ_SECONDS, UNTOLD, WATTS_MAX, Energy, Nvml, meter_of
from p2ptrain.observe.rounds import Recorder
from p2ptrain.observe.schema import Mine
from tests.helpers.net import skipping_time

ROOT = Path(__file__).parents[2]
HANGS = """
import asyncio, threading
from p2ptrain.node.gpu_use import Energy

def read():
    print("reading", flush=True)
    threading.Event().wait()

async def main():
    watching = asyncio.create_task(Energy(lambda: read, print, lambda: True).watch())
    await asyncio.sleep(0.2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)

asyncio.run(main())
"""


class MeteredCard:
    """A card, and its handle: what NVML tells of it."""

    def __init__(self, millijoules: int | None, milliwatts: int | None = None) -> None:
        self.millijoules, self.milliwatts = millijoules, milliwatts

    def energy(self) -> int:
        return self._give(self.millijoules)

    def power(self) -> int:
        return self._give(self.milliwatts)

    def _give(self, number: int | None) -> int:
        if number is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return number


@pytest.fixture
def _cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that takes a MeteredCard for the device that it is."""
    monkeypatch.setattr(gpu_use, "handle_of", lambda card: card)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", MeteredCard.energy)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", MeteredCard.power)


def meter_of_card(card: MeteredCard, *clock: Callable[[], float]) -> Nvml:
    return Nvml(cast(torch.device, card), *clock)


class MeterLooks:
    """Reads one meter at times set by the test."""

    def __init__(self, meter: Nvml) -> None:
        self.now = 1_000.0
        self.energy = Energy(lambda: meter.read, lambda joules: None, lambda: True, lambda: self.now)

    def after(self, seconds: float) -> float | None:
        self.now += seconds
        return self.energy.look()


@pytest.mark.usefixtures("_cards")
def test_a_counter_that_began_anew_counts_for_nothing() -> None:
    card = MeteredCard(9_000_000)
    looks = MeterLooks(meter_of_card(card))
    assert looks.after(0) is None, "the first has nothing to compare with"
    card.millijoules = 1_000  # the driver was loaded again
    assert looks.after(10) is None
    card.millijoules = 501_000
    assert looks.after(10) == pytest.approx(500.0), "and it goes on from there"
    card.millijoules = int(501_000 + WATTS_MAX * 10 * 1_000 + 1)
    assert looks.after(10) is None, "no card draws that"


@pytest.mark.usefixtures("_cards")
def test_a_card_tells_its_energy_or_its_power() -> None:
    card = MeteredCard(millijoules=1_000_000, milliwatts=1)
    looks = MeterLooks(meter_of_card(card))
    looks.after(0)
    card.millijoules = 8_000_000
    assert looks.after(10) == 7_000.0
    old, now = MeteredCard(millijoules=None, milliwatts=250_000), [0.0]
    looks = MeterLooks(meter_of_card(old, lambda: now[0]))
    looks.after(0)
    now[0] = 10.0
    assert looks.after(10) == 2_500.0
    now[0] += 3_600.0  # the machine slept: it did not draw that all the time
    assert looks.after(3_600) == 250.0 * 2 * READ_SECONDS
    with pytest.raises(pynvml.NVMLError):
        meter_of_card(MeteredCard(None)).read()


def no_driver() -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_does_not_tell_is_no_meter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    with pytest.raises(UNTOLD):
        meter_of(torch.device(device))


def counted(rounds: Recorder, make: Callable[[], Callable[[], float]], paused: list[bool]) -> Energy:
    times = itertools.count(0, 10)
    return Energy(make, rounds.note_energy, lambda: not paused.pop(0), lambda: next(times))


class Meters:
    """A meter that counts ten joules per reading and fails after some readings."""

    def __init__(self, readings: int, then: Exception) -> None:
        self.readings, self.then, self.count = readings, then, 0

    def read(self) -> float:
        self.count += 1
        if self.count > self.readings:
            raise self.then
        return 10.0 * self.count


@pytest.mark.parametrize(
    "then", [OSError("gone"), ValueError("no number"), AttributeError("no function"), RuntimeError("CUDA error")]
)
async def test_it_is_counted_while_the_node_is_not_paused_until_the_meter_tells_no_more(
    then: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_use, "READ_SECONDS", 0.0)
    rounds: Any = Recorder.__new__(Recorder)
    rounds.mine = Mine(tokens=5, energy_joules=100.0)
    meter = Meters(5, then)
    await counted(rounds, lambda: meter.read, [False, True, False, False]).watch()
    assert rounds.mine == Mine(tokens=5, energy_joules=130.0)


@skipping_time
async def test_a_device_that_does_not_tell_has_used_nothing_that_is_known() -> None:
    def none() -> Callable[[], float]:
        raise OSError

    rounds: Any = Recorder.__new__(Recorder)
    rounds.mine = Mine()
    await counted(rounds, none, []).watch()
    assert rounds.mine.energy_joules is None


def test_a_meter_that_never_answers_does_not_hold_up_the_end_of_a_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "reading\n", "")
