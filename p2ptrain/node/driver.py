"""The driver: passes events from the intake to the core, and carries out the core's effects.

The effect queue (core/effect_queue.py) decides in which order effects are carried out and which of them wait for the
disk. Long work (training, applying, fetching) runs in a task, and its result comes back as an event. No decision about
rounds is made here.

The queue of events, and what peers put into it, is in intake.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.effect_queue import EffectQueue
from p2ptrain.core.node import Node
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.net.blobs.blob import verified
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.mail import Deliver, MessageQuery
from p2ptrain.net.transport import TransportError
from p2ptrain.node.audits import Audits
from p2ptrain.node.edges import Edges, Telling
from p2ptrain.node.intake import Intake
from p2ptrain.node.payload_fetches import PayloadFetches
from p2ptrain.node.persistence import DISK_SECONDS
from p2ptrain.node.replica_thread import ReplicaThread
from p2ptrain.node.trainings import Trainings
from p2ptrain.node.work import StoppedError, Worker
from p2ptrain.store.store import PayloadLostError

EFFECTS_MAX = 4_096  # waiting for a failing disk; beyond it, no more events are handled
EVENTS_IN_A_ROW = 32  # before other tasks on the loop get their turn
CATCH_UP_SECONDS = 3_600.0  # to fetch a state; a stalled fetch ends sooner

TO_A_PEER = ev.Send, ev.Ask, ev.AskHistory, ev.SendHistory, ev.Disconnect

Actions = Mapping[type, Callable[[Any], object]]  # how each kind of effect is carried out
OnEvent = Callable[[float, ev.Event, Sequence[ev.Effect] | None], None]  # effects is None if the core crashed

log = logging.getLogger("p2ptrain.node")


class NodeTasks:
    """The tasks of a running node. A crash of one ends the others."""

    def __init__(self) -> None:
        self.group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self.group.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()


class EffectLoop:
    """Carries out effects in their order, and writes the records among them before what follows. `stopped` gets the
    reason once the core says `Stop`; `fetch_lost` fetches a payload that a record needs and the disk has lost."""

    def __init__(self, actions: Actions, edges: Edges, fetch_lost: Callable[[bytes], Awaitable[None]]) -> None:
        self.actions: Actions = {**actions, ev.Stop: lambda effect: self._stop(effect.why)}
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.disk_trouble = ""  # the error, while the disk cannot be written
        self._edges, self._fetch_lost = edges, fetch_lost
        self._queue: EffectQueue[ev.Effect] = EffectQueue()
        self._has_any = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, effects: Sequence[ev.Effect]) -> None:
        self._queue.add(effects)
        self._has_any.set()

    async def run(self) -> None:
        while True:
            await self._has_any.wait()
            self._has_any.clear()
            while records := self._queue.carry_out(self._act):
                await self._write(records)
                self._queue.written()

    def _act(self, effect: ev.Effect) -> None:
        if isinstance(effect, TO_A_PEER):
            with self._edges.transport.boundary.contain("what the core says to a peer", effect.peer):
                self.actions[type(effect)](effect)
        else:
            self.actions[type(effect)](effect)

    async def _write(self, records: Sequence[ev.Record]) -> None:
        """Writes the records with one sync, and retries until the disk accepts them."""
        while True:
            try:
                await self._edges.persistence.on_disk(self._edges.persistence.store.write, records)
            except PayloadLostError as error:
                log.warning("%s; fetching it again", error)
                await self._fetch_lost(error.name)
            except DataError as error:
                if not self.disk_trouble:
                    log.error("%s; the node sends and applies nothing until this can be written", error)
                elif self._edges.view.is_stopping:  # it cannot even announce that it leaves
                    self._stop(f"the disk cannot be written: {error}")
                self.disk_trouble = str(error)
                await asyncio.sleep(DISK_SECONDS)
            else:
                if self.disk_trouble:
                    log.warning("the disk can be written again")
                self.disk_trouble = ""
                return

    def _stop(self, why: str) -> None:
        if not self.stopped.done():
            self.stopped.set_result(why)


class Driver:
    """Connects the core to the replica, the worker and the edges."""

    def __init__(
        self, node: Node, replica: ReplicaThread, worker: Worker, intake: Intake, edges: Edges, on_event: OnEvent
    ) -> None:
        """`on_event` is called after the core has handled an event, with the time, the event and its effects."""
        self.node, self.replica, self.worker, self.intake, self.edges = node, replica, worker, intake, edges
        self.has_begun = asyncio.Event()  # the core has handled `Started` and can be queried
        self.applied_at: float | None = None  # when the last round was applied, in the loop's time
        self.tasks = NodeTasks()
        self.telling = Telling(edges, intake.counters, self.tasks.spawn)
        self.trainings = Trainings(worker, edges, intake.give, self.tasks.spawn)
        self.payloads = PayloadFetches(replica, intake, edges, self.tasks.spawn)
        self.audits = Audits(worker, replica, edges, intake.give, lambda: not self.trainings.pauses)
        self.effects = EffectLoop(self._actions(), edges, self.payloads.fetch_lost)
        self._on_event = on_event
        self._catching_up: asyncio.Task[None] | None = None

    def _actions(self) -> Actions:
        spawn, mailboxes, worker = self.tasks.spawn, self.edges.mailboxes, self.worker
        return {
            ev.Publish: self.telling.publish,
            ev.Send: lambda effect: mailboxes.post(effect.peer, Deliver(effect.envelopes)),
            ev.Ask: lambda effect: mailboxes.post(effect.peer, MessageQuery(effect.names)),
            ev.AskHistory: lambda effect: mailboxes.ask_history(effect.peer, effect.branch, effect.round),
            ev.SendHistory: self.telling.tell_history,
            ev.Fetch: self.payloads.fetch_payload,
            ev.Train: lambda effect: spawn(self.trainings.train(effect), "train"),
            ev.Pace: lambda effect: worker.keep_pace(effect.round, effect.usual, effect.last),
            ev.Apply: lambda effect: spawn(self._apply(effect, self.replica.replica.adopted), "apply"),
            ev.Return: lambda effect: worker.settled(effect.round, None),
            ev.Persist: lambda effect: None,  # the record is on the disk by now
            ev.NoteWrongState: lambda effect: spawn(self.edges.persistence.note_mismatch(effect.round), "mismatch"),
            ev.CatchUp: self._catch_up,
            ev.Audit: lambda effect: spawn(self.audits.audit(effect), "audit"),
            ev.Disconnect: self.telling.disconnect,
        }

    async def run(self, started: ev.Started) -> str:
        """Runs until the node has stopped, and returns why."""
        async with self.tasks.group:
            self.intake.begin(started, self.tasks.spawn)
            self.tasks.spawn(self._handle_for_ever(), "events")
            self.tasks.spawn(self.effects.run(), "effects")
            self.tasks.spawn(self.telling.run(), "telling")
            why = await self.effects.stopped
            self.intake.end()
            self.worker.stop()
            await self.telling.drain()
            self.tasks.cancel()
        return why

    async def _handle_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        for count in itertools.count(1):
            if not self.intake.events:
                await self.intake.wait(self.node.deadline)
            while len(self.effects) > EFFECTS_MAX:  # noqa: ASYNC110  # nothing to await: the disk is failing
                await asyncio.sleep(DISK_SECONDS / 10)
            event = self.intake.take() or ev.Tick()
            now = loop.time()
            effects: Sequence[ev.Effect] | None = None
            try:
                effects = self.node.handle(event, now)
            finally:  # an event that crashes the core is the most important one to record
                self._on_event(now, event, effects)
            self.has_begun.set()
            if effects:
                self.effects.add(effects)
            if count % EVENTS_IN_A_ROW == 0:
                await asyncio.sleep(0)

    # -----------------------------------------------------------------------------------------------
    # The replica

    async def _apply(self, effect: ev.Apply, adopted: int) -> None:
        """Applies a round, unless another state has been adopted since the core asked for it."""
        manifest = effect.manifest
        good, mine = [], {}
        for taken in manifest.taken:
            payload = await self.payloads.agreed(taken, adopted)
            if payload is None:
                return
            if taken.counts:
                good.append(payload)
            if taken.author == self.node.view().me:
                mine[taken.round] = payload
        try:
            await self.worker.repeat(self.trainings.fetch_again, is_applying=True)
            root = await self.replica.apply(manifest, good, mine, adopted)
        except StoppedError:
            return
        if root is None:
            return
        self.applied_at = asyncio.get_running_loop().time()
        self.intake.give(ev.Applied(manifest.branch, manifest.round, root))
        await self.edges.persistence.checkpoint(self.worker, self.replica.standings, manifest.round)
        await self.edges.persistence.let_go(manifest)

    def _catch_up(self, effect: ev.CatchUp) -> None:
        if self._catching_up is not None:
            self._catching_up.cancel()  # it belonged to a branch that we have left
        self._catching_up = self.tasks.spawn(self._fetch_state(effect), "catch up")

    async def _fetch_state(self, effect: ev.CatchUp) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    like = await self.replica.state_of({number for number, _ in effect.roots})
                    with self.edges.transport.boundary.guard("the fetch of a state"):
                        size = self.replica.replica.state_bytes
                        fetched = self.edges.fetching.state(effect.roots, effect.sources, size, like)
                        number, root, state = await stack.enter_async_context(fetched)
                was_wrong = self.node.view().is_quarantined
                await self.replica.adopt(number, root, verified(state), was_wrong=was_wrong)
        except (FetchError, DataError, RemoteProtocolError, TransportError, TimeoutError) as error:
            log.info("cannot fetch the state yet: %s", error)
            self.intake.give(ev.CatchUpFailed(str(error), effect.attempt))
            return
        log.info("adopted the state of round %d, root %s", number, root.hex()[:16])
        with self.edges.persistence.training_waits():  # as it builds on this state
            self.intake.give(ev.CaughtUp(number, root, effect.attempt))
            await self.edges.persistence.save(self.worker, self.replica.standings)
