"""Carries out what the owner asks for while the node runs: pause, resume, limits, a checkpoint or an audit now.

Their effect lasts until the daemon ends; permanent settings belong in the node's config. That file is not read again
while the node runs, not even on SIGHUP: most of its keys could not take effect then, and a signal cannot return an
error, while a request is checked at once and answered with the settings now in force. Requests come only over the
control socket (control.py).
"""

from __future__ import annotations

import logging
from typing import Any

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.errors import DataError
from p2ptrain.identity import key_of
from p2ptrain.node.driver import Driver
from p2ptrain.node.limits import MachineLimits

log = logging.getLogger("p2ptrain.node")


async def carry_out(driver: Driver, machine_limits: MachineLimits, request: dict[str, Any]) -> dict[str, Any]:
    """Carries out a request and returns the round saved, or whether the node is paused; limits are in the status."""
    match request["do"]:
        case "pause":
            _pause(driver)
        case "resume":
            _resume(driver)
        case "limit":
            _limit(driver, machine_limits, request)
        case "checkpoint":
            return {"round": await save_now(driver)}
        case "audit":
            return await measure(driver, request)
    return {"is_paused": bool(driver.trainings.pauses), "pauses": [each.text for each in driver.trainings.pauses]}


def _pause(driver: Driver) -> None:
    if Code.PAUSED not in driver.trainings.pauses:
        log.info("paused by its owner: training stops after the current one; the node goes on voting and applying")
        driver.trainings.pauses.begin(complaint(Code.PAUSED))


def _resume(driver: Driver) -> None:
    if Code.PAUSED in driver.trainings.pauses:
        log.info("training resumed by its owner")
        driver.trainings.pauses.end(Code.PAUSED)


def _limit(driver: Driver, machine_limits: MachineLimits, request: dict[str, Any]) -> None:
    """Changes the limits that the request names."""
    machine_limits.change(request)
    driver.edges.upload.set_rate(machine_limits.limits.upload_bytes_per_second)
    driver.edges.download.set_rate(machine_limits.limits.download_bytes_per_second)


async def measure(driver: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """Measures a contribution again, as all members do when they are summoned, and returns what was found."""
    view = driver.node.view()
    number, peer = request.get("round"), request.get("peer")
    if not isinstance(number, int) or isinstance(number, bool) or not isinstance(peer, str):
        raise DataError("an audit needs a round and a peer id")
    order = view.audit_of(number, key_of(peer))
    if isinstance(order, str):
        raise DataError(order)
    match = await driver.audits.measure(order)
    return {
        "z": match.z,
        "strength": match.strength,
        "sequences": order.sequences,
        "typical_z": view.state.typical / 1_000,
    }


async def save_now(driver: Driver) -> int:
    """Saves the current state and returns its round."""
    persistence, standings, number = driver.edges.persistence, driver.replica.standings, driver.replica.replica.round
    if not standings:  # that of a round just being applied is noted before a copy can be made
        raise DataError("no state to save yet: no round has been applied since the node started")
    saved = number if persistence.has(number) else await persistence.save(driver.worker, standings)
    if saved is None:
        raise DataError("the state was not saved; see the daemon's log")
    return saved
