"""Starts a run, joins one, or lists the runs that the bootstrap nodes know.

To start or join: lock the directory; load the identity; start p2pd; get the run's config (from a file, the disk or a
peer) and its data; then build the node and run it (`life`) until it has left or is stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
import stat
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.config import ENDING, PROTOCOLS, NodeConfig, RunConfig
from p2ptrain.core.origin import Descent, succeed
from p2ptrain.daemon.assembly import Launch, open_workshop, own_worker
from p2ptrain.daemon.life import Daemon, end_soon, live, save_last
from p2ptrain.daemon.order import JoinOrder, StartOrder
from p2ptrain.daemon.script_loop import ScriptLoop
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import ConfigError, DataError, MemoryShortError, P2ptrainError, RemoteProtocolError, UnusableError
from p2ptrain.exact.cards import failure_of, why_unusable
from p2ptrain.files import write_all, write_atomically
from p2ptrain.identity import Identity
from p2ptrain.models.kinds import check_base_bytes
from p2ptrain.net.tasks import IS_CRASH
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node import find
from p2ptrain.node.consent import takes_part
from p2ptrain.node.control import Answer, Control
from p2ptrain.node.heirs import go_over
from p2ptrain.node.home import REFUSED_NAME, Home, begun_here, note_begun
from p2ptrain.node.limits import be_nice, choose_settings, keep_data_within, refuse_too_large
from p2ptrain.node.notify import GOING_OVER_SECONDS, notify, watchdog
from p2ptrain.node.saved import LOG_NAME, keep_tokenizer
from p2ptrain.node.socket_directory import open_apart, private_directory
from p2ptrain.observe.build import status_of
from p2ptrain.observe.http import STARTING, HttpFace
from p2ptrain.observe.logs import set_up
from p2ptrain.observe.progress import ProgressLine
from p2ptrain.observe.tracking import TensorBoard, Tracker, Tracking, WandbRun
from p2ptrain.store.checkpoints import Checkpoints
from p2ptrain.store.lock import Lock, beside
from p2ptrain.store.log import read_journal
from p2ptrain.store.store import CHECKPOINTS_NAME, SPOKEN_SUFFIX, origin_in
from p2ptrain.system import allow_open_files
from p2ptrain.train.begin import begin, begin_again
from p2ptrain.train.own_data import PREPARE_FIX, OwnData, open_own
from p2ptrain.train.private import open_privacy, refuse_without_own_steps

After = Sequence[Descent] | str  # how the run has ended, or the id of the one to go on with; empty: there is none
log = logging.getLogger("p2ptrain.daemon")
T = TypeVar("T")
NO_MEMORY = "the system refused this process memory; it continues from its disk when it is started again"
HEAD_FIX = "Give the 64 digits of `head` in `p2ptrain status --json` of a node that you trust"


# -- Commands ---------------------------------------------------------------------------------------


def take_part(order: StartOrder | JoinOrder, loop: ScriptLoop | None = None) -> None:
    """Begins a run or joins one, and runs the node until it has left; loop: of the script that takes the steps."""
    _run(follow(order, loop))


async def follow(order: StartOrder | JoinOrder, loop: ScriptLoop | None = None) -> None:
    """Carries out an order, in an event loop, and goes on with each run that follows."""
    home, wanted = Home(order.config), None
    if isinstance(order, JoinOrder):  # what is wrong with it is told before anything is done
        wanted = _wanted(order, home)
        _read_trust(order.trust)
        if order.invitation:
            find.read_invitation(order.invitation)
    async with AsyncExitStack() as stack:
        opened = await _open(stack, home, loop)
        if isinstance(order, StartOrder):
            after = await _start(order, opened)
        else:
            after = await _join(order, opened, wanted)
        while after:
            is_own = not isinstance(order, StartOrder) or order.run.data.source == "own"
            order = JoinOrder(config=order.config, data=order.data if is_own else None)
            if isinstance(after, str):
                after = await _join(order, opened, after)
            else:
                run = await asyncio.to_thread(go_over, home, after, opened.identity)
                log.info("going on with run %s, id %s: seats and weights go along", run.name, run.run_id)
                if loop is not None:  # its worker, and what it was told of the run, are those of before
                    what = f"the run goes on as {run.name} ({run.run_id[:16]})"
                    raise UnusableError(what, fix="Start the script again: it goes on with that")
                after = await _join(order, opened, run.run_id, run)


def list_runs(config: NodeConfig) -> list[dict[str, Any]]:
    """Runs `p2ptrain runs`: asks the bootstraps for the runs they take part in."""
    find.check_addresses(config.network)

    async def look() -> list[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            quiet = config.network.model_copy(update={"listen": ("/ip4/127.0.0.1/tcp/0",), "announce": ()})
            transport = await open_apart(stack, quiet)
            found, problems = await find.ask_around(transport, config.network.bootstrap)
            if not found and problems:
                raise DataError("\n".join(problems))
            return [
                {"run_id": run_id.hex(), "name": info.name, "round": info.round, "members": info.members}
                for run_id, (info, _) in sorted(found.items())
            ]

    return _run(look())


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as the main task of this process, and unwraps errors of task groups. Until `live` installs its
    own signal handlers there is no run to leave, so SIGTERM acts like Ctrl-C. A crash in a task of the network ends the
    process with that error: otherwise the node would look healthy but hear nothing."""

    async def life() -> T:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None, "the main task"
        crashes: list[BaseException] = []

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            task = context.get("task")
            if task is None or task.get_coro().__qualname__ != "Event.wait":  # hivemind leaves those of a search behind
                loop.default_exception_handler(context)
            if IS_CRASH in context:
                crashes.append(context["exception"])
                me.cancel()

        loop.set_exception_handler(handle)
        _end_on_signals()
        try:
            return await work
        except asyncio.CancelledError:
            if crashes:
                raise crashes[0] from None
            raise

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner, _card_is_named():
            return runner.run(life())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except MemoryError as error:
        raise MemoryShortError(NO_MEMORY) from error
    except BaseExceptionGroup as group:  # within `except*` Python 3.11.2 wraps again what is raised
        known, others = group.split((P2ptrainError, MemoryError))
        if known is None or others is not None:  # a mistake of ours keeps its traceback
            raise
        first: BaseException = known
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise (first if isinstance(first, P2ptrainError) else MemoryShortError(NO_MEMORY)) from group
    finally:
        for handler in logging.getLogger().handlers:
            handler.flush()  # before the command's own output


