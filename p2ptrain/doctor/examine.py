"""Runs all checks of a machine and a config in order, each with its deadline."""

from __future__ import annotations

import asyncio
import re
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.doctor import disk, machine, network
from p2ptrain.doctor.findings import Check, Diagnosis, Level, within
from p2ptrain.errors import (
    ConfigError,
    DeviceError,
    NoDaemonError,
    P2ptrainError,
    RemoteProtocolError,
    SilentDaemonError,
)
from p2ptrain.identity import Identity
from p2ptrain.learn.memory import Need, need_of, rooms_of
from p2ptrain.net import questions
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node import control
from p2ptrain.node.directories import data_directory, identity_file, private_directory, run_directory
from p2ptrain.node.find import ask_around, check_addresses, stored_runs
from p2ptrain.observe.top_frame import troubles
from p2ptrain.store.records import remembered_peers

DAEMON_SECONDS = 5.0  # for a running daemon to answer
QUICK_SECONDS = 10.0  # for checks that only ask the system
TORCH_SECONDS = 120.0  # to load torch from a slow disk, and wake up a driver
DISK_SECONDS = 120.0  # 64 MiB at half a megabyte a second
NETWORK_SECONDS = 90.0  # to start p2pd, ask peers in parallel, and measure bandwidth for 4 s
CONTRIBUTORS_USUAL = 8  # if their number is unknown; a guess


@dataclass(slots=True)
class Patient:
    """Facts about the node under examination, as they become known."""

    config: NodeConfig
    config_file: Path | None
    is_asked_outside: bool  # a bootstrap was named on the command line: checks may cost others some megabytes
    run: RunConfig | None = None
    members: int = 0
    status: dict[str, Any] | None = None  # of the daemon running here
    is_answering: bool = False  # a daemon that has just started answers without a status
    sights: list[network.Sight] = field(default_factory=list)
    need: Need | None = None
    hardware: machine.Hardware = field(default_factory=lambda: machine.Hardware("", ""))

    @property
    def directory(self) -> Path:
        return data_directory(self.config)


def examine(config: NodeConfig, config_file: Path | None, is_asked_outside: bool) -> Iterator[Diagnosis]:
    """Runs all checks and yields each diagnosis as it is made.

    Raises ConfigError before the first one if an address is invalid.
    """
    patient = Patient(config, config_file, is_asked_outside)
    check_addresses(config.network)
    yield Diagnosis("config", "good", f"{config_file}: valid" if config_file else "no file; the defaults apply")
    yield from within(Check("daemon", lambda: look_for_daemon(patient), 2 * DAEMON_SECONDS, "warning"))
    yield from within(Check("python", lambda: look_at_programs(patient), QUICK_SECONDS))
    yield from within(Check("device", lambda: look_at_device(patient), TORCH_SECONDS))
    yield from within(Check("data directory", lambda: look_at_directory(patient), QUICK_SECONDS))
    yield from within(Check("ports", lambda: look_at_ports(patient), QUICK_SECONDS))
    yield from look_outside(patient)
    yield from within(Check("run", lambda: look_at_run(patient), TORCH_SECONDS))
    yield from within(Check("disk speed", lambda: look_at_speed(patient), DISK_SECONDS))


def look_for_daemon(patient: Patient) -> list[Diagnosis]:
    """Looks for a running daemon, as `p2ptrain status` does."""
    try:
        patient.status = control.ask(patient.directory, {"do": "status"}, seconds=DAEMON_SECONDS)
    except NoDaemonError as error:
        is_hung = isinstance(error, SilentDaemonError)
        level: Level = "warning" if is_hung else "good"
        return [Diagnosis("daemon", level, str(error), "See its log, or end it and start it again" if is_hung else "")]
    except P2ptrainError as error:
        patient.is_answering = True
        return [Diagnosis("daemon", "good", f"running, but: {error}")]
    patient.is_answering = True
    status = patient.status
    patient.members = len(status["roster"])
    text = f"round {status['round']} of {status['run_name']}, {len(status['peers'])} peers"
    if found := troubles(status):
        return [Diagnosis("daemon", "warning", f"{text}: {'; '.join(each['text'] for each in found)}", "See its log")]
    return [Diagnosis("daemon", "good", text)]


def look_at_programs(patient: Patient) -> list[Diagnosis]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        machine.check_python(),
        machine.check_torch(machine.installed("torch")),
        *machine.check_p2pd(patient.config.network.listen, machine.installed("hivemind")),
        *machine.check_tracking(patient.config.tracking),
        machine.check_files(soft, hard),
    ]


def look_at_device(patient: Patient) -> list[Diagnosis]:
    patient.hardware = machine.look_at_hardware()
    return [machine.check_device(patient.config.device, patient.hardware, machine.try_device)]


def look_at_directory(patient: Patient) -> list[Diagnosis]:
    note = patient.directory / control.NAME
    return [
        disk.check_writable(patient.directory),
        disk.check_key(identity_file(patient.config)),
        disk.check_locks(patient.directory, identity_file(patient.config), note, patient.is_answering),
    ]


def look_at_ports(patient: Patient) -> list[Diagnosis]:
    url = patient.status["http"] if patient.status else None
    if patient.is_answering and patient.status is None:
        return [Diagnosis("ports", "good", "not checked: the node is about to start")]
    named = patient.config.network
    return [
        *network.check_listen(named.listen, patient.is_answering, gives_way=not named.has_chosen_port),
        network.check_http(patient.config.http, url),
    ]


# ---------------------------------------------------------------------------------------------------
# The run


