"""Runs all checks of a machine and a config in order, each with its deadline."""

from __future__ import annotations

import asyncio
import re
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.doctor import disk, machine, network, wsl
from p2ptrain.doctor.exchange import judge_exchange
from p2ptrain.doctor.findings import Check, Diagnosis, Level, in_time, refused, within
from p2ptrain.errors import (
    ConfigError,
    DeviceError,
    NoDaemonError,
    P2ptrainError,
    RemoteProtocolError,
    SilentDaemonError,
)
from p2ptrain.files import nearest_existing
from p2ptrain.identity import Identity
from p2ptrain.net import questions
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node import control
from p2ptrain.node.find import ask_around, check_addresses
from p2ptrain.node.home import Home
from p2ptrain.node.limits import disk_demand
from p2ptrain.node.socket_directory import private_directory
from p2ptrain.train.memory import Need, demands_of, need_of

DAEMON_SECONDS = 5.0  # time for a running daemon to answer
QUICK_SECONDS = 10.0  # time for checks that only ask the system
TORCH_SECONDS = 120.0  # time to load torch from a slow disk and wake up a driver
DISK_SECONDS = 120.0  # 64 MiB at half a megabyte a second
NETWORK_SECONDS = 90.0  # time to start p2pd, ask peers in parallel and measure bandwidth for 4 s


@dataclass(frozen=True, slots=True)
class DaemonHere:
    """The daemon that runs here, if there is one."""

    found: list[Diagnosis]
    status: dict[str, Any] | None = None
    is_answering: bool = False  # False also for a daemon that has just started and has no status yet


@dataclass(frozen=True, slots=True)
class Outside:
    """The peers' answers, and the run that they offer."""

    found: list[Diagnosis]
    run: RunConfig | None = None  # the run of a named peer
    members: int = 0  # members of that run
    bytes_per_second: float = 0.0  # measured from one of its nodes; 0: not measured


