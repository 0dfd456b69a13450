"""Carries out what the owner asks for while the node runs: pause, resume, limits, a checkpoint or an audit now, and
what the run is to do next (agenda.py).

Their effect lasts until the daemon ends; permanent settings belong in the node's config. That file is not read again
while the node runs, not even on SIGHUP: most of its keys could not take effect then, and a signal cannot return an
error, while a request is checked at once and answered with the settings now in force. Requests come by control.py."""

from __future__ import annotations

import logging
from typing import Any

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.messages import NUMBER_MAX
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.identity import key_of
from p2ptrain.node.agenda import Agenda
from p2ptrain.node.driver import Driver
from p2ptrain.node.limits import MachineLimits

log = logging.getLogger("p2ptrain.node")


async def carry_out(
    driver: Driver, machine_limits: MachineLimits, agenda: Agenda, request: dict[str, Any]
) -> dict[str, Any]:
    """Carries out a request and returns what came of it."""
    pauses = driver.trainings.pauses
    match request.get("do"):
        case "pause":
            if Code.PAUSED not in pauses:
                log.info("paused by its owner: training stops after the current one; the node votes and applies on")
                pauses.begin(complaint(Code.PAUSED))
        case "resume":
            if Code.PAUSED in pauses:
                log.info("training resumed by its owner")
                pauses.end(Code.PAUSED)
        case "limit":
            machine_limits.change(request)
            driver.edges.upload.set_rate(machine_limits.limits.upload_bytes_per_second)
            driver.edges.download.set_rate(machine_limits.limits.download_bytes_per_second)
            return machine_limits.limits.model_dump()
        case "checkpoint":
            return {"round": await save_now(driver)}
        case "audit":
            return await measure(driver, request)
        case "propose" | "assent" | "withdraw":
            return await _decide(agenda, request)
        case _:
            return {"error": "unknown request"}
    return {"is_paused": bool(pauses), "pauses": [each.text for each in pauses]}


async def _decide(agenda: Agenda, request: dict[str, Any]) -> dict[str, Any]:
    """Moves that the run go on as another, assents to that, or withdraws an assent; returns what this means."""
    match request:
        case {"do": "propose", "settings": dict(settings)}:
            last, back_to = _round_in(request, "after"), _round_in(request, "back_to")
            motion = await agenda.propose(settings, last, back_to, str(request.get("data", "")))
            item = agenda.item(motion)
            return {"motion": item.motion, "text": item.text, "needed": item.needed}
        case {"do": "assent", "motion": str(name)} if name:
            return {"text": await agenda.assent(name)}
        case {"do": "withdraw"}:
            return {"text": await agenda.withdraw()}
    raise DataError("a motion needs its settings, and an assent the name of a motion")


def _round_in(request: dict[str, Any], name: str) -> int | None:
    number = request.get(name)
    if number is not None and (type(number) is not int or not 0 <= number < NUMBER_MAX):
        raise ConfigError("is no round", key=f"--{name.replace('_', '-')}", fix="Give a number from 0 on")
    return number


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
    persistence, standings, number = driver.edges.persistence, driver.replica.standings, driver.replica.replica.round
    if not standings:  # that of a round just being applied is noted before a copy can be made
        raise DataError("no state to save yet: no round has been applied since the node started")
    saved = number if await persistence.has(number) else await persistence.save(driver.worker, standings)
    if saved is None:
        raise DataError("the state was not saved; see the daemon's log")
    return saved