def _end_on_signals() -> None:
    """Lets SIGINT and SIGTERM cancel this task."""
    me = asyncio.current_task()
    assert me is not None, "called in a task"

    def signalled() -> None:
        if me.cancelling():
            end_soon()
        me.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore SIGINT
        asyncio.get_running_loop().add_signal_handler(number, signalled)


@contextmanager
def _card_is_named() -> Iterator[None]:
    """Raises DeviceError if a card has failed inside the block."""
    try:
        yield
    except (RuntimeError, ExceptionGroup) as error:
        if (failed := failure_of(error)) is None:
            raise
        raise failed from error


def _loop_factory() -> Any:
    try:
        import uvloop  # noqa: PLC0415  # optional: on Linux, hivemind depends on it
    except ImportError:
        return None
    return uvloop.new_event_loop


# -- Starting ---------------------------------------------------------------------------------------


async def _start(order: StartOrder, opened: Opened) -> After:
    run, dataset, home, loop = order.run, order.data, opened.home, opened.loop
    async with AsyncExitStack() as stack:
        me = opened.identity.key.hex()
        await asyncio.to_thread(_check_model, run, loop)  # a stranger's model takes seconds to lay out
        log.info("preparing the data and the first weights of %s", run.name)
        before = begun_here(run, order.said, home, me)
        if before is not None and (heir := home.heir_of(before.id)) is not None:
            return heir.hex()
        own = await asyncio.to_thread(_own_data, before or run, dataset, opened)
        if own is not None:
            dataset = own.dataset.directory
        named = before if before is not None and run.data.source == "own" else run  # its shared part has a digest
        place = home.usual_dataset(named.data.manifest)
        await asyncio.to_thread(make_it_fit, before or run, home)
        # The script's model has other weights by now, and another machine makes others from the seed.
        if before is not None and (loop is not None or await asyncio.to_thread(goes_on, before, home)):
            begun = await asyncio.to_thread(begin_again, before, place, dataset, order.given, home.bases)
        else:
            begun = await asyncio.to_thread(begin, before or run, place, [me], dataset, order.given, home.bases)
        note_begun(begun.run, run, order.said, home)
        data = TokenDataset.open(begun.dataset, begun.run.data.manifest)
        await asyncio.to_thread(keep_tokenizer, home, begun.run, data)
        transport = await opened.network(begun.run.run_id)
        launch = Launch(begun.run, home, opened.identity, transport, data, begun.base, state=begun.state, own=own)
        return await _serve(stack, launch, opened)


