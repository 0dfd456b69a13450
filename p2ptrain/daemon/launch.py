"""The ways in: beginning a run, joining one, and asking which there are.

lock the directory; load the identity; p2pd; the run's config (from a file, the disk or a peer); its data; then
everything is put together (assembly.py) and lives (daemon.py) until the node has left or is stopped
"""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.config import NetworkConfig, NodeConfig, RunConfig
from p2ptrain.daemon.assembly import Launch, assemble
from p2ptrain.daemon.control import Control
from p2ptrain.daemon.daemon import live, save_last
from p2ptrain.daemon.edges import fetch_manifest, fetch_tokenizer
from p2ptrain.daemon.logs import set_up
from p2ptrain.daemon.places import data_directory, dataset_directory, identity_file, private_directory
from p2ptrain.daemon.progress import Progress
from p2ptrain.daemon.status import status_of
from p2ptrain.errors import ConfigError, DataError, P2ptrainError, RemoteProtocolError
from p2ptrain.identity import Identity
from p2ptrain.learn.data import MANIFEST_NAME, TokenDataset
from p2ptrain.net import inquiry
from p2ptrain.net.addresses import split
from p2ptrain.net.bulk import FetchError
from p2ptrain.net.connections import tell
from p2ptrain.net.fetch import Fetcher
from p2ptrain.net.limits import TokenBucket
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.store.lock import Lock

FIND_SECONDS = 2.0  # between rounds of asking bootstraps for the run; doubles up to
FIND_SECONDS_MAX = 15.0  # soon enough for a person who waits for a node to come up
REST_SECONDS = 2.0  # for the other bootstraps, once one has told of a run
ASK_SECONDS = 5.0  # for bootstraps to tell of runs, where the run is known from the last time

log = logging.getLogger("p2ptrain.daemon")
T = TypeVar("T")


# ---------------------------------------------------------------------------------------------------
# The two ways in


def start(run: RunConfig, config: NodeConfig, dataset: Path | None) -> int:
    """`p2ptrain start`; the exit status."""
    return _run(_start(run, config, dataset))


def join(config: NodeConfig, run: str | None, ticket: Path | None) -> int:
    """`p2ptrain join`; the exit status."""
    return _run(_join(config, run, ticket))


