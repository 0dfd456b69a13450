"""Runs all checks of a machine and a config in order, each with its deadline."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from p2ptrain.address import parse
from p2ptrain.config import DeviceConfig, NodeConfig, RunConfig
from p2ptrain.doctor import disk, machine, network
from p2ptrain.doctor.findings import Diagnosis, refused, within
from p2ptrain.errors import ConfigError, DeviceError, NoDaemonError, P2ptrainError, SilentDaemonError
from p2ptrain.files import nearest_existing
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node import control
from p2ptrain.node.find import ask_around, check_addresses, fetch_config
from p2ptrain.node.home import Home
from p2ptrain.node.limits import disk_demand
from p2ptrain.node.socket_directory import open_apart
from p2ptrain.system import allow_open_files
from p2ptrain.train.memory import Need, demands_of, fitting, need_of

DAEMON_SECONDS = 5.0  # time for a running daemon to answer
QUICK_SECONDS = 10.0  # time for checks that only ask the system
TORCH_SECONDS = 120.0  # time to load torch from a slow disk and wake up a driver
DISK_SECONDS = 120.0  # 64 MiB at half a megabyte a second
NETWORK_SECONDS = 90.0  # time to start p2pd and ask peers in parallel


def examine(config: NodeConfig, config_file: Path | None, is_asked_outside: bool) -> Iterator[Diagnosis]:
    """Runs all checks and yields each diagnosis as it is made.

    Raises ConfigError before the first one if an address is invalid."""
    check_addresses(config.network)
    yield Diagnosis("config", "good", f"{config_file}: valid" if config_file else "no file; the defaults apply")
    here = Examination(config, is_asked_outside)
    yield from within("daemon", here.look_for_daemon, 2 * DAEMON_SECONDS, "warning")
    yield from within("python", here.look_at_programs, QUICK_SECONDS)
    yield from within("WSL2", lambda: machine.check_wsl(machine.look_at_wsl()), QUICK_SECONDS, "warning")
    yield from examine_device(config.device)
    yield from within("data directory", here.look_at_directory, QUICK_SECONDS)
    yield from within("ports", here.look_at_ports, QUICK_SECONDS)
    yield from here.look_outside()
    yield from within("run", here.look_at_run, TORCH_SECONDS)
    yield from within("disk speed", here.look_at_speed, DISK_SECONDS)


def examine_device(config: DeviceConfig) -> list[Diagnosis]:
    return within("device", lambda: look_at_device(config), TORCH_SECONDS)


def look_at_device(config: DeviceConfig) -> list[Diagnosis]:
    try:
        found = machine.look_at_hardware()
    except DeviceError as error:
        if config.name != "cpu":
            return [Diagnosis("device", "failed", error.problem, error.fix)]
        found = machine.Hardware("", "")
    return [machine.check_device(config, found, machine.try_device)]


class Examination:
    """The examination of one node: its checks, and what a check finds out for the later ones."""

    def __init__(self, config: NodeConfig, is_asked_outside: bool) -> None:
        """is_asked_outside: a bootstrap was named on the command line, so checks may cost others some megabytes"""
        self.config, self.is_asked_outside, self.home = config, is_asked_outside, Home(config)
        self.directory = self.home.directory
        self.status: dict[str, Any] | None = None  # of the daemon that runs here
        self.is_answering = False  # that daemon; also one that has just started and has no status yet
        self.offered: RunConfig | None = None  # the run of a named peer
        self.members = 0  # of that run
        self.need: Need | None = None  # of the run that this machine takes part in, or may join

    def look_for_daemon(self) -> list[Diagnosis]:
        """Looks for a running daemon, as `p2ptrain status` does."""
        try:
            status = control.ask(self.directory, {"do": "status"}, seconds=DAEMON_SECONDS)
        except SilentDaemonError as error:
            return [Diagnosis("daemon", "warning", str(error), "See its log, or end it and start it again")]
        except NoDaemonError as error:
            return [Diagnosis("daemon", "good", str(error))]
        except P2ptrainError as error:
            self.is_answering = True
            return [Diagnosis("daemon", "good", f"running, but: {error}")]
        self.status, self.is_answering = status, True
        text = f"round {status['round']} of {status['run_name']}, {len(status['peers'])} peers"
        if complaints := status["troubles"]:
            text = f"{text}: {'; '.join(each['text'] for each in complaints)}"
            return [Diagnosis("daemon", "warning", text, "See its log")]
        return [Diagnosis("daemon", "good", text)]

    def look_at_programs(self) -> list[Diagnosis]:
        allow_open_files()  # as a start does
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return [
            machine.check_python(),
            machine.check_torch(machine.installed("torch")),
            *machine.check_p2pd(self.config.network.listen, machine.installed("hivemind")),
            *machine.check_tracking(self.config.tracking),
            machine.check_files(soft, hard),
        ]

    def look_at_directory(self) -> list[Diagnosis]:
        key = self.home.identity_file
        return [
            disk.check_writable(self.directory),
            disk.check_key(key),
            disk.check_locks(self.directory, key, self.directory / control.NAME, self.is_answering),
        ]

    def look_at_ports(self) -> list[Diagnosis]:
        if self.is_answering and self.status is None:
            return [Diagnosis("ports", "good", "not checked: the node is about to start")]
        named, url = self.config.network, self.status["http"] if self.status else None
        return [
            *network.check_listen(named.listen, self.is_answering, gives_way=not named.has_chosen_port),
            network.check_http(self.config.http, url),
        ]

    # -- The run ------------------------------------------------------------------------------------

    def look_at_run(self) -> list[Diagnosis]:
        """Compares a run's needs with this machine: the daemon's run, a named peer's, or else the largest on disk."""
        stored = [self.offered] if self.offered is not None else self.home.runs()
        if self.offered is None and self.status is not None:
            stored = [each for each in stored if each.run_id == self.status["run_id"]]
        try:
            needs = [(need_of(each), each) for each in stored]
        except ConfigError as error:  # its model needs a library that is not installed
            return [refused("run", error)]
        except DeviceError as error:
            return [Diagnosis("run", "failed", str(error))]
        if not needs:
            fix = "Name a node of the run with --bootstrap to find out what it needs"
            what = "none is known yet: memory and disk space are not checked"
            return [Diagnosis("run", "warning", what, fix)]
        need, run = max(needs, key=lambda each: each[0].parameters)
        self.need = need
        found = [Diagnosis("run", "good", f"{run.name}, {need.parameters:,} parameters, recipe {run.recipe.name}")]
        try:
            taken = _taken_by(self.directory) if self.is_answering else None  # the daemon's memory is reusable
            demands = demands_of(run, fitting(run, self.config), taken)
            found += machine.check_memory(demands, self.config.limits.memory_bytes)
        except DeviceError as error:
            found.append(Diagnosis("memory", "failed", str(error)))
        members = max(len(self.status["roster"]) if self.status else 0, self.members)
        return [*found, disk.check_space(disk_demand(run, self.home, need, members=members))]

    def look_at_speed(self) -> list[Diagnosis]:
        free = psutil.disk_usage(str(nearest_existing(self.directory))).free
        return [disk.check_speed(self.directory, self.need, free)]

    # -- Other nodes --------------------------------------------------------------------------------

    def look_outside(self) -> list[Diagnosis]:
        """Asks named peers about time and addresses. Without named peers, asks remembered ones, only for the time."""
        addresses = list(self.config.network.bootstrap) or self._remembered()
        told = self.status["addresses"] if self.status else None
        if not addresses:
            what = "none is known: clock and NAT are not checked"
            unknown = Diagnosis("peers", "warning", what, "Name a node with --bootstrap")
            return [unknown, network.judge_reach(told)]
        try:
            return asyncio.run(self._ask(addresses, told))
        except TimeoutError:
            fix = "Look at this machine's connection, and try again"
            return [Diagnosis("peers", "warning", f"not finished within {NETWORK_SECONDS:.0f} s", fix)]
        except (TransportError, ConfigError) as error:
            return [Diagnosis("peers", "failed", f"p2pd cannot be used: {error}")]

    def _remembered(self) -> list[str]:
        found = [address for run in self.home.runs() for address in self.home.peers_of(run)]
        return list(dict.fromkeys(found))[: network.PEERS_ASKED]

    async def _ask(self, addresses: Sequence[str], told: Sequence[str] | None) -> list[Diagnosis]:
        async with asyncio.timeout(NETWORK_SECONDS), AsyncExitStack() as stack:
            transport = await open_apart(stack, network.asking_network(self.config.network))
            answers, trouble, reached = await network.ask_peers(transport, addresses)
            is_named = bool(self.config.network.bootstrap)
            found = network.judge_peers(len(addresses[: network.PEERS_ASKED]), len(reached), trouble, is_named)
            if reached:
                own = [each.address for addresses_of in psutil.net_if_addrs().values() for each in addresses_of]
                ports = [parse(each).port for each in transport.addresses()]
                found += [network.judge_clock(answers), network.judge_nat(answers, own, ports)]
                if self.is_asked_outside:
                    await self._look_at_offer(transport, addresses)
            return [*found, network.judge_reach(told)]

    async def _look_at_offer(self, transport: Transport, addresses: Sequence[str]) -> None:
        """Finds out the run of the named nodes, if there is one, and how many members it has."""
        found, _ = await ask_around(transport, addresses)
        if not found:
            return
        ours = bytes.fromhex(self.status["run_id"]) if self.status else b""
        run_id = ours if ours in found else max(found, key=lambda each: found[each][0].members)
        info, peers = found[run_id]
        self.members = info.members
        with suppress(ConfigError):  # of another protocol version
            self.offered = await fetch_config(transport, run_id, peers)


def _taken_by(directory: Path) -> int:
    holder = disk.holder_of(directory / "lock")
    try:
        return int(psutil.Process(holder).memory_info().rss) if holder else 0
    except psutil.Error:
        return 0