def goes_on(run: RunConfig, home: Home) -> bool:
    """Whether the node goes on from a state that is saved here or, if its log is lost, from the others'."""
    directory = home.of_run(run.id)
    with suppress(DataError):  # of a damaged log, as the store will say
        if (journal := read_journal(directory / LOG_NAME)) is None:
            return (beside(home.identity_file, SPOKEN_SUFFIX) / run.run_id).exists()
        return Checkpoints(directory / CHECKPOINTS_NAME, run.id).newest(journal) is not None
    return True


def make_it_fit(run: RunConfig, home: Home) -> None:
    if home.config.device.name != "cpu" and (why := why_unusable()):
        log.warning("torch cannot use the graphics card: %s", why)
    choose_settings(run, home)
    refuse_too_large(run, home)


async def _join(order: JoinOrder, opened: Opened, wanted: str | None, known: RunConfig | None = None) -> After:
    """known: the run, if this node has gone over to it"""
    home, loop = opened.home, opened.loop
    trust = _read_trust(order.trust)
    read = find.read_invitation(order.invitation) if order.invitation else None
    async with AsyncExitStack() as stack:
        transport = await opened.network(wanted)
        # A script gets the error itself: no supervisor reads its status.
        offered = find.as_offered(home, wanted) if loop is None else nullcontext()
        with offered:
            if known is not None:
                run, sources = known, find.RunSources([*home.config.network.bootstrap, *home.peers_of(known)], [])
            else:
                run, sources = await find.find_run(transport, home, wanted)
            if sources.origins and _stays_behind(sources.origins[0], home):
                raise UnusableError(_not_agreed(sources.origins[0], run, home))
            if sources.origins or home.is_going_over(run):
                await asyncio.to_thread(go_over, home, sources.origins or [_origin_of(home, run)], opened.identity)
            await asyncio.to_thread(_check_model, run, loop)  # a stranger's model takes seconds to lay out
            refuse_trust_in_the_start(trust, run)
            await asyncio.to_thread(make_it_fit, run, home)
            if order.data is not None and run.data.source == "shared":
                what = f"the nodes of run {run.name} share their training data, and do not bring their own"
                raise ConfigError(what, key="--data", fix="Leave it out")
            own = await asyncio.to_thread(_own_data, run, order.data, opened)
            if not await takes_part(transport, run, sources, home, order.asks):
                return ()
            directory = home.dataset(run.data.manifest)
            data = find.open_dataset(directory, run.data.manifest)
            if data is None:
                data = await find.fetch_dataset(transport, home, run, directory, sources)
            else:
                await asyncio.to_thread(keep_data_within, run, home, data)
            base = await find.find_base(transport, home, run, sources)
            await find.find_origin(transport, home, run, sources)
            if home.is_going_over(run):  # its owner has named it
                await asyncio.to_thread(go_over, home, [_origin_of(home, run)], opened.identity)
        claim = find.claim_for(read, opened.identity, run.run_id) if read else b""
        launch = Launch(run, home, opened.identity, transport, data, base, claim=claim, trust=trust, own=own)
        return await _serve(stack, launch, opened)


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