def look_at_run(patient: Patient) -> list[Diagnosis]:
    """Compares a run's needs with this machine: the daemon's run, a named peer's, or else the largest on disk."""
    if patient.run is None:
        stored = stored_runs(patient.config)
        if patient.status is not None:
            stored = [run for run in stored if run.run_id == patient.status["run_id"]]
        needs = [(need_of(run), run) for run in stored]
        if not needs:
            fix = "Name a node of the run with --bootstrap to find out what it needs"
            return [Diagnosis("run", "warning", "none is known yet: memory and disk space are not checked", fix)]
        patient.need, patient.run = max(needs, key=lambda each: each[0].parameters)
    else:
        patient.need = need_of(patient.run)
    need, run, config = patient.need, patient.run, patient.config
    found = [Diagnosis("run", "good", f"{run.name}, {need.parameters:,} parameters, recipe {run.recipe.name}")]
    try:
        taken = _taken_by(patient.directory) if patient.is_answering else None  # its own share counts as available
        found += machine.check_memory(rooms_of(run, config.device, taken), config.limits.memory_bytes)
    except DeviceError as error:
        found.append(Diagnosis("memory", "failed", str(error)))
    directory = run_directory(config, bytes.fromhex(run.run_id))
    contributors = max(patient.members, CONTRIBUTORS_USUAL)
    free, used = psutil.disk_usage(str(disk.standing(directory))).free, _size_of(directory)
    found.append(disk.check_space(need, run, config.storage.checkpoints_kept, contributors, free, used))
    return found


def _taken_by(directory: Path) -> int:
    holder = disk.holder_of(directory / "lock")
    try:
        return int(psutil.Process(holder).memory_info().rss) if holder else 0
    except psutil.Error:
        return 0


def _size_of(directory: Path) -> int:
    """Adds up the files in a directory; skips those that vanish meanwhile."""
    total = 0
    for path in directory.rglob("*") if directory.exists() else ():
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


def look_at_speed(patient: Patient) -> list[Diagnosis]:
    free = psutil.disk_usage(str(disk.standing(patient.directory))).free
    return [disk.check_speed(patient.directory, patient.need, free)]


# ---------------------------------------------------------------------------------------------------
# Other nodes


def look_outside(patient: Patient) -> list[Diagnosis]:
    """Asks peers about time and addresses; if no node is named, asks remembered peers for the time only."""
    addresses = list(patient.config.network.bootstrap) or _remembered(patient)
    own = [each.address for addresses_of in psutil.net_if_addrs().values() for each in addresses_of]
    told = patient.status["addresses"] if patient.status else None
    if not addresses:
        fix = "Name a node with --bootstrap"
        return [
            Diagnosis("peers", "warning", "none is known: clock, NAT and bandwidth are not checked", fix),
            network.judge_reach(told, [], own),
        ]

    async def look() -> list[Diagnosis]:
        async with asyncio.timeout(NETWORK_SECONDS), AsyncExitStack() as stack:
            transport = await _open(stack, patient.config)
            sights, trouble, reached = await network.ask_peers(transport, addresses)
            ports = [int(port) for each in transport.addresses() for port in re.findall(r"/(?:tcp|udp)/([0-9]+)", each)]
            is_named = bool(patient.config.network.bootstrap)
            found = network.judge_peers(len(addresses[: network.PEERS_ASKED]), len(reached), trouble, is_named)
            patient.sights = sights
            if reached:
                found += [network.judge_clock(sights), network.judge_nat(sights, own, ports)]
            found.append(network.judge_reach(told, sights, own))
            if reached and patient.is_asked_outside:
                found += await _look_at_offers(patient, transport, addresses)
            return found

    try:
        return asyncio.run(look())
    except TimeoutError:
        fix = "Look at this machine's connection, and try again"
        return [Diagnosis("peers", "warning", f"not finished within {NETWORK_SECONDS:.0f} s", fix)]
    except (TransportError, ConfigError) as error:
        return [Diagnosis("peers", "failed", f"p2pd cannot be used: {error}")]


def _remembered(patient: Patient) -> list[str]:
    found: list[str] = []
    for run in stored_runs(patient.config):
        found += remembered_peers(run_directory(patient.config, bytes.fromhex(run.run_id)))
    return list(dict.fromkeys(found))[: network.PEERS_ASKED]


async def _open(stack: AsyncExitStack, config: NodeConfig) -> Transport:
    from p2ptrain.net.libp2p.p2pd import P2pd  # noqa: PLC0415  # hivemind takes three seconds

    sockets = stack.enter_context(private_directory())
    identity = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "identity.key"
    Identity.make(identity)  # only for these questions: the node's own may be in use
    transport = await P2pd.start(identity, network.asking_network(config.network), sockets)
    stack.push_async_callback(transport.close)
    return transport


async def _look_at_offers(patient: Patient, transport: Transport, addresses: Sequence[str]) -> list[Diagnosis]:
    """Finds the run of the named nodes, and measures how fast they send."""
    found, _ = await ask_around(transport, addresses)
    if not found:
        return [Diagnosis("bandwidth", "warning", "not measured: the named nodes take part in no run")]
    ours = bytes.fromhex(patient.status["run_id"]) if patient.status else b""
    run_id = ours if ours in found else max(found, key=lambda each: found[each][0].members)
    info, peers = found[run_id]
    patient.members = max(patient.members, info.members)
    for peer in peers:
        try:
            run = RunConfig.from_canonical(await questions.ask_config(transport, peer, run_id))
        except (TransportError, RemoteProtocolError):
            continue
        if run.is_sealed and run.run_id == run_id.hex():
            patient.run = run
            size = (await asyncio.to_thread(need_of, run)).state
            return [
                await network.measure(transport, peer, run_id, size, patient.config.limits.download_bytes_per_second)
            ]
    return [Diagnosis("bandwidth", "warning", "not measured: no peer sent the run's config", "Name another node")]
