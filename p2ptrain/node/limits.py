"""A good guest: what the node takes of a machine that is somebody's.

    hours           it trains in these only, by the machine's own clock
    on_battery      "pause": not while the machine runs on its battery
    device_percent  between two steps it rests, so that the device works that part of the time
    memory_bytes    a run that needs more is refused at the start; afterwards it is watched, and told
    nice            how far it steps back where processes compete, from the start on, its p2pd as well

Outside its hours and on battery the node does what `p2ptrain pause` has it do: the training that runs is the last, and
it goes on voting and applying. The owner's pause is a reason of its own: each holds until it is lifted.

Memory cannot be given back at a word: a limit on the address space would have torch fail in the middle of a round, and
what is taken is weights and gradients. So it is counted before anything is made (learn/memory.py), and what the
process takes later is told. Who wants it enforced has the system do it (MemoryMax= of systemd, a container's limit).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import ValidationError

from p2ptrain.config import LimitsConfig, NodeConfig, RunConfig
from p2ptrain.config.text import allowed
from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.errors import ConfigError, TooLargeError

if TYPE_CHECKING:
    from p2ptrain.node.device import Device

LOOK_SECONDS = 5.0  # between looks at clock, battery and memory: a plug that is pulled costs some seconds of charge
LESS_MEMORY = "Close other programs, set device.checkpointing = true, or take a run of a smaller model"
# What `p2ptrain limit` changes here, by its option.
KEYS = {"hours": "hours", "percent": "device_percent", "memory": "memory_bytes", "battery": "on_battery"}

log = logging.getLogger("p2ptrain.daemon")


# ---------------------------------------------------------------------------------------------------
# Decisions


def is_within(hours: str, now: datetime) -> bool:
    """Whether it may train now; hours may go over midnight, their end is no longer in them."""
    if not hours:
        return True
    start, _, end = hours.partition("-")
    time = f"{now:%H:%M}"
    return start <= time < end if start < end else time >= start or time < end


def reasons_to_pause(limits: LimitsConfig, now: datetime, is_on_battery: bool) -> list[Complaint]:
    found = []
    if not is_within(limits.hours, now):
        found.append(complaint(Code.OUTSIDE_HOURS, hours=limits.hours, until=limits.hours[:5]))
    if is_on_battery and limits.on_battery == "pause":
        found.append(complaint(Code.ON_BATTERY))
    return found


def rest_seconds(worked: float, percent: int) -> float:
    """How long to rest after so much work."""
    return worked * (100 - percent) / percent


def over_memory(limits: LimitsConfig, resident: int) -> Complaint | None:
    if not limits.memory_bytes or resident <= limits.memory_bytes:
        return None
    return complaint(Code.OVER_MEMORY, used_bytes=resident, limit_bytes=limits.memory_bytes)


def _changes(order: dict[str, Any]) -> dict[str, Any]:
    return {key: order[option] for option, key in KEYS.items() if order.get(option) is not None}


def changed(limits: LimitsConfig, order: dict[str, Any]) -> LimitsConfig:
    """As `p2ptrain limit` says; what is not named stays. ConfigError: one is not possible."""
    try:
        return LimitsConfig.model_validate({**limits.model_dump(), **_changes(order)})
    except ValidationError as error:
        place = error.errors(include_url=False)[0]["loc"]
        key = str(place[0]) if place else "hours"  # the one check of all of them is about these
        option = next(option for option, name in KEYS.items() if name == key)
        fix = f"Give {allowed(LimitsConfig.model_fields[key])}"
        raise ConfigError(f"{order[option]!r} is not possible", key=f"--{option}", fix=fix) from error


def refuse_too_large(run: RunConfig, config: NodeConfig) -> None:
    """Tell what the run takes. ConfigError if the config allows less, TooLargeError if this machine never has as much.

    What others take now may be free later, and a pass may be made smaller: both are only warned of.
    """
    from p2ptrain.learn.memory import rooms_of  # noqa: PLC0415  # torch: two seconds, in which an error could be told
    from p2ptrain.learn.shortage import mega  # noqa: PLC0415

    rooms = rooms_of(run, config.device)
    log.info("run %s takes about %s", run.name, " and ".join(each.takes for each in rooms))
    limit = config.limits.memory_bytes
    if limit and rooms[0].needed > limit:
        what = f"run {run.name} takes about {rooms[0].takes}, and {mega(limit)} are allowed"
        raise ConfigError(what, key="limits.memory_bytes", fix="Raise it, or train a run of a smaller model")
    for each in rooms:
        if each.level == "failed":
            least = f"{mega(each.least)} even with one sequence a pass"
            what = f"run {run.name} takes about {each.takes}, {least}, and there are {mega(each.total)}"
            raise TooLargeError(what, fix=LESS_MEMORY)
        if each.level == "warning":
            log.warning("only %s of %s are free now. %s", mega(each.free), each.what, LESS_MEMORY)


# ---------------------------------------------------------------------------------------------------
# The machine


def is_on_battery() -> bool:
    """A machine without one, or one that does not tell, counts as plugged in."""
    try:
        battery = psutil.sensors_battery()
    except (OSError, ValueError, AttributeError):  # files of the kernel's that are there and cannot be read
        return False
    return battery is not None and battery.power_plugged is False


def resident_bytes() -> int:
    """Main memory of this process and of those that it has started."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended
            total += process.memory_info().rss
    return total


