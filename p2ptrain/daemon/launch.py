"""Starts a run, joins one, or lists the runs that the bootstrap nodes know.

To start or join: lock the directory; load the identity; start p2pd; get the run's config (from a file, the disk or a
peer) and its data; then build the node and run it (`life`) until it has left or is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import stat
import tempfile
from asyncio import Future
from collections.abc import Coroutine
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.config import NetworkConfig, NodeConfig, RunConfig
from p2ptrain.daemon.assembly import Launch, open_workshop, own_worker
from p2ptrain.daemon.life import Daemon, Outputs, end_soon, live, save_last
from p2ptrain.daemon.order import JoinOrder, StartOrder
from p2ptrain.daemon.script_loop import ScriptLoop
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import ConfigError, DataError, MemoryShortError, P2ptrainError
from p2ptrain.identity import Identity
from p2ptrain.models.kinds import check_base_bytes
from p2ptrain.net.tasks import IS_CRASH
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node.begun import begun_here, note_begun
from p2ptrain.node.consent import takes_part
from p2ptrain.node.control import Control
from p2ptrain.node.find import (
    as_offered,
    ask_around,
    check_addresses,
    fetch_dataset,
    find_base,
    find_run,
    open_dataset,
    with_relays,
)
from p2ptrain.node.home import Home
from p2ptrain.node.invitations import claim_for, read_invitation
from p2ptrain.node.limits import be_nice, keep_data_within, refuse_too_large
from p2ptrain.node.notify import notify
from p2ptrain.node.saved import keep_tokenizer
from p2ptrain.node.socket_directory import private_directory
from p2ptrain.observe.build import status_of
from p2ptrain.observe.http import STARTING, HttpFace
from p2ptrain.observe.logs import set_up
from p2ptrain.observe.progress import ProgressLine
from p2ptrain.observe.tensorboard import TensorBoard
from p2ptrain.observe.tracking import Tracker, Tracking
from p2ptrain.observe.wandb_run import WandbRun
from p2ptrain.store.lock import Lock
from p2ptrain.train.begin import begin, begin_again
from p2ptrain.train.own_data import PREPARE_FIX, OwnData, open_own
from p2ptrain.train.private import open_privacy, refuse_without_own_steps

log = logging.getLogger("p2ptrain.daemon")
T = TypeVar("T")
NO_MEMORY = "the system refused this process memory; it continues from its disk when it is started again"
HEAD_FIX = "Give the 64 digits of `head` in `p2ptrain status --json` of a node that you trust"


# ---------------------------------------------------------------------------------------------------
# Commands


def take_part(order: StartOrder | JoinOrder, loop: ScriptLoop | None = None) -> None:
    """Begins a run or joins one, and runs the node until it has left; loop: of the script that takes the steps."""
    _run(follow(order, loop))


async def follow(order: StartOrder | JoinOrder, loop: ScriptLoop | None = None) -> None:
    """Carries out an order, in an event loop."""
    home = Home(order.config)
    if isinstance(order, StartOrder):
        await _start(order, home, loop)
    else:
        await _join(order, home, loop)


def list_runs(config: NodeConfig) -> list[dict[str, Any]]:
    """Runs `p2ptrain runs`: asks the bootstraps for the runs they take part in."""
    check_addresses(config.network)

    async def look() -> list[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            sockets = stack.enter_context(private_directory())
            identity = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "identity.key"
            Identity.make(identity)  # a temporary one: the node's own may be in use
            quiet = config.network.model_copy(update={"listen": ("/ip4/127.0.0.1/tcp/0",), "announce": ()})
            transport = await _open_transport(stack, identity, quiet, sockets)
            found, problems = await ask_around(transport, config.network.bootstrap)
            if not found and problems:
                raise DataError("\n".join(problems))
            return [
                {"run_id": run_id.hex(), "name": info.name, "round": info.round, "members": info.members}
                for run_id, (info, _) in sorted(found.items())
            ]

    return _run(look())


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as the main task of this process, and unwraps errors of task groups.

    Until `live` installs its own signal handlers there is no run to leave, so SIGTERM acts like Ctrl-C. A crash in a
    task of the network ends the process with that error: otherwise the node would look healthy but hear nothing.
    """

    async def life() -> T:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None
        crashes: list[BaseException] = []

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            loop.default_exception_handler(context)
            if IS_CRASH in context:
                crashes.append(context["exception"])
                me.cancel()

        def signalled() -> None:
            if me.cancelling():
                end_soon()
            me.cancel()

        loop.set_exception_handler(handle)
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore SIGINT
            loop.add_signal_handler(number, signalled)
        try:
            return await work
        except asyncio.CancelledError:
            if crashes:
                raise crashes[0] from None
            raise

    try:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(life())
        except* P2ptrainError as group:
            raise _first(group) from group
        except* MemoryError as group:
            raise MemoryShortError(NO_MEMORY) from group
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for handler in logging.getLogger().handlers:
            handler.flush()  # before the command's own output