@dataclass(frozen=True, slots=True)
class RunHere:
    """The run that this machine takes part in, or may join."""

    found: list[Diagnosis]
    need: Need | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The node under examination."""

    config: NodeConfig
    is_asked_outside: bool  # a bootstrap was named on the command line: checks may cost others some megabytes
    daemon: DaemonHere

    @property
    def directory(self) -> Path:
        return self.home.directory

    @property
    def home(self) -> Home:
        return Home(self.config)

    @property
    def status(self) -> dict[str, Any] | None:
        return self.daemon.status


def examine(config: NodeConfig, config_file: Path | None, is_asked_outside: bool) -> Iterator[Diagnosis]:
    """Runs all checks and yields each diagnosis as it is made.

    Raises ConfigError before the first one if an address is invalid.
    """
    check_addresses(config.network)
    yield Diagnosis("config", "good", f"{config_file}: valid" if config_file else "no file; the defaults apply")
    daemon_check = Check("daemon", lambda: look_for_daemon(Home(config).directory), 2 * DAEMON_SECONDS, "warning")
    daemon = in_time(daemon_check) or DaemonHere(daemon_check.too_late)
    yield from daemon.found
    facts = NodeFacts(config, is_asked_outside, daemon)
    yield from within(Check("python", lambda: look_at_programs(facts), QUICK_SECONDS))
    yield from within(Check("WSL2", lambda: wsl.check_wsl(wsl.look_at_wsl()), QUICK_SECONDS, "warning"))
    yield from within(Check("device", lambda: look_at_device(facts), TORCH_SECONDS))
    yield from within(Check("data directory", lambda: look_at_directory(facts), QUICK_SECONDS))
    yield from within(Check("ports", lambda: look_at_ports(facts), QUICK_SECONDS))
    outside = look_outside(facts)
    yield from outside.found
    run_check = Check("run", lambda: look_at_run(facts, outside), TORCH_SECONDS)
    here = in_time(run_check) or RunHere(run_check.too_late)
    yield from here.found
    yield from within(Check("disk speed", lambda: look_at_speed(facts, here.need), DISK_SECONDS))


def look_for_daemon(directory: Path) -> DaemonHere:
    """Looks for a running daemon, as `p2ptrain status` does."""
    try:
        status = control.ask(directory, {"do": "status"}, seconds=DAEMON_SECONDS)
    except NoDaemonError as error:
        is_hung = isinstance(error, SilentDaemonError)
        level: Level = "warning" if is_hung else "good"
        fix = "See its log, or end it and start it again" if is_hung else ""
        return DaemonHere([Diagnosis("daemon", level, str(error), fix)])
    except P2ptrainError as error:
        return DaemonHere([Diagnosis("daemon", "good", f"running, but: {error}")], is_answering=True)
    text = f"round {status['round']} of {status['run_name']}, {len(status['peers'])} peers"
    found = Diagnosis("daemon", "good", text)
    if complaints := status["troubles"]:
        found = Diagnosis(
            "daemon", "warning", f"{text}: {'; '.join(each['text'] for each in complaints)}", "See its log"
        )
    return DaemonHere([found], status, is_answering=True)


def look_at_programs(facts: NodeFacts) -> list[Diagnosis]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        machine.check_python(),
        machine.check_torch(machine.installed("torch")),
        *machine.check_p2pd(facts.config.network.listen, machine.installed("hivemind")),
        *machine.check_tracking(facts.config.tracking),
        machine.check_files(soft, hard),
    ]


def look_at_device(facts: NodeFacts) -> list[Diagnosis]:
    return [machine.check_device(facts.config.device, machine.look_at_hardware(), machine.try_device)]


def look_at_directory(facts: NodeFacts) -> list[Diagnosis]:
    note = facts.directory / control.NAME
    return [
        disk.check_writable(facts.directory),
        disk.check_key(facts.home.identity_file),
        disk.check_locks(facts.directory, facts.home.identity_file, note, facts.daemon.is_answering),
    ]


def look_at_ports(facts: NodeFacts) -> list[Diagnosis]:
    url = facts.status["http"] if facts.status else None
    if facts.daemon.is_answering and facts.status is None:
        return [Diagnosis("ports", "good", "not checked: the node is about to start")]
    named = facts.config.network
    return [
        *network.check_listen(named.listen, facts.daemon.is_answering, gives_way=not named.has_chosen_port),
        network.check_http(facts.config.http, url),
    ]


# ---------------------------------------------------------------------------------------------------
# The run


def look_at_run(facts: NodeFacts, outside: Outside) -> RunHere:
    """Compares a run's needs with this machine: the daemon's run, a named peer's, or else the largest on disk."""
    config = facts.config
    stored = [outside.run] if outside.run is not None else facts.home.runs()
    if outside.run is None and facts.status is not None:
        stored = [each for each in stored if each.run_id == facts.status["run_id"]]
    try:
        needs = [(need_of(each), each) for each in stored]
    except ConfigError as error:  # its model needs a library that is not installed
        return RunHere([refused("run", error)])
    except DeviceError as error:
        return RunHere([Diagnosis("run", "failed", str(error))])
    if not needs:
        fix = "Name a node of the run with --bootstrap to find out what it needs"
        what = "none is known yet: memory and disk space are not checked"
        return RunHere([Diagnosis("run", "warning", what, fix)])
    need, run = max(needs, key=lambda each: each[0].parameters)
    found = [Diagnosis("run", "good", f"{run.name}, {need.parameters:,} parameters, recipe {run.recipe.name}")]
    try:
        taken = _taken_by(facts.directory) if facts.daemon.is_answering else None  # the daemon's memory is reusable
        found += machine.check_memory(demands_of(run, config, taken), config.limits.memory_bytes)
    except DeviceError as error:
        found.append(Diagnosis("memory", "failed", str(error)))
    members = len(facts.status["roster"]) if facts.status else 0
    members = max(members, outside.members)
    found.append(disk.check_space(disk_demand(run, facts.home, need, members=members)))
    if members > 1 and facts.status and facts.status["run_id"] == run.run_id and facts.status["tokens_per_second"]:
        pace, upload = facts.status["tokens_per_second"], config.limits.upload_bytes_per_second
        found.append(judge_exchange(run, members, pace, outside.bytes_per_second, upload))
    return RunHere(found, need)


def _taken_by(directory: Path) -> int:
    holder = disk.holder_of(directory / "lock")
    try:
        return int(psutil.Process(holder).memory_info().rss) if holder else 0
    except psutil.Error:
        return 0


