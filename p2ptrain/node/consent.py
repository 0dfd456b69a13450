"""Shows the owner what a run asks of this machine, and asks whether to take part, before anything of it is fetched.

Only a terminal is asked, and only about a run that this data directory has not taken part in. Elsewhere the same goes
to the log, and the node goes on. A daemon thread waits for the answer, with descriptors alone: a thread in a read of
Python's own stdin holds its lock, and the process could not end."""

from __future__ import annotations

import asyncio
import logging
import os
import termios
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.config import ModelConfig, RunConfig
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.files import write_all
from p2ptrain.net import questions
from p2ptrain.net.connections import LINKS_MAX
from p2ptrain.net.tasks import in_daemon_thread
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node.find import RunSources
from p2ptrain.node.home import Home
from p2ptrain.node.limits import disk_demand
from p2ptrain.visible import count_of, few

if TYPE_CHECKING:
    from p2ptrain.train.memory import Need

WATCH_SECONDS = 5.0  # for which a run's rounds are counted: longer, and a person wonders why nothing happens
COPIES = 16  # of a message that reach a node in a swarm that gossips: 15 with 24 nodes, and the author's own
ANSWER_BYTES_MAX = 1_024
WIDTH = 8  # characters of the first column
QUESTION = b"take part? [Y/n] "
DECLINED = b"not taking part: nothing was fetched\n"

log = logging.getLogger("p2ptrain.node")


@dataclass(frozen=True, slots=True)
class RoundsSeen:
    """The rounds of a run that ended while this node watched."""

    rounds: int
    seconds: float


async def takes_part(transport: Transport, run: RunConfig, sources: RunSources, home: Home, asks: bool) -> bool:
    """Tells what the run asks of this machine, unless it is known here. Returns False if the owner declines, who is
    asked if `asks` and there is a terminal."""
    if any(each.id == run.id for each in home.runs()):
        return True
    asks = asks and is_at_terminal()
    seen = await watch_rounds(transport, sources, run.id) if asks else None
    members = sources.told.members if sources.told else 0
    terms = await asyncio.to_thread(terms_of, run, home, members, seen)
    if not asks:
        log.info("what the run asks: %s", "; ".join(f"{what} {text}" for what, text in terms.items()))
        return True
    table = "".join(f"{what:<{WIDTH}}  {text}\n" for what, text in terms.items())
    try:
        return await in_daemon_thread(partial(ask, table), (OSError, termios.error))
    except (OSError, termios.error):  # the terminal is gone
        return False


# -- The demands of a run ---------------------------------------------------------------------------


def terms_of(run: RunConfig, home: Home, members: int, seen: RoundsSeen | None) -> dict[str, str]:
    """Returns what the run asks of this machine, by subject. `members`: of its roster, without this node; 0: unknown"""
    from p2ptrain.exact.shortage import mega  # noqa: PLC0415
    from p2ptrain.train.memory import demands_of, need_of  # noqa: PLC0415  # imports torch

    need, demands = need_of(run), demands_of(run, home.config)
    disk = disk_demand(run, home, need, members=members)
    memory = [f"{mega(each.needed)} of {each.what}, {mega(each.free)} are free" for each in demands]
    plugins = " and ".join(sorted({run.model.plugin, run.recipe.plugin} - {""}))
    is_own = run.data.source == "own"
    fetched = "held-out data" if is_own else "data"
    own = {"data": "your own, of which nothing is sent; but contributions, which are sent, are made of it"}
    adapters = f" in adapters of rank {run.adapt.rank}" if run.adapt.is_on else ""
    weights = count_of(need.state + run.adapt.base_bytes)
    at_once = ", and whoever joins counts at once" if run.admission.policy == "open" else ""
    unaudited = {"audits": f"none: nobody can tell whether members train, because {run.why_not_audited}{at_once}"}
    return (
        ({"plug-ins": f"{plugins}, which you have allowed"} if plugins else {})
        | {
            "run": f"{run.name}, {run.run_id}",
            "model": f"{_model_name(run.model)}, {few(need.parameters, 'parameter', 'parameters')}{adapters}",
            "memory": "; ".join(memory),
            "disk": f"{mega(disk.needed)}, and {fetched} as far as there is room; {mega(disk.free)} are free",
            "traffic": traffic_text(run, need, members, seen),
            "at first": f"{weights} of weights are fetched, and {fetched} as it is needed",
        }
        | (own if is_own else {})
        | ({} if run.is_audited else unaudited)
        | ({"world": f"also a node in run {run.world.run}, of which this run is a region"} if run.world.run else {})
    )


