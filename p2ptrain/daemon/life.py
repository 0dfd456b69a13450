"""The daemon: one node of one run with its status, HTTP and trackers, from the first event to the last checkpoint.

One TaskGroup holds every task. The first SIGINT or SIGTERM asks the core to leave the run, the second ends the daemon
at once. A crash of any task ends it with an error; the next start continues from what was saved."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from random import SystemRandom
from time import monotonic
from typing import Any

import torch

from p2ptrain import __version__
from p2ptrain.core import events as ev
from p2ptrain.core.complaints import Code
from p2ptrain.core.origin import Descent
from p2ptrain.daemon.assembly import Launch, OpenWorkshop, assemble, open_workshop
from p2ptrain.errors import INTERRUPTED, ConfigError, DataError, StoppedError
from p2ptrain.models.sample import SampleRequest, read_request
from p2ptrain.net import questions
from p2ptrain.net.connections import topic_of
from p2ptrain.net.transport import Transport
from p2ptrain.node.agenda import Agenda
from p2ptrain.node.clock import ClockWatch, Lag
from p2ptrain.node.driver import Driver
from p2ptrain.node.edges import Topic
from p2ptrain.node.find import ask_around, find_successor
from p2ptrain.node.gpu_use import Energy, GpuWatch, meter_of
from p2ptrain.node.limits import MachineLimits
from p2ptrain.node.notify import SystemdNotifier, notify
from p2ptrain.node.owner import carry_out
from p2ptrain.observe.build import complaints_of, peers_of, rounds_of, status_of
from p2ptrain.observe.progress import News, ProgressLine, line_of
from p2ptrain.observe.rounds import ROUNDS_KEPT, Recorder
from p2ptrain.observe.schema import RoundRecord, Rounds

TELL_SECONDS = 1.0
REMEMBER_SECONDS = 1.0  # between saves of the peers' addresses, if they have changed: the node may be killed soon
ROUNDS_SECONDS = 5.0  # between saves of the rounds' records
HEIR_SECONDS, HEIR_SECONDS_MAX = 5.0, 120.0  # between questions for a successor
ASKED_MAX = 16  # peers that are asked, besides the bootstraps
QUIET_SECONDS, QUIET_SECONDS_DECIDED = 120.0, 15.0  # without a round: and once a successor is decided
LEFT_ALONE = {Code.STALLED, Code.FEW_HEARD, Code.NO_PEERS, Code.NOT_ADMITTED}
END_SECONDS = 3.0  # after a second signal, for everything to shut down, p2pd included
SAMPLE_SECONDS_MAX = 60.0  # during which this node does not train; a swarm waits about as long for it

log = logging.getLogger("p2ptrain.daemon")


class Daemon:
    """A running node of one run, with its outputs."""

    def __init__(
        self, launch: Launch, driver: Driver, records: Recorder, started: ev.Started, http: str | None
    ) -> None:
        """http: the URL of its page"""
        self.launch, self.driver, self.records, self.started, self.http = launch, driver, records, started, http
        self.run, self.edges, self.owner = launch.run, driver.edges, launch.config.network.owner
        self.lag = Lag()
        connections = self.edges.connections
        self.clock = ClockWatch(connections.transport, connections.linked, connections.rng)
        device = driver.worker.device
        self.gpu = GpuWatch(device, lambda: self.machine_limits.limits.on_gpu_busy == "pause")
        self.machine_limits = MachineLimits(
            launch.config.limits, driver.trainings.pauses, driver.worker, gpu=lambda: self.gpu.is_busy
        )
        self.energy = Energy(lambda: meter_of(device), records.note_energy, lambda: not driver.trainings.pauses)
        self.agenda = Agenda(driver, launch.config.succession.accept, launch.home)
        self.is_leaving = self.keeps_place = False
        self.follows = launch.home.ancestors(self.run)
        self._found: Sequence[Descent] = ()  # origins that peers have told
        self._began = monotonic()

    @classmethod
    async def open(
        cls,
        stack: AsyncExitStack,
        launch: Launch,
        opened: OpenWorkshop = open_workshop,
        http: str | None = None,
        hears: Sequence[Callable[[RoundRecord], None]] = (),
    ) -> Daemon:
        """Builds a daemon that is about to start; closing `stack` closes it. `hears` are called with each new round."""
        stack.callback(_free, launch.transport)  # last, when nothing else holds the run's parts
        daemon = cls(launch, *await assemble(stack, launch, opened, hears), http)
        edges = daemon.edges
        # Questions first: a peer that sees us speak the run's protocol asks at once for our peers' addresses.
        await questions.serve(launch.transport, daemon.ask_by_peer, edges.upload, edges.view.is_in)
        await stack.enter_async_context(edges.server)
        await stack.enter_async_context(edges.mailboxes)
        return daemon

    @property
    def origins(self) -> Sequence[Descent]:
        """How the run has ended, and any between it and the one to go on with; empty before."""
        origin = self.driver.node.view().origin
        return (origin,) if origin is not None else self._found

    @property
    def uptime(self) -> float:
        return monotonic() - self._began

    @property
    def since_applied(self) -> float | None:
        """Seconds since a round was applied; None if there was none since the start."""
        at = self.driver.applied_at
        return None if at is None else round(max(0.0, asyncio.get_running_loop().time() - at), 3)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        await self.driver.has_begun.wait()
        match request:
            case {"do": "status" | "peers" | "rounds" | "agenda"}:
                return self._tell(request)
            case {"do": "leave"} if self.keeps_place:
                return {"error": "the node is already stopping and stays admitted. Start it again to leave"}
            case {"do": "leave"}:
                self.leave()
                return {"leaving": True}
            case {"do": "sample", **content}:
                return {"text": await self._sample(read_request(content))}
        return await carry_out(self.driver, self.machine_limits, self.agenda, request)

    def _tell(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"do": "status"}:
                return status_of(self).model_dump(mode="json")
            case {"do": "peers"}:
                return peers_of(self).model_dump(mode="json")
            case {"do": "agenda"}:
                return status_of(self).model_dump(mode="json", include={"motions", "successor"})
            case {"do": "rounds", "last": int(last)} if 0 < last <= ROUNDS_KEPT:
                return Rounds(rounds=rounds_of(self, last)).model_dump(mode="json")
        return {"error": f"last must be a number of rounds from 1 to {ROUNDS_KEPT}"}

    async def _sample(self, request: SampleRequest) -> str:
        """Samples text from the agreed weights after the current training, for a limited time."""
        worker, until = self.driver.worker, 0.0

        def go_on() -> None:
            nonlocal until
            until = until or monotonic() + SAMPLE_SECONDS_MAX
            if worker.is_stopping:
                raise StoppedError("the daemon is stopping")
            if monotonic() > until:
                fix = "Ask for fewer, or sample from a checkpoint with --round"
                what = f"this many take more than {SAMPLE_SECONDS_MAX:.0f} s, during which this node does not train"
                raise ConfigError(what, key="tokens", fix=fix)

        return await worker.sample(request, go_on) or ""

    def _seems_left_alone(self) -> bool:
        """Whether the others may have gone on without this node. Who has no seat hears nothing of a lost quorum, and
        those who have gone on stay connected."""
        view = self.driver.node.view()
        since = self.uptime if self.since_applied is None else self.since_applied
        quiet = QUIET_SECONDS if view.state.succession.decided is None else QUIET_SECONDS_DECIDED
        codes = {each.code for each in view.complaints}
        return view.state.branch != self.edges.run_id or bool(LEFT_ALONE & codes) or since >= quiet

    async def look_for_heir(self) -> None:
        """Goes on with the successor if the run has ended without this node: others answer there, and nobody here."""
        transport, home, edges = self.edges.transport, self.launch.home, self.edges
        await self.driver.has_begun.wait()
        pause = HEIR_SECONDS
        while not self.origins and self.agenda.accept != "never":
            await asyncio.sleep(pause)
            if self.is_leaving or not self._seems_left_alone():
                pause = HEIR_SECONDS
                continue
            pause = min(2.0 * pause, HEIR_SECONDS_MAX)
            with transport.boundary.contain("the question for a successor"):
                known = edges.connections.remembered()
                some = SystemRandom().sample(known, min(len(known), ASKED_MAX))
                addresses = [*self.launch.config.network.bootstrap, *some]
                found, _ = await ask_around(transport, addresses)
                heir = await find_successor(transport, home, found, addresses, None, [self.run])
                if heir is not None:
                    self._found = heir[1].origins
                    self.driver.intake.give(ev.StopRequested(keeps_place=True))

    def leave(self) -> None:
        """Leaves the run for good: to return, the node has to be admitted again."""
        self._stop("leaving the run, with the manifest of this round or the next", keeps_place=False)

    def stop(self) -> None:
        """Handles a signal: leaves the run, or in a run by invitation, goes away but stays admitted: to return, a node
        that has left needs a new invitation, which a reboot should not cost."""
        if self.run.admission.policy != "invite":
            self.leave()
        elif self.driver.has_begun.is_set() and self.driver.node.view().is_admitted:
            self._stop("going away; the node stays admitted (`p2ptrain leave` gives that up)", keeps_place=True)
        else:
            self._stop("going away; the node is not admitted yet: start it again with its invitation", keeps_place=True)

    def _stop(self, what: str, *, keeps_place: bool) -> None:
        if self.is_leaving:
            return
        self.is_leaving, self.keeps_place = True, keeps_place
        log.info("%s; signal again to end at once", what)
        notify(STOPPING="1", STATUS=what)
        self.driver.intake.give(ev.StopRequested(keeps_place))
        self.driver.effects.hurry()

    def ask_by_peer(self, peer: bytes, question: questions.Question) -> questions.Answer:
        edges, view = self.edges, self.driver.node.view()
        state = view.state if view.has_started else edges.persistence.store.genesis
        is_ours = isinstance(question, questions.AskRuns) or question.run_id == edges.run_id
        match question:
            case questions.AskRuns():
                members, round_number = len(state.members), state.round
                return questions.Runs(
                    (questions.RunInfo(edges.run_id, self.run.name, round_number, members, self.follows),)
                )
            case questions.AskConfig():
                return questions.Config(self.run.canonical() if is_ours else b"")
            case questions.AskStates():
                return questions.States(edges.served_blobs.states.places() if is_ours else ())
            case questions.AskPeers():
                if not is_ours:
                    upstream = self.driver.worker.upstream
                    if upstream is not None and question.run_id.hex() == upstream.run:
                        return questions.Peers(upstream.addresses)
                    return questions.Peers()
                edges.connections.takes_part(peer)
                known = edges.connections.reachable(but=peer)[: questions.PEERS_MAX]
                return questions.Peers(known, __version__[: questions.RELEASE_MAX], self.owner)


def end_soon() -> None:
    """Makes sure that this process ends soon, even if a thread is writing or the disk hangs: all is consistent."""

    def end() -> None:
        time.sleep(END_SECONDS)
        os._exit(INTERRUPTED)

    threading.Thread(target=end, name="end soon", daemon=True).start()


def _free(transport: Transport) -> None:
    """Takes a run from the network, and frees what it held, on a card as well, for the run that follows."""
    transport.end_run()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no card is in use


async def live(daemon: Daemon, progress: ProgressLine) -> str:
    """Runs all tasks of the node while it takes part, and returns why it ended."""
    loop, edges = asyncio.get_running_loop(), daemon.edges
    me = asyncio.current_task()
    assert me is not None

    def signalled() -> None:
        if daemon.is_leaving:
            end_soon()
            me.cancel()
        daemon.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    daemon.machine_limits.look()  # before anything is trained
    view = daemon.driver.node.view()
    await edges.transport.subscribe(topic_of(edges.run_id), daemon.driver.intake.hear, view.is_in)
    async with asyncio.TaskGroup() as group:
        rest = [
            group.create_task(edges.connections.run(), name="connections"),
            group.create_task(Topic(edges).watch(), name="topic"),
            group.create_task(daemon.lag.watch(), name="lag"),
            group.create_task(daemon.machine_limits.watch(), name="limits"),
            group.create_task(daemon.energy.watch(), name="energy"),
            group.create_task(daemon.clock.watch(), name="clock"),
            group.create_task(daemon.gpu.watch(), name="use of the GPU"),
            group.create_task(_tell(daemon, progress), name="progress"),
            group.create_task(daemon.agenda.watch(), name="agenda"),
            group.create_task(_remember(daemon), name="remembering peers"),
            group.create_task(daemon.look_for_heir(), name="looking for a successor"),
        ]
        why = await daemon.driver.run(daemon.started)
        for task in rest:
            task.cancel()
    return why


async def _tell(daemon: Daemon, progress: ProgressLine) -> None:
    news, notifier = News(), SystemdNotifier()
    driver, transport = daemon.driver, daemon.edges.transport
    await driver.has_begun.wait()
    while True:
        await asyncio.sleep(TELL_SECONDS)
        with transport.boundary.contain("the node's status"):  # it quotes peers
            view, complaints = driver.node.view(), complaints_of(daemon)
            for level, text in news.look(view.state, complaints, view.bans, view.kept_away):
                log.log(level, "%s", text)
            progress.tell()
            notifier.look(lambda: line_of(status_of(daemon)), any(each.code is Code.HALTED for each in complaints))


async def _remember(daemon: Daemon) -> None:
    saved: list[str] = []
    rounds_at = monotonic()
    while True:
        await asyncio.sleep(REMEMBER_SECONDS)
        if monotonic() - rounds_at >= ROUNDS_SECONDS:
            rounds_at = monotonic()
            await daemon.records.save()
            await daemon.edges.persistence.look_for_room()
        addresses = saved
        with daemon.edges.transport.boundary.contain("the addresses to remember"):
            addresses = daemon.edges.connections.remembered()
        if addresses not in ([], saved) and await daemon.edges.persistence.remember(addresses):
            saved = addresses  # while no peer is reachable, the earlier addresses are the best known ones


async def save_last(daemon: Daemon) -> None:
    """Saves a last checkpoint, unless the state is wrong, and everything else that is not on the disk yet."""
    driver, persistence = daemon.driver, daemon.edges.persistence
    number, standings = driver.replica.replica.round, driver.replica.standings
    is_due = standings and not driver.node.view().is_quarantined and not await persistence.has(number)
    if is_due and await persistence.save(driver.worker, standings) is None and daemon.origins:
        fix = "Make room on the disk or in memory, and start the node again"
        raise DataError("the last state was not saved, and the run that follows begins with it", fix=fix)
    addresses: list[str] = []
    with daemon.edges.transport.boundary.contain("the last addresses to remember"):
        addresses = daemon.edges.connections.remembered()
    if addresses:
        await persistence.remember(addresses)
    await daemon.records.save(all_of_it=True)