def look_at_speed(facts: NodeFacts, need: Need | None) -> list[Diagnosis]:
    free = psutil.disk_usage(str(nearest_existing(facts.directory))).free
    return [disk.check_speed(facts.directory, need, free)]


# ---------------------------------------------------------------------------------------------------
# Other nodes


def look_outside(facts: NodeFacts) -> Outside:
    """Asks named peers about time and addresses. Without named peers, asks remembered ones, only for the time."""
    addresses = list(facts.config.network.bootstrap) or _remembered(facts)
    own = [each.address for addresses_of in psutil.net_if_addrs().values() for each in addresses_of]
    told = facts.status["addresses"] if facts.status else None
    if not addresses:
        what = "none is known: clock, NAT and bandwidth are not checked"
        unknown = Diagnosis("peers", "warning", what, "Name a node with --bootstrap")
        return Outside([unknown, network.judge_reach(told, [], own)])

    async def look() -> Outside:
        async with asyncio.timeout(NETWORK_SECONDS), AsyncExitStack() as stack:
            transport = await _open(stack, facts.config)
            answers, trouble, reached = await network.ask_peers(transport, addresses)
            ports = [int(port) for each in transport.addresses() for port in re.findall(r"/(?:tcp|udp)/([0-9]+)", each)]
            is_named = bool(facts.config.network.bootstrap)
            found = network.judge_peers(len(addresses[: network.PEERS_ASKED]), len(reached), trouble, is_named)
            if reached:
                found += [network.judge_clock(answers), network.judge_nat(answers, own, ports)]
            found.append(network.judge_reach(told, answers, own))
            if not reached or not facts.is_asked_outside:
                return Outside(found)
            offered = await _look_at_offers(facts, transport, addresses)
            return replace(offered, found=found + offered.found)

    try:
        return asyncio.run(look())
    except TimeoutError:
        fix = "Look at this machine's connection, and try again"
        return Outside([Diagnosis("peers", "warning", f"not finished within {NETWORK_SECONDS:.0f} s", fix)])
    except (TransportError, ConfigError) as error:
        return Outside([Diagnosis("peers", "failed", f"p2pd cannot be used: {error}")])


def _remembered(facts: NodeFacts) -> list[str]:
    found: list[str] = []
    for run in facts.home.runs():
        found += facts.home.peers_of(run)
    return list(dict.fromkeys(found))[: network.PEERS_ASKED]


async def _open(stack: AsyncExitStack, config: NodeConfig) -> Transport:
    from p2ptrain.net.libp2p.p2pd import P2pd  # noqa: PLC0415  # hivemind takes three seconds

    sockets = stack.enter_context(private_directory())
    identity = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "identity.key"
    Identity.make(identity)  # a temporary one, because the node's own may be in use
    transport = await P2pd.start(identity, network.asking_network(config.network), sockets)
    stack.push_async_callback(transport.close)
    return transport


async def _look_at_offers(facts: NodeFacts, transport: Transport, addresses: Sequence[str]) -> Outside:
    """Finds the run of the named nodes, and measures how fast they send."""
    found, _ = await ask_around(transport, addresses)
    if not found:
        return Outside([Diagnosis("bandwidth", "warning", "not measured: the named nodes take part in no run")])
    ours = bytes.fromhex(facts.status["run_id"]) if facts.status else b""
    run_id = ours if ours in found else max(found, key=lambda each: found[each][0].members)
    info, peers = found[run_id]
    limit = facts.config.limits.download_bytes_per_second
    for peer in peers:
        try:
            run = RunConfig.from_canonical(await questions.ask_config(transport, peer, run_id))
        except (TransportError, RemoteProtocolError):
            continue
        if run.is_sealed and run.id == run_id:
            try:
                size = (await asyncio.to_thread(need_of, run)).state
            except (ConfigError, DeviceError):  # the check of the run reports this
                unknown = Diagnosis("bandwidth", "warning", "not measured: the size of the run's model is unknown here")
                return Outside([unknown], run, info.members)
            measured = await network.measure(transport, peer, run_id, size, limit)
            return Outside([measured.diagnosis], run, info.members, measured.bytes_per_second)
    what = "not measured: no peer sent the run's config"
    return Outside([Diagnosis("bandwidth", "warning", what, "Name another node")], members=info.members)
