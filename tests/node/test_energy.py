"""The device's energy, measured with a file tree like Linux's and a library like the one of NVIDIA's driver."""

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

from p2ptrain.node import energy
from p2ptrain.node.energy import LOOK_SECONDS, UNTOLD, WATTS_MAX, Energy, Meter, Nvml, Rapl, meter_of
from p2ptrain.observe.rounds import Recorder
from p2ptrain.observe.schema import Mine
from tests.helpers.net import skipping_time

ROOT = Path(__file__).parents[2]
RANGE = 262_143_328_850  # microjoules, an Intel processor's
HANGS = """
import asyncio, threading
from p2ptrain.node.energy import Energy

class Meter:
    def read(self):
        print("reading", flush=True)
        threading.Event().wait()

async def main():
    watching = asyncio.create_task(Energy(Meter, print, lambda: True).watch())
    await asyncio.sleep(0.2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)

asyncio.run(main())
"""


def zone(directory: Path, name: str, what: str, microjoules: int) -> Path:
    made = directory / name
    made.mkdir(parents=True, exist_ok=True)
    for file, content in (("name", what), ("energy_uj", microjoules), ("max_energy_range_uj", RANGE)):
        (made / file).write_text(f"{content}\n")
    return made / "energy_uj"


class Card:
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
    """A driver that takes a Card for the device that it is."""
    monkeypatch.setattr(energy, "handle_of", lambda card: card)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", Card.energy)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", Card.power)


def meter_of_card(card: Card, *clock: Callable[[], float]) -> Nvml:
    return Nvml(cast(torch.device, card), *clock)


class Looks:
    """Reads one meter at times set by the test."""

    def __init__(self, meter: Meter) -> None:
        self.now = 1_000.0
        self.energy = Energy(lambda: meter, lambda joules: None, lambda: True, lambda: self.now)

    def after(self, seconds: float) -> float | None:
        self.now += seconds
        return self.energy.look()


def test_the_processors_and_no_part_of_them_twice(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 7_000_000)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    whole = zone(tmp_path, "intel-rapl:2", "psys", 1_000_000)
    looks = Looks(Rapl(tmp_path))
    assert looks.after(0) is None, "the first has nothing to compare with"
    for path, number in ((first, 105_000_000), (second, 57_000_000), (core, 90_000_000), (whole, 90_000_000)):
        path.write_text(str(number))
    assert looks.after(10) == pytest.approx(150.0)
    assert looks.after(10) == 0.0


def test_a_counter_that_goes_round_goes_on(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 40_000_000)
    looks = Looks(Rapl(tmp_path))
    looks.after(0)
    path.write_text("60000000")
    assert looks.after(10) == pytest.approx(100.0)


@pytest.mark.usefixtures("_cards")
def test_a_counter_that_began_anew_counts_for_nothing(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", 150_000_000_000)
    looks = Looks(Rapl(tmp_path))
    looks.after(0)
    path.write_text("1000000")  # the machine slept: going round would be 11 kW
    assert looks.after(10) is None
    path.write_text("501000000")
    assert looks.after(10) == pytest.approx(500.0), "and it goes on from there"
    card = Card(9_000_000)
    looks = Looks(meter_of_card(card))
    looks.after(0)
    card.millijoules = 1_000  # the driver was loaded again
    assert looks.after(10) is None
    card.millijoules = int(1_000 + 2 * WATTS_MAX * 10 * 1_000)
    assert looks.after(10) is None, "no card draws that"


@pytest.mark.usefixtures("_cards")
def test_a_card_tells_its_energy_or_its_power() -> None:
    card = Card(millijoules=1_000_000, milliwatts=1)
    looks = Looks(meter_of_card(card))
    looks.after(0)
    card.millijoules = 8_000_000
    assert looks.after(10) == 7_000.0
    old, now = Card(millijoules=None, milliwatts=250_000), [0.0]
    looks = Looks(meter_of_card(old, lambda: now[0]))
    looks.after(0)
    now[0] = 10.0
    assert looks.after(10) == 2_500.0
    now[0] += 3_600.0  # the machine slept: it did not draw that all the time
    assert looks.after(3_600) == 250.0 * 2 * LOOK_SECONDS
    with pytest.raises(pynvml.NVMLError):
        meter_of_card(Card(None)).read()


def no_driver() -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def test_what_does_not_tell_is_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    for make in (
        lambda: Rapl(tmp_path / "not there"),
        lambda: meter_of(torch.device("cuda")),
        lambda: meter_of(torch.device("meta")),
    ):
        with pytest.raises(UNTOLD):
            make()


def counted(rounds: Recorder, make: Callable[[], Meter], paused: list[bool]) -> Energy:
    times = itertools.count(0, 10)
    return Energy(make, rounds.note_energy, lambda: not paused.pop(0), lambda: next(times))


class Meters:
    """A meter that counts ten joules per reading and fails after some readings."""

    def __init__(self, readings: int, then: Exception) -> None:
        self.readings, self.then, self.count = readings, then, 0

    def read(self) -> list[tuple[float, float]]:
        self.count += 1
        if self.count > self.readings:
            raise self.then
        return [(10.0 * self.count, 0.0)]


@pytest.mark.parametrize(
    "then", [OSError("gone"), ValueError("no number"), AttributeError("no function"), RuntimeError("CUDA error")]
)
async def test_it_is_counted_while_the_node_is_not_paused_until_the_meter_tells_no_more(
    then: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "LOOK_SECONDS", 0.0)
    rounds: Any = Recorder.__new__(Recorder)
    rounds.mine = Mine(tokens=5, energy_joules=100.0)
    meter = Meters(5, then)
    await counted(rounds, lambda: meter, [False, True, False, False]).watch()
    assert rounds.mine == Mine(tokens=5, energy_joules=130.0)


@skipping_time
async def test_a_device_that_does_not_tell_has_used_nothing_that_is_known() -> None:
    def none() -> Meter:
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