def be_nice(nice: int) -> None:
    """Before any thread and any process is started: they take it from who starts them. It only ever steps back."""
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)


class Pauses:
    """Why the node is to begin no other training. To the core, and to the others, it is one that trains slowly."""

    def __init__(self) -> None:
        self._reasons: dict[Code, Complaint] = {}
        self._are_over = asyncio.Event()
        self._are_over.set()

    def __contains__(self, code: Code) -> bool:
        return code in self._reasons

    def __iter__(self) -> Iterator[Complaint]:
        return iter([*self._reasons.values()])

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def begin(self, why: Complaint) -> None:
        self._reasons[why.code] = why
        self._are_over.clear()

    def end(self, code: Code) -> None:
        """As far as this reason goes: there may be others."""
        self._reasons.pop(code, None)
        if not self._reasons:
            self._are_over.set()

    async def are_over(self) -> None:
        await self._are_over.wait()


class MachineLimits:
    """Of one node: looks at the machine now and then, and pauses and resumes."""

    def __init__(
        self,
        limits: LimitsConfig,
        pauses: Pauses,
        device: Device,
        clock: Callable[[], datetime] = datetime.now,
        battery: Callable[[], bool] = is_on_battery,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self.over_memory: Complaint | None = None
        self._pauses, self._device = pauses, device
        self._clock, self._battery, self._resident = clock, battery, resident
        self._set(limits)

    def _set(self, limits: LimitsConfig) -> None:
        self.limits = limits
        self._device.percent = limits.device_percent

    def change(self, order: dict[str, Any]) -> None:
        """As `p2ptrain limit` says; what is not named stays. ConfigError: one is not possible, and all stay."""
        changes = _changes(order)
        if not changes:
            return
        self._set(changed(self.limits, order))
        log.info("limits: %s", ", ".join(f"{key} = {value!r}" for key, value in changes.items()))
        self.look()

    def look(self) -> None:
        """Pause and resume as it should be now."""
        limits = self.limits
        now = reasons_to_pause(limits, self._clock(), limits.on_battery == "pause" and self._battery())
        for each in now:  # the health says which hold, and what comes and goes there is told (news.py)
            self._pauses.begin(each)
        for code in {Code.OUTSIDE_HOURS, Code.ON_BATTERY} - {each.code for each in now}:
            self._pauses.end(code)
        self.over_memory = over_memory(limits, self._resident()) if limits.memory_bytes else None

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)
