"""Carries out the owner's orders while the node runs: pause, resume, limits, a checkpoint now.

Their effect lasts until the daemon ends; permanent settings belong in the node's config. That file is not read again
while the node runs, not even on SIGHUP: most of its keys could not take effect then, and a signal cannot return an
error, while an order is checked at once and answered with the settings now in force. Orders come only over the control
socket (control.py).
"""

from __future__ import annotations

import logging
from typing import Any

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.node.driver import Driver
from p2ptrain.node.limits import MachineLimits

RATE_MAX = 10**12  # bytes a second, as in the config

log = logging.getLogger("p2ptrain.node")


async def obey(driver: Driver, machine_limits: MachineLimits, order: dict[str, Any]) -> dict[str, Any]:
    """Carries out an order and returns the round saved, or whether the node is paused; limits are in the status."""
    match order["do"]:
        case "pause":
            _pause(driver)
        case "resume":
            _resume(driver)
        case "limit":
            _limit(driver, machine_limits, order)
        case "checkpoint":
            return {"round": await save_now(driver)}
    return {"is_paused": bool(driver.pauses), "pauses": [each.text for each in driver.pauses]}


def _pause(driver: Driver) -> None:
    if Code.PAUSED not in driver.pauses:
        log.info("paused by its owner: training stops after the current one; the node goes on voting and applying")
        driver.pauses.begin(complaint(Code.PAUSED))


def _resume(driver: Driver) -> None:
    if Code.PAUSED in driver.pauses:
        log.info("training resumed by its owner")
        driver.pauses.end(Code.PAUSED)


def _limit(driver: Driver, machine_limits: MachineLimits, order: dict[str, Any]) -> None:
    """Changes the limits that the order names."""
    rates = {name: order[name] for name in ("upload", "download") if order.get(name) is not None}
    for name, rate in rates.items():
        if not isinstance(rate, int) or isinstance(rate, bool) or not 0 <= rate <= RATE_MAX:
            fix = f"Give bytes a second, from 0 (no limit) to {RATE_MAX:,}"
            raise ConfigError(f"{rate!r} is not valid", key=f"--{name}", fix=fix)
    threads = order.get("threads")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= 1_024):
        raise ConfigError(f"{threads!r} is not valid", key="--threads", fix="Give a number from 1 to 1,024")
    machine_limits.change(order)
    if threads is not None:
        driver.worker.set_threads(threads)
        log.info("threads of the next training: %d", threads)
    for name, rate in rates.items():
        bucket = driver.edges.upload if name == "upload" else driver.edges.download
        bucket.set_rate(rate)
        log.info("%s limit: %s", name, f"{rate:,} bytes/s" if rate else "none")


async def save_now(driver: Driver) -> int:
    """Saves the current state and returns its round."""
    persistence, standings, number = driver.edges.persistence, driver.replica.standings, driver.replica.replica.round
    if number not in standings:
        raise DataError("no state to save yet: no round has been applied since the node started")
    saved = number if persistence.has(number) else await persistence.save(driver.worker, standings)
    if saved is None:
        raise DataError("the state was not saved; see the daemon's log")
    return saved
