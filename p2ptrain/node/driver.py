"""The driver: passes events from the intake to the core, and carries out the core's effects.

The effect queue (core/effect_queue.py) decides in which order effects are carried out and which of them wait for the
disk. Long work (training, applying, fetching) runs in a task, and comes back as an event. No round is decided here.

The queue of events, and what peers put into it, is in intake.py. Contributions are fetched and checked here."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.effect_queue import EffectQueue
from p2ptrain.core.messages import author_of, content_name
from p2ptrain.core.node import Node
from p2ptrain.core.state import Taken
from p2ptrain.errors import DataError, RemoteProtocolError, StoppedError
from p2ptrain.net.blobs.blob import verified
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.mailbox import Deliver, MessageQuery
from p2ptrain.net.transport import TransportError
from p2ptrain.node.audits import Audits
from p2ptrain.node.edges import Edges, Telling
from p2ptrain.node.fetching import ignore
from p2ptrain.node.intake import Intake, Spawn
from p2ptrain.node.persistence import DISK_SECONDS
from p2ptrain.node.replica_thread import ReplicaThread
from p2ptrain.node.trainings import Trainings
from p2ptrain.node.work import Worker
from p2ptrain.store.store import PayloadLostError

EFFECTS_MAX = 4_096  # waiting for a failing disk; beyond it, no more events are handled
EVENTS_IN_A_ROW = 32  # before other tasks on the loop get their turn
CATCH_UP_SECONDS = 3_600.0  # to fetch a state; a stalled fetch ends sooner

TO_A_PEER = ev.Send, ev.Ask, ev.AskHistory, ev.SendHistory, ev.Disconnect

Actions = Mapping[type, Callable[[Any], object]]  # how each kind of effect is carried out
OnEvent = Callable[[float, ev.Event, Sequence[ev.Effect] | None], None]  # effects is None if the core crashed

log = logging.getLogger("p2ptrain.node")


class PayloadFetches:
    """Fetches payloads from peers, each of them once, and checks them."""

    def __init__(self, replica: ReplicaThread, intake: Intake, edges: Edges, spawn: Spawn) -> None:
        self.running: dict[bytes, dict[asyncio.Task[None], Sequence[bytes]]] = {}  # by payload: who is asked by each
        self._replica, self._intake, self._edges, self._spawn = replica, intake, edges, spawn
        self._boundary = edges.transport.boundary

    def fetch_payload(self, effect: ev.Fetch) -> None:
        """Fetches a payload that the core wants, unless its size is none that the run has."""
        if effect.payload_bytes not in self._replica.payload_sizes:
            for source in effect.sources:
                why = f"no contribution has {effect.payload_bytes} bytes"
                self._intake.give(ev.FetchFailed(effect.payload, source, why))
            return
        fetches = self.running.setdefault(effect.payload, {})
        asked = {source for sources in fetches.values() for source in sources}
        fresh = tuple(source for source in effect.sources if source not in asked)
        task = self._spawn(self._beside(list(fetches), fresh, effect), "fetch")
        fetches[task] = fresh
        task.add_done_callback(lambda task: self._forget(effect.payload, task))

    def _forget(self, payload: bytes, task: asyncio.Task[None]) -> None:
        del self.running[payload][task]
        if not self.running[payload]:
            del self.running[payload]

    async def _beside(self, others: list[asyncio.Task[None]], fresh: Sequence[bytes], effect: ev.Fetch) -> None:
        """Fetches a payload from those who are not being asked for it: another announcement of it may be a lie, whose
        author holds up what is fetched from it. If there are none, the other fetches may make this one unnecessary."""
        if others and not fresh:
            await asyncio.wait(others)
            others, fresh = [], effect.sources
        payload = await self._edges.persistence.payload(effect.payload)
        if payload is None:
            failed = dict.fromkeys(effect.sources, "")

            def tell(peer: bytes, why: str) -> None:
                failed.pop(peer, None)
                self._intake.give(ev.FetchFailed(effect.payload, peer, why))

            try:
                with self._boundary.guard("the fetch of a payload"):
                    payload = await self._edges.fetching.payload(effect.payload, effect.payload_bytes, fresh, tell)
            except (FetchError, TransportError) as error:
                if others:
                    await asyncio.wait(others)
                for source in failed:
                    self._intake.give(ev.FetchFailed(effect.payload, source, str(error)))
                return
            for other in others:
                other.cancel()
            self._edges.persistence.put(effect.payload, payload)
        why = await self._intake.refusal(author_of(payload), payload)
        if why is not None:
            log.info("contribution rejected: %s", why)
        self._intake.give(
            ev.PayloadArrived(effect.payload, why is None, author_of(payload), len(payload), content_name(payload))
        )

    async def fetch_lost(self, name: bytes, payload_bytes: int = 0) -> bool:
        """Fetches a payload that was stored here but has been lost, of this size or, if that is 0, of one that there
        is. Returns whether a connected peer had it."""
        sources = list(self._edges.connections.linked)
        for size in (payload_bytes,) if payload_bytes else sorted(self._replica.payload_sizes):
            try:
                with self._boundary.guard("the fetch of a lost payload"):
                    payload = await self._edges.fetching.payload(name, size, sources, ignore)
            except (FetchError, TransportError) as error:
                log.warning("%s; trying again", error)
            else:
                self._edges.persistence.put(name, payload)
                return True
        await asyncio.sleep(DISK_SECONDS)
        return False

    async def agreed(self, taken: Taken, adopted: int) -> bytes | None:
        """Returns a payload of an agreed round, and fetches it again if the disk has lost it; None if another state has
        been adopted meanwhile, and it is no longer needed."""
        store, held = self._edges.persistence, self._replica.replica
        while (payload := await store.payload(taken.payload)) is None and held.adopted == adopted:
            log.warning("payload %s of an agreed round is lost; fetching it again", taken.payload.hex()[:16])
            await self.fetch_lost(taken.payload, taken.payload_bytes)
        return payload


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

    def __init__(self, actions: Actions, edges: Edges, fetch_lost: Callable[[bytes], Awaitable[bool]]) -> None:
        self.actions: Actions = {**actions, ev.Stop: lambda effect: self._stop(effect.why)}
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.disk_trouble = ""  # the error, while the disk cannot be written
        self._edges, self._fetch_lost = edges, fetch_lost
        self._queue: EffectQueue[ev.Effect] = EffectQueue()
        self._has_any = asyncio.Event()
        self._is_hurried = False

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, effects: Sequence[ev.Effect]) -> None:
        self._queue.add(effects)
        self._has_any.set()

    def hurry(self) -> None:
        """Lets the node end without what it cannot write, though the core may not come to hear that it is to stop."""
        self._is_hurried = True

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
                if not await self._fetch_lost(error.name) and self._is_ending:
                    self._stop(str(error))
            except DataError as error:
                if not self.disk_trouble:
                    log.error("%s; the node sends and applies nothing until this can be written", error)
                elif self._is_ending:  # it cannot even announce that it leaves
                    self._stop(f"the disk cannot be written: {error}")
                self.disk_trouble = str(error)
                await asyncio.sleep(DISK_SECONDS)
            else:
                if self.disk_trouble:
                    log.warning("the disk can be written again")
                self.disk_trouble = ""
                return

    @property
    def _is_ending(self) -> bool:
        return self._is_hurried or self._edges.view.is_stopping

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
        disk = self.edges.persistence
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
            ev.NoteWrongState: lambda effect: spawn(disk.on_disk(disk.store.mismatches.note, effect.round), "mismatch"),
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

    # -- The replica --------------------------------------------------------------------------------

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
                    with self.edges.transport.boundary.guard("the fetch of a state"):
                        size = self.replica.replica.state_bytes
                        fetched = self.edges.fetching.state(effect.roots, effect.sources, size)
                        number, root, state = await stack.enter_async_context(fetched)
                await self.replica.adopt(number, root, verified(state))
        except (FetchError, DataError, RemoteProtocolError, TransportError, TimeoutError) as error:
            log.info("cannot fetch the state yet: %s", error)
            self.intake.give(ev.CatchUpFailed(str(error), effect.attempt))
            return
        log.info("adopted the state of round %d, root %s", number, root.hex()[:16])
        with self.edges.persistence.training_waits():  # as it builds on this state
            self.intake.give(ev.CaughtUp(number, root, effect.attempt))
            await self.edges.persistence.save(self.worker, self.replica.standings)