def _wanted(order: JoinOrder, home: Home) -> str | None:
    """Returns the run to join, or the one gone on with from it; ConfigError if command and config name two."""
    pin = home.config.network.run
    if pin and not pin.startswith(order.wanted or ""):
        raise ConfigError(f"the config names run {pin}", key="--run", fix="Leave it out, or change network.run")
    wanted = pin or order.wanted
    met = home.runs(wanted) if wanted else []
    heir = home.heir_of(met[0].id) if len(met) == 1 else None
    return heir.hex() if heir else wanted


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


@dataclass(slots=True)
class Opened:
    """A node that does not know its run yet: its identity, and its faces to the owner, to a script and to peers. They
    stay where its run goes on as another."""

    stack: AsyncExitStack
    home: Home
    identity: Identity
    loop: ScriptLoop | None
    sockets: Path
    daemon: Daemon | None = None  # once there is one
    http: HttpFace | None = None
    transport: Transport | None = None

    async def network(self, wanted: str | None) -> Transport:
        """Returns the network, which is opened once: with the remembered relays of the wanted run, or without them if
        p2pd rejects an address that came from peers."""
        from p2ptrain.net.libp2p.p2pd import P2pd  # noqa: PLC0415  # hivemind takes three seconds

        if self.transport is None:
            home, relayed = self.home, find.with_relays(self.home, wanted)
            start = partial(P2pd.start, home.identity_file, directory=self.sockets, ports_file=home.ports_file)
            try:
                self.transport = await start(network=relayed)
            except TransportError as error:
                if relayed == home.config.network:
                    raise
                log.warning("starting without the remembered relays: %s", error)
                self.transport = await start(network=home.config.network)
            self.stack.push_async_callback(self.transport.close)
        return self.transport

    async def show(self) -> None:
        """Opens the HTTP server, early, so that it can show that the node is starting."""
        if self.home.config.http.enabled:
            self.http = await HttpFace.open(self.home.config.http, lambda: self.daemon)
            self.stack.push_async_callback(self.http.close)

    def note(self, daemon: Daemon | None) -> None:
        """Notes the daemon that runs; None: it has ended."""
        self.daemon = daemon


async def _open(stack: AsyncExitStack, home: Home, loop: ScriptLoop | None) -> Opened:
    config = home.config
    be_nice(config.limits.nice)
    allow_open_files()
    set_up(config.logging)
    find.check_addresses(config.network)
    identity = _open_identity(stack, home)
    if loop is not None:
        await stack.enter_async_context(loop.attached())
    opened = Opened(stack, home, identity, loop, stack.enter_context(private_directory()))
    control = Control(home.directory, opened.sockets, _answers(opened))
    await control.start()
    stack.push_async_callback(control.close)
    notify(STATUS=STARTING)
    await opened.show()
    return opened


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
    refused = partial(ConfigError, source=str(directory), key="storage.directory")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        link, kind = os.lstat(directory), directory.stat()
    except OSError as error:
        raise refused(f"cannot be written: {error.strerror}", fix=fix) from error
    why = ""
    if {link.st_uid, kind.st_uid} - {0, os.geteuid()}:
        why = "belongs to another user, who could change what the node keeps"
    elif kind.st_mode & stat.S_IWOTH:
        why, fix = "every user of this machine may change what is in it", f"chmod o-w {directory}"
    if why:
        raise refused(why, fix=fix)


# -- Running ----------------------------------------------------------------------------------------


def _answers(opened: Opened) -> Answer:
    """Returns what answers the control socket, also before there is a daemon to pass requests to."""
    life = asyncio.current_task()

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if opened.daemon is not None:
            return await opened.daemon.answer(request)
        if request == {"do": "leave"} and life is not None:
            life.cancel()  # there is no run to leave yet
            return {"leaving": True}
        return {"error": "the node is starting or looking for the run; see its log"}

    return answer