def list_runs(config: NodeConfig) -> list[dict[str, Any]]:
    """`p2ptrain runs`: what the bootstraps take part in."""
    _check_addresses(config.network)

    async def look() -> list[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            sockets = stack.enter_context(private_directory())
            identity = sockets / "identity.key"
            Identity.make(identity)  # one for this question alone: the node's own may be in use
            quiet = config.network.model_copy(update={"listen": ("/ip4/127.0.0.1/tcp/0",), "announce": ()})
            transport = await _open_transport(stack, identity, quiet, sockets)
            found, problems = await _ask_around(transport, config.network.bootstrap)
            if not found and problems:
                raise DataError("\n".join(problems))
            return [
                {"run_id": run_id.hex(), "name": info.name, "round": info.round, "members": info.members}
                for run_id, (info, _) in sorted(found.items())
            ]

    return _run(look())


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as this process's life; errors of a task group come out as what they are.

    Until `live` takes the signals over there is nothing to leave: then SIGTERM ends as Ctrl-C does.
    """

    async def life() -> T:
        me = asyncio.current_task()
        assert me is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
        return await work

    try:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(life())
        except* P2ptrainError as group:
            raise _first(group) from group
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # the user does not want to wait


def _first(group: BaseExceptionGroup[P2ptrainError]) -> P2ptrainError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, P2ptrainError)
    return error


def _loop_factory() -> Any:
    try:
        import uvloop  # noqa: PLC0415  # where there is one: hivemind brings it on Linux
    except ImportError:
        return None
    return uvloop.new_event_loop


# ---------------------------------------------------------------------------------------------------
# Beginning


async def _start(run: RunConfig, config: NodeConfig, dataset: Path | None) -> int:
    from p2ptrain.learn.begin import begin  # noqa: PLC0415  # torch takes two seconds, in which an error could be told

    set_up(config.logging)
    _check_addresses(config.network)
    async with AsyncExitStack() as stack:
        identity = _open_identity(stack, config)
        log.info("making or reading the data and the first weights of %s", run.name)
        place = dataset_directory(config, run.data.manifest)
        begun = await asyncio.to_thread(begin, run, place, [identity.key.hex()], dataset)
        data = TokenDataset.open(begun.dataset, begun.run.data.manifest)
        sockets = stack.enter_context(private_directory())
        transport = await _open_transport(stack, identity_file(config), config.network, sockets)
        return await _serve(stack, Launch(begun.run, config, identity, transport, data, state=begun.state), sockets)


async def _join(config: NodeConfig, wanted: str | None, ticket_file: Path | None) -> int:
    set_up(config.logging)
    _check_addresses(config.network)
    ticket = _read_ticket(ticket_file)
    async with AsyncExitStack() as stack:
        identity = _open_identity(stack, config)
        sockets = stack.enter_context(private_directory())
        transport = await _open_transport(stack, identity_file(config), config.network, sockets)
        run, sources = await find_run(transport, config, wanted)
        directory = dataset_directory(config, run.data.manifest)
        if (directory / MANIFEST_NAME).exists():
            data = TokenDataset.open(directory, run.data.manifest)
        else:
            data = await _fetch_dataset(transport, run, directory, sources)
        return await _serve(stack, Launch(run, config, identity, transport, data, ticket=ticket), sockets)


def _check_addresses(network: NetworkConfig) -> None:
    """One that cannot be right should not be tried for ever."""
    for address in network.bootstrap:
        try:
            split(address)
        except TransportError as error:
            raise ConfigError(str(error), key="network.bootstrap", fix="Check that it was copied whole") from error


def _read_ticket(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        fix = "Give the file with the invitation as you got it"
        raise ConfigError(f"not an invitation: {error}", source=str(path), fix=fix) from error


def _open_identity(stack: AsyncExitStack, config: NodeConfig) -> Identity:
    """The key, and the sole right to the directory and to speak with it."""
    _make_writable(data_directory(config))
    stack.enter_context(Lock.of_directory(data_directory(config)))
    path = identity_file(config)
    stack.enter_context(Lock.of_identity(path))
    return Identity.load_or_make(path)


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        fix = "Choose another with --data-dir"
        raise ConfigError(
            f"cannot be written: {error.strerror}", source=str(directory), key="storage.directory", fix=fix
        ) from error


async def _open_transport(stack: AsyncExitStack, identity: Path, network: NetworkConfig, sockets: Path) -> Transport:
    from p2ptrain.net.p2pd import P2pd  # noqa: PLC0415  # hivemind takes three seconds

    transport = await P2pd.start(identity, network, sockets)
    stack.push_async_callback(transport.close)
    return transport


Found = dict[bytes, tuple[inquiry.RunInfo, list[bytes]]]  # by run: what was told of it, and by whom


async def _ask_around(transport: Transport, addresses: tuple[str, ...] | list[str]) -> tuple[Found, list[str]]:
    """Which runs there are at these addresses, and what is wrong with those that do not answer."""
    found: Found = {}
    problems: list[str] = []

    async def ask(address: str) -> None:
        try:
            peer = await transport.connect(address)
        except TransportError as error:
            problems.append(str(error))
            return
        try:
            runs = await inquiry.ask_runs(transport, peer)
        except (TransportError, RemoteProtocolError):
            problems.append(f"{address} answers, but {await inquiry.why_not(transport, peer)}")
            return
        for info in runs:
            found.setdefault(info.run_id, (info, []))[1].append(peer)

    tasks = {asyncio.create_task(ask(address), name=f"asking {address}") for address in addresses}
    try:
        waiting = tasks
        while waiting and not found:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            await asyncio.wait(waiting, timeout=REST_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found, problems


async def find_run(transport: Transport, config: NodeConfig, wanted: str | None) -> tuple[RunConfig, list[bytes]]:
    """The config of the run to join, and who told it: from the nodes that are there, or from the last time."""
    stored = _stored_runs(config, wanted)
    addresses = config.network.bootstrap
    if not addresses and not stored:
        raise ConfigError("whom to ask?", key="--bootstrap", fix="Name the address of a node of the run")
    wait, told = FIND_SECONDS, dict[str, float]()
    while True:
        found: Found = {}
        problems: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_SECONDS if len(stored) == 1 else None):
                found, problems = await _ask_around(transport, addresses)
        now = asyncio.get_running_loop().time()
        for problem in problems:
            tell(told, problem, now)
        matching = {run_id: each for run_id, each in found.items() if run_id.hex().startswith(wanted or "")}
        if len(matching) > 1:
            names = "\n".join(f"  {run_id.hex()}  {info.name}" for run_id, (info, _) in sorted(matching.items()))
            raise ConfigError(f"there are {len(matching)} runs:\n{names}", key="--run", fix="Name one of them")
        for run_id, (_, peers) in matching.items():
            run = await _fetch_config(transport, run_id, peers)
            if run is not None:
                return run, peers
        if len(stored) == 1:
            return stored[0], []
        if len(stored) > 1:
            names = ", ".join(run.run_id[:16] for run in stored)
            raise ConfigError(
                f"there are {len(stored)} runs on this disk: {names}", key="--run", fix="Name one of them"
            )
        if found and not matching:
            names = ", ".join(f"{run_id.hex()[:16]} ({info.name})" for run_id, (info, _) in sorted(found.items()))
            raise ConfigError(f"the nodes there know no run {wanted}, but {names}", key="--run", fix="Name one of them")
        await asyncio.sleep(wait)
        wait = min(2 * wait, FIND_SECONDS_MAX)


def _stored_runs(config: NodeConfig, wanted: str | None) -> list[RunConfig]:
    """Runs that this directory has taken part in."""
    found = []
    for path in sorted((data_directory(config) / "runs").glob("*/run.json")):
        try:
            run = RunConfig.from_canonical(path.read_bytes())
        except (OSError, RemoteProtocolError) as error:
            log.warning("%s: passed over: %s", path, error)
            continue
        if run.run_id.startswith(wanted or ""):
            found.append(run)
    return found


async def _fetch_config(transport: Transport, run_id: bytes, peers: list[bytes]) -> RunConfig | None:
    """The config that the id stands for."""
    for peer in peers:
        try:
            run = RunConfig.from_canonical(await inquiry.ask_config(transport, peer, run_id))
        except (TransportError, RemoteProtocolError) as error:
            log.warning("no config from %s: %s", peer.hex()[:16], error)
            continue
        if run.is_sealed and run.run_id == run_id.hex():
            return run
        log.warning("%s sent a config that is not the run's", peer.hex()[:16])
    return None


async def _fetch_dataset(transport: Transport, run: RunConfig, directory: Path, sources: list[bytes]) -> TokenDataset:
    """The list of its pieces; the pieces follow when they are needed."""
    fetcher = Fetcher(transport, bytes.fromhex(run.run_id), download=TokenBucket(0), blame=_blame_nobody)
    wait = FIND_SECONDS
    while True:
        try:
            data = await fetch_manifest(fetcher, run, directory, sources)
            if run.tokenizer.kind == "json":
                await fetch_tokenizer(fetcher, run, data, sources)
            return data
        except FetchError as error:
            log.warning("%s; will go on trying", error)
            await asyncio.sleep(wait)
            wait = min(2 * wait, FIND_SECONDS_MAX)


def _blame_nobody(peer: bytes, why: str) -> None:
    log.warning("%s: %s", peer.hex()[:16], why)


# ---------------------------------------------------------------------------------------------------
# Taking part


async def _serve(stack: AsyncExitStack, launch: Launch, sockets: Path) -> int:
    """Until the node has left; the exit status."""
    daemon, started = await assemble(stack, launch)
    control = Control(data_directory(launch.config), sockets, daemon.answer)
    await control.start()
    stack.push_async_callback(control.close)
    _tell_how_to_join(launch.transport, launch.run)
    progress = Progress(launch.config.logging.format, lambda: status_of(daemon))
    progress.start()
    stack.callback(progress.stop)
    why = await live(daemon, started, progress)
    await save_last(daemon)
    log.info("%s: ended", why)
    return 0


def _tell_how_to_join(transport: Transport, run: RunConfig) -> None:
    addresses = transport.addresses()
    log.info("run %s, id %s", run.name, run.run_id)
    if not addresses:
        log.warning("no address that others could use yet; `p2ptrain status` tells when there is one")
    for address in addresses:
        print(f"p2ptrain join --bootstrap {address}", flush=True)  # noqa: T201  # what the user is waiting for
