"""Faults: schedules the faults of a scenario.

Each fault is a few actions in the calendar. After the last one ends, the swarm has to recover by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from msgspec.structs import replace

from p2ptrain.core.admission import decode_claim, make_claim, make_ticket
from p2ptrain.core.events import StopRequested
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError
from p2ptrain.sim import liars
from p2ptrain.sim import scenario as sc
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.network import bits
from p2ptrain.sim.succession import motion_for

SLEEP_SECONDS = 10.0  # until the connections of a sleeping machine are closed
START_SECONDS = 0.2  # all processes start within this time
LAST_ROUND = 2**40  # when invitations expire: later than any round of a simulation
FUSE_MAX = 12  # effects before a SIGKILL that hits between two of them


def begin(cluster: Cluster) -> None:
    for node in cluster.nodes:
        cluster.calendar.after(0.0, START_SECONDS, cluster.start, node)
    for number, fault in enumerate(cluster.setup.scenario.fault):
        _ACTIONS[type(fault)](cluster, number, fault)
    cluster.calendar.at(cluster.setup.scenario.end_of_faults, cluster.goal.look, True)  # from here on it has to recover


def _picked(cluster: Cluster, nodes: sc.Nodes) -> list[SimNode]:
    return [cluster.nodes[index] for index in cluster.setup.scenario.pick(nodes) if index < len(cluster.nodes)]


def _strike(cluster: Cluster, number: int, fault: Any) -> None:
    _each(cluster, fault.at, fault.nodes, partial(_ON_EACH[type(fault)], cluster, fault))


def _each(cluster: Cluster, at: float, nodes: sc.Nodes, act: Callable[[SimNode], None]) -> None:
    def act_on_all() -> None:
        for node in _picked(cluster, nodes):
            act(node)

    cluster.calendar.at(at, act_on_all)


# -- Processes --------------------------------------------------------------------------------------


def _crash(cluster: Cluster, number: int, fault: sc.Crash) -> None:
    def down(node: SimNode) -> None:
        cluster.kill(node)
        if fault.until is None:
            node.die()

    _each(cluster, fault.at, fault.nodes, down)
    if fault.until is not None:
        _each(cluster, fault.until, fault.nodes, lambda node: _restart(cluster, node, fault.forgetful))


def _restart(cluster: Cluster, node: SimNode, forgetful: bool = False) -> None:
    if not node.alive and not node.is_gone:
        cluster.start(node, forgetful)


def _storm(cluster: Cluster, number: int, fault: sc.Storm) -> None:
    draw = cluster.setup.stream("storm", number)
    for index in cluster.setup.scenario.pick(fault.nodes):
        _next_kill(cluster, fault, draw, index, fault.at)


def _next_kill(cluster: Cluster, fault: sc.Storm, draw: Random, index: int, now: float) -> None:
    at = now + draw.expovariate(1.0 / fault.every_seconds)
    if at < fault.until:
        cluster.calendar.at(at, _kill, cluster, fault, draw, index)


def _kill(cluster: Cluster, fault: sc.Storm, draw: Random, index: int) -> None:
    node = cluster.nodes[index]
    down = sum(not each.alive and not each.is_gone for each in _picked(cluster, fault.nodes))
    if node.alive and down < fault.at_once:
        if draw.random() < 0.5:
            cluster.kill(node)
        else:
            node.process.light_fuse(draw.randint(1, FUSE_MAX))
        seconds = draw.expovariate(1.0 / fault.down_seconds) if fault.down_seconds else 0.0
        cluster.calendar.at(min(cluster.calendar.now + seconds, fault.until), _after_kill, cluster, fault, node)
    _next_kill(cluster, fault, draw, index, cluster.calendar.now)


def _after_kill(cluster: Cluster, fault: sc.Storm, node: SimNode) -> None:
    if node.process.fuse is not None:  # it has carried out no effect since
        cluster.kill(node)
    _restart(cluster, node)


def _sleep(cluster: Cluster, number: int, fault: sc.Sleep) -> None:
    def fall_asleep() -> None:
        for node in _picked(cluster, fault.nodes):
            if node.alive:
                node.process.sleep(fault.until)
                cluster.calendar.timer(node, fault.until, cluster.wake, node)
        cluster.calendar.at(min(fault.at + SLEEP_SECONDS, fault.until), reconnect)

    def reconnect() -> None:
        cluster.topology.refresh(*_picked(cluster, fault.nodes))

    cluster.calendar.at(fault.at, fall_asleep)
    cluster.calendar.at(fault.until, reconnect)


def _slow_disk(cluster: Cluster, number: int, fault: sc.SlowDisk) -> None:
    executor = cluster.executor
    _each(cluster, fault.at, fault.nodes, lambda node: executor.slow_disk(node, fault.fsync_seconds))
    _each(cluster, fault.until, fault.nodes, lambda node: executor.slow_disk(node, None))


# -- The network ------------------------------------------------------------------------------------


def _partition(cluster: Cluster, number: int, fault: sc.Partition) -> None:
    groups = [bits(cluster.setup.scenario.pick(group)) for group in fault.groups]
    pairs = [(one, other) for one in groups for other in groups if one != other]
    if fault.one_way:
        pairs = [(other, groups[0]) for other in groups[1:]]

    def change(wanted: list[tuple[int, int]]) -> None:
        if bool(wanted) != (number in cluster.network.cuts):
            cluster.network.cut(number, wanted)
            cluster.topology.refresh(*cluster.nodes)

    times = [fault.at]
    while fault.flap_seconds and times[-1] + fault.flap_seconds < fault.until:
        times.append(times[-1] + fault.flap_seconds)
    for place, time in enumerate(times):
        cluster.calendar.at(time, change, [] if place % 2 else pairs)
    cluster.calendar.at(fault.until, change, [])


def _clog(cluster: Cluster, number: int, fault: sc.Clog) -> None:
    sources = bits(cluster.setup.scenario.pick(fault.nodes))
    cluster.calendar.at(fault.at, cluster.network.clog, number, sources, fault.until)
    cluster.calendar.at(fault.until, cluster.network.unclog, number)


def _lossy(cluster: Cluster, number: int, fault: sc.Lossy) -> None:
    links = cluster.setup.scenario.links
    worse = replace(links, loss=fault.loss, duplicate=fault.duplicate, reorder=fault.reorder)
    cluster.calendar.at(fault.at, cluster.network.change, worse)
    cluster.calendar.at(fault.until, cluster.network.change, links)


def _lose(cluster: Cluster, number: int, fault: sc.Lose) -> None:
    authors, kinds = bits(cluster.setup.scenario.pick(fault.nodes)), frozenset(fault.messages)
    cluster.calendar.at(fault.at, cluster.network.lose, number, authors, kinds)
    cluster.calendar.at(fault.until, cluster.network.lose, number, 0, frozenset())


# -- Membership and lies ----------------------------------------------------------------------------


def _join(cluster: Cluster, number: int, fault: sc.Newcomers) -> None:
    def join() -> None:
        for _ in range(fault.count):
            newcomer = cluster.setup.signer(len(cluster.nodes))
            node = cluster.add_node(_claim(cluster, newcomer, fault.ticket))
            cluster.topology.introduce(node)
            cluster.start(node)

    cluster.calendar.at(fault.at, join)


def _claim(cluster: Cluster, newcomer: FakeSigner, kind: str) -> bytes:
    shown = next((node.claim for node in reversed(cluster.nodes) if node.claim), b"")
    if kind == "none" or (kind in ("spent", "stolen") and not shown):
        return b""
    if kind == "stolen":
        return shown
    scenario = cluster.setup.scenario
    hosts = [cluster.nodes[index].signer for index in scenario.pick(scenario.admission_keys)[:1]]
    signer = newcomer if kind == "false" or not hosts else hosts[0]
    run_id, bearer = cluster.setup.run_id, digest("simulated invitation", newcomer.key)
    ticket = make_ticket(signer.key, signer.sign, run_id, bearer, 1, 1 if kind == "expired" else LAST_ROUND)
    if kind == "spent":
        ticket = decode_claim(shown).ticket
    return make_claim(ticket, FakeSigner(run_id, ticket.bearer).sign, run_id, newcomer.key)


def _move(cluster: Cluster, number: int, fault: sc.OwnersMove) -> None:
    draw = cluster.setup.stream("motions", number)

    def move(node: SimNode) -> None:
        if node.core is not None:
            cluster.give(node, motion_for(node.core.view(), fault, draw))

    _each(cluster, fault.at, fault.nodes, move)


def _lie(cluster: Cluster, number: int, fault: sc.Lie) -> None:
    if fault.how not in liars.KINDS:
        fix = f"Choose {', '.join(liars.KINDS)}"
        raise ConfigError(f"no liar does {fault.how!r}", key=f"fault[{number}].how", fix=fix)
    make = liars.KINDS[fault.how]

    def begin_to_lie(node: SimNode) -> None:
        node.lie(make(cluster.setup.stream("liar", node.index), node.signer, cluster))

    _each(cluster, fault.at, fault.nodes, begin_to_lie)
    if fault.until is not None:
        _each(cluster, fault.until, fault.nodes, lambda node: node.lie(None))


_ON_EACH: dict[type, Callable[[Cluster, Any, SimNode], None]] = {  # faults that strike each of their nodes once
    sc.Clock: lambda cluster, fault, node: cluster.set_clock(node, fault.jump_seconds, fault.rate),
    sc.Stall: lambda cluster, fault, node: node.accelerator.stall(fault.until),
    sc.Flip: lambda cluster, fault, node: node.state.flip_a_bit(),
    sc.Departure: lambda cluster, fault, node: cluster.give(node, StopRequested()),
}
_ACTIONS: dict[type, Callable[[Cluster, int, Any], None]] = {
    **dict.fromkeys(_ON_EACH, _strike),
    sc.Crash: _crash,
    sc.Storm: _storm,
    sc.Sleep: _sleep,
    sc.SlowDisk: _slow_disk,
    sc.Partition: _partition,
    sc.Clog: _clog,
    sc.Lossy: _lossy,
    sc.Lose: _lose,
    sc.Newcomers: _join,
    sc.OwnersMove: _move,
    sc.Lie: _lie,
}