def _model_name(model: ModelConfig) -> str:
    if model.hf is not None:
        return f"{model.hf.model_type} ({model.kind})"
    return model.kind if model.preset == "custom" else f"{model.preset} ({model.kind})"


def exchanged_bytes(need: Need, nodes: int) -> int:
    """Returns the bytes of contributions that each of so many nodes receives in a round, and on average sends."""
    return (nodes - 1) * need.payload


def messages_bytes(run: RunConfig, nodes: int) -> int:
    """Estimates the bytes of a round's votes and other messages that reach each of so many nodes, by the simulator's
    count, which daemons that are all connected come close to; larger swarms gossip as well."""
    voters = min(nodes, run.admission.seats_max)
    return (942 * voters - 123 * nodes + 22 * nodes * voters) * (1 if nodes <= LINKS_MAX + 1 else COPIES)


def traffic_text(run: RunConfig, need: Need, members: int, seen: RoundsSeen | None) -> str:
    """Estimates the traffic with this node in the run; what others will fetch from it is unknown."""
    nodes = 1 + max(1, min(members, run.admission.contributors_max - 1))
    messages = messages_bytes(run, nodes)
    size = exchanged_bytes(need, nodes) + messages
    why = f"{few(nodes - 1, 'contribution', 'contributions')} of {need.payload:,} bytes "
    why += f"and {count_of(messages)} of messages in a round"
    if seen is None:
        return f"about {count_of(size)} a round each way: {why}; how long rounds take is not known yet"
    hourly = 3_600 / seen.seconds * size
    if seen.rounds == 0:
        return f"less than {count_of(hourly)} an hour each way: {why} of more than {seen.seconds:.0f} s"
    return f"about {count_of(hourly * seen.rounds)} an hour each way: {why} of {seen.seconds / seen.rounds:.1f} s"


async def watch_rounds(transport: Transport, sources: RunSources, run_id: bytes) -> RoundsSeen | None:
    """Counts the rounds that end meanwhile, as the first peer of the run tells; None if it does not tell."""
    clock = asyncio.get_running_loop().time

    async def look() -> tuple[int, float]:
        told = await questions.ask_runs(transport, sources.peers[0])
        return {each.run_id: each.round for each in told}[run_id], clock()

    try:
        before, began = await look()
        await asyncio.sleep(WATCH_SECONDS)
        after, ended = await look()
    except (TransportError, RemoteProtocolError, LookupError):
        return None
    return RoundsSeen(max(0, after - before), ended - began)


# -- The question -----------------------------------------------------------------------------------


def is_at_terminal() -> bool:
    """Whether somebody can answer here: a shell's background job that reads from its terminal is stopped."""
    try:
        return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def ask(table: str, source: int = 0, target: int = 1) -> bool:
    """Shows the table and asks until there is an answer. The end of the input, such as Ctrl-D, means no."""
    for handler in logging.getLogger().handlers:
        handler.flush()  # what has been logged comes first
    termios.tcflush(source, termios.TCIFLUSH)  # what was typed before the question is no answer
    write_all(target, table.encode())
    while True:
        write_all(target, QUESTION)
        line = os.read(source, ANSWER_BYTES_MAX)
        answer = line.decode(errors="replace").strip().lower()
        if line and answer in ("", "y", "yes"):
            return True
        if not line or answer in ("n", "no"):
            write_all(target, DECLINED if line else b"\n" + DECLINED)
            return False