async def _serve(stack: AsyncExitStack, launch: Launch, opened: Opened) -> After:
    """Runs the node until it has left or is stopped; returns how the run has ended, if it goes on as another."""
    url, loop = opened.http.url if opened.http else None, opened.loop
    hears = [each.note for each in _trackers(stack, launch)]
    make, attached = (loop.worker, None) if loop else own_worker(launch)
    daemon = await Daemon.open(stack, launch, partial(open_workshop, make=make), url, hears)
    opened.note(daemon)
    stack.callback(opened.note, None)
    _tell_how_to_join(launch.transport, launch.run)
    if loop is not None:
        loop.joined(daemon)
    if attached is not None:
        await stack.enter_async_context(attached(daemon.edges))
    progress = ProgressLine(launch.config.logging.format, lambda: status_of(daemon))
    progress.start()
    stack.callback(progress.stop)
    why = await live(daemon, progress)
    if daemon.origins and not daemon.is_leaving:
        _end_on_signals()  # until there is a daemon again
    notify(**(watchdog(GOING_OVER_SECONDS) if daemon.origins else {"STOPPING": "1"}), STATUS=f"{why}: saving the state")
    await save_last(daemon)
    log.info("%s: ended", why)
    return after_the_end(daemon) if daemon.origins and not daemon.is_leaving else ()


def after_the_end(daemon: Daemon) -> Sequence[Descent]:
    """Returns how the run has ended, if this node goes along; raises UnusableError if its owner has not agreed."""
    decided, (*_, last) = daemon.driver.node.view().state.succession.decided, daemon.origins
    try:
        heir = succeed(last)[0]
    except RemoteProtocolError as error:
        what = f"run {daemon.run.run_id[:16]} goes on with what this release cannot do: {error.why}"
        raise UnusableError(what, fix="Install a newer release, and start this node again") from error
    if daemon.agenda.accept != "never" and (decided is None or daemon.agenda.goes_along(decided)):
        return daemon.origins
    home = daemon.launch.home
    refused = home.of_run(daemon.run.id) / REFUSED_NAME  # or the next start would go along
    write_atomically(refused, heir.run_id.encode() + b"\n")
    raise UnusableError(_not_agreed(daemon.origins[0], heir, home))


def _stays_behind(origin: Descent, home: Home) -> bool:
    """Whether this node's owner has not agreed to what follows a run, at its end or by a standing rule."""
    accept, ended = home.config.succession.accept, RunConfig.from_canonical(origin.config)
    return accept == "never" or (accept != "all" and (home.of_run(ended.id) / REFUSED_NAME).exists())


def _not_agreed(origin: Descent, heir: RunConfig, home: Home) -> str:
    run, directory = RunConfig.from_canonical(origin.config), home.config.storage.directory
    address = next(iter([*home.config.network.bootstrap, *home.peers_of(run)]), "ADDR")
    command = f"p2ptrain join --run {heir.run_id} --bootstrap {address}"
    command += f" --data-dir {shlex.quote(directory)}" if directory else ""
    what = f"run {run.run_id[:16]} has ended with round {origin.last.manifest.round}, as its members decided, and this"
    what += f" node's owner has not agreed to what follows. To go along: `{command}`"
    return f'{what}, or network.run = "{heir.run_id}" in its config'


def _origin_of(home: Home, run: RunConfig) -> Descent:
    origin = origin_in(home.of_run(run.id))
    assert origin is not None, "who is going over has it"
    return origin


def _trackers(stack: AsyncExitStack, launch: Launch) -> list[Tracking]:
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
    if run.protocol in ENDING:
        what = "release %s will not speak the run's protocol %s any more: see `p2ptrain propose --set protocol=%s`"
        log.warning(what, ENDING[run.protocol], run.protocol, max(PROTOCOLS))
    if not run.is_audited:
        log.info("nobody can tell whether members train, because %s", run.why_not_audited)
    if not addresses:
        log.warning("no address that others could use yet; `p2ptrain status` shows it once there is one")
    for address in addresses if sys.stdout else ():  # each in one write, since the log may go to the same file
        with suppress(OSError):  # a closed terminal, or a reader that has ended
            write_all(sys.stdout.fileno(), f"p2ptrain join --bootstrap {address} --run {run.run_id}\n".encode())