def _first(group: BaseExceptionGroup[P2ptrainError]) -> P2ptrainError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, P2ptrainError)
    return error


def _loop_factory() -> Any:
    try:
        import uvloop  # noqa: PLC0415  # optional: on Linux, hivemind depends on it
    except ImportError:
        return None
    return uvloop.new_event_loop


# ---------------------------------------------------------------------------------------------------
# Starting


async def _start(order: StartOrder, home: Home, loop: ScriptLoop | None) -> None:
    run, dataset = order.run, order.data
    async with AsyncExitStack() as stack:
        opened = await _open(stack, home, loop)
        me = opened.identity.key.hex()
        await asyncio.to_thread(_check_model, run, loop)  # a stranger's model takes seconds to lay out
        log.info("preparing the data and the first weights of %s", run.name)
        before = begun_here(run, order.said, home, me)
        own = await asyncio.to_thread(_own_data, before or run, dataset, opened)
        if own is not None:
            dataset = own.dataset.directory
        named = before if before is not None and run.data.source == "own" else run  # its shared part has a digest
        place = home.usual_dataset(named.data.manifest)
        await asyncio.to_thread(refuse_too_large, before or run, home)
        if loop is not None and before is not None:  # the script's model has other weights by now
            begun = await asyncio.to_thread(begin_again, before, place, dataset)
        else:
            begun = await asyncio.to_thread(begin, before or run, place, [me], dataset, order.given, home.bases)
        note_begun(begun.run, run, order.said, home)
        data = TokenDataset.open(begun.dataset, begun.run.data.manifest)
        await asyncio.to_thread(keep_tokenizer, home, begun.run, data)
        transport = await _open_with_relays(stack, home, begun.run.run_id, opened.sockets)
        launch = Launch(begun.run, home, opened.identity, transport, data, begun.base, state=begun.state, own=own)
        await _serve(stack, launch, opened)


async def _join(order: JoinOrder, home: Home, loop: ScriptLoop | None) -> None:
    wanted = _pinned(home.config.network.run, order.wanted)
    trust = _read_trust(order.trust)
    read = read_invitation(order.invitation) if order.invitation else None
    async with AsyncExitStack() as stack:
        opened = await _open(stack, home, loop)
        transport = await _open_with_relays(stack, home, wanted, opened.sockets)
        # A script gets the error itself: no supervisor reads its status.
        offered = as_offered(home, wanted) if loop is None else nullcontext()
        with offered:
            run, sources = await find_run(transport, home, wanted)
            await asyncio.to_thread(_check_model, run, loop)  # a stranger's model takes seconds to lay out
            refuse_trust_in_the_start(trust, run)
            await asyncio.to_thread(refuse_too_large, run, home)
            if order.data is not None and run.data.source == "shared":
                what = f"the nodes of run {run.name} share their training data, and do not bring their own"
                raise ConfigError(what, key="--data", fix="Leave it out")
            own = await asyncio.to_thread(_own_data, run, order.data, opened)
            if not await takes_part(transport, run, sources, home, order.asks):
                return
            directory = home.dataset(run.data.manifest)
            data = open_dataset(directory, run.data.manifest)
            if data is None:
                data = await fetch_dataset(transport, home, run, directory, sources)
            else:
                await asyncio.to_thread(keep_data_within, run, home, data)
            base = await find_base(transport, home, run, sources)
        claim = claim_for(read, opened.identity, run.run_id) if read else b""
        launch = Launch(run, home, opened.identity, transport, data, base, claim=claim, trust=trust, own=own)
        await _serve(stack, launch, opened)


def _own_data(run: RunConfig, given: Path | None, opened: Opened) -> OwnData | None:
    """Opens this node's own data, in a run whose nodes bring theirs; a script may have it in a loader of its own."""
    home = opened.home
    refuse_without_own_steps(run, home.config.privacy, has_loop=opened.loop is not None)
    if run.data.source == "shared":
        return None
    own_data = home.config.storage.own_data
    named = given or (Path(own_data) if own_data else None)
    if named is not None:
        own = open_own(run, named, opened.identity.key)
        sequences = own.dataset.sequences(run.model.sequence_length)
        return replace(own, privacy=open_privacy(run, home.config.privacy, home.directory, sequences))
    if opened.loop is not None:
        return None
    what = f"the nodes of run {run.name} bring their own data, and this one has none"
    raise ConfigError(what, key="--data", fix=PREPARE_FIX)


def _check_model(run: RunConfig, loop: ScriptLoop | None) -> None:
    """Refuses a run whose model this node, or its script, cannot train."""
    if loop is not None:
        loop.check(run)
    elif run.model.kind == "own":
        what = f"run {run.name} trains a model that only its members' own scripts have"
        raise ConfigError(what, key="model.kind", fix="Take part with such a script, by p2ptrain.join(...) in Python")
    elif run.adapt.is_on:
        check_base_bytes(run.model, run.adapt)


def _pinned(pin: str, wanted: str | None) -> str | None:
    """Returns the run to join; ConfigError if the command names another one than the config."""
    if pin and not pin.startswith(wanted or ""):
        raise ConfigError(f"the config names run {pin}", key="--run", fix="Leave it out, or change network.run")
    return pin or wanted


def _read_trust(head: str | None) -> bytes:
    if head is None:
        return b""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", head):
        raise ConfigError("not the head of a history", key="--trust", fix=HEAD_FIX)
    return bytes.fromhex(head)


def refuse_trust_in_the_start(trust: bytes, run: RunConfig) -> None:
    """Raises ConfigError for a head that an attacker's history has as well."""
    if trust.hex() == run.run_id:
        what = "that is the run's id, with which every history of the run begins: it protects from nothing"
        raise ConfigError(what, key="--trust", fix=HEAD_FIX)


@dataclass(frozen=True, slots=True)
class Opened:
    """A node that does not know its run yet: its identity, and its faces to the owner and to a script."""

    home: Home
    identity: Identity
    loop: ScriptLoop | None
    sockets: Path
    daemon: Future[Daemon]  # once there is one
    http: HttpFace | None


async def _open(stack: AsyncExitStack, home: Home, loop: ScriptLoop | None) -> Opened:
    config = home.config
    be_nice(config.limits.nice)
    set_up(config.logging)
    check_addresses(config.network)
    identity = _open_identity(stack, home)
    if loop is not None:
        await stack.enter_async_context(loop.attached())
    daemon: Future[Daemon] = asyncio.get_running_loop().create_future()
    sockets = stack.enter_context(private_directory())
    await _answer_owner(stack, home, sockets, daemon)
    return Opened(home, identity, loop, sockets, daemon, await _show(stack, config, daemon))


def _open_identity(stack: AsyncExitStack, home: Home) -> Identity:
    """Locks the data directory and the key, and loads the key. From here on others cannot read what is made."""
    stack.callback(os.umask, os.umask(0o077))
    _make_writable(home.directory)
    stack.enter_context(Lock.of_directory(home.directory))
    stack.enter_context(Lock.of_identity(home.identity_file))
    return Identity.load_or_make(home.identity_file)


def _make_writable(directory: Path) -> None:
    """Makes the data directory; raises ConfigError if this user cannot write to it, or another user can."""
    fix = "Choose another with --data-dir"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        link, kind = os.lstat(directory), directory.stat()
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", source=str(directory), key="storage.directory", fix=fix
        ) from error
    why = ""
    if {link.st_uid, kind.st_uid} - {0, os.geteuid()}:
        why = "belongs to another user, who could change what the node keeps"
    elif kind.st_mode & stat.S_IWOTH:
        why, fix = "every user of this machine may change what is in it", f"chmod o-w {directory}"
    if why:
        raise ConfigError(why, source=str(directory), key="storage.directory", fix=fix)


async def _open_transport(stack: AsyncExitStack, identity: Path, network: NetworkConfig, sockets: Path) -> Transport:
    from p2ptrain.net.libp2p.p2pd import P2pd  # noqa: PLC0415  # hivemind takes three seconds

    transport = await P2pd.start(identity, network, sockets)
    stack.push_async_callback(transport.close)
    return transport


async def _open_with_relays(stack: AsyncExitStack, home: Home, wanted: str | None, sockets: Path) -> Transport:
    """Starts p2pd with remembered relays, or without them if it rejects an address that came from peers."""
    network = with_relays(home, wanted)
    try:
        return await _open_transport(stack, home.identity_file, network, sockets)
    except TransportError as error:
        if network == home.config.network:
            raise
        log.warning("starting without the remembered relays: %s", error)
        return await _open_transport(stack, home.identity_file, home.config.network, sockets)


# ---------------------------------------------------------------------------------------------------
# Running


class _Owner:
    """Answers the control socket from the start on, before there is a daemon to pass requests to."""

    def __init__(self, daemon: Future[Daemon]) -> None:
        self._daemon = daemon
        self._life = asyncio.current_task()

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._daemon.done():
            return await self._daemon.result().answer(request)
        if request == {"do": "leave"} and self._life is not None:
            self._life.cancel()  # there is no run to leave yet
            return {"leaving": True}
        return {"error": "the node is starting or looking for the run; see its log"}


async def _answer_owner(stack: AsyncExitStack, home: Home, sockets: Path, daemon: Future[Daemon]) -> None:
    control = Control(home.directory, sockets, _Owner(daemon).answer)
    await control.start()
    stack.push_async_callback(control.close)


async def _show(stack: AsyncExitStack, config: NodeConfig, daemon: Future[Daemon]) -> HttpFace | None:
    """Opens the HTTP server early, so that it can show that the node is starting."""
    http = await HttpFace.open(config.http, daemon) if config.http.enabled else None
    notify(STATUS=STARTING)
    if http is not None:
        stack.push_async_callback(http.close)
    return http


async def _serve(stack: AsyncExitStack, launch: Launch, opened: Opened) -> None:
    """Runs the node until it has left or is stopped."""
    http, loop = opened.http, opened.loop
    hears = [each.note for each in _trackers(stack, launch)]
    outputs = Outputs(None if http is None else http.url, hears)
    make, attached = (loop.worker, None) if loop else own_worker(launch)
    daemon = await Daemon.open(stack, launch, outputs, partial(open_workshop, make=make))
    opened.daemon.set_result(daemon)
    _tell_how_to_join(launch.transport, launch.run)
    if loop is not None:
        loop.joined(daemon)
    if attached is not None:
        await stack.enter_async_context(attached(daemon.edges))
    progress = ProgressLine(launch.config.logging.format, lambda: status_of(daemon))
    progress.start()
    stack.callback(progress.stop)
    why = await live(daemon, progress)
    notify(STOPPING="1", STATUS=f"{why}: saving the state")
    await save_last(daemon)
    log.info("%s: ended", why)


def _trackers(stack: AsyncExitStack, launch: Launch) -> list[Tracking]:
    """Opens the trackers named in the config."""
    wanted, run, trackers = launch.config.tracking, launch.run, list[Tracker]()
    if wanted.tensorboard:
        trackers.append(TensorBoard(Path(wanted.tensorboard), run))
    if wanted.wandb:
        trackers.append(WandbRun(Path(wanted.wandb), run, wanted.wandb_project))
    made = [*map(Tracking, trackers)]
    for each in made:
        stack.push_async_callback(asyncio.to_thread, each.close)
    return made


def _tell_how_to_join(transport: Transport, run: RunConfig) -> None:
    addresses = transport.addresses()
    log.info("run %s, id %s", run.name, run.run_id)
    if not addresses:
        log.warning("no address that others could use yet; `p2ptrain status` shows it once there is one")
    for address in addresses:  # in one write, since the log may go to the same file
        print(f"p2ptrain join --bootstrap {address} --run {run.run_id}\n", end="", flush=True)  # noqa: T201
