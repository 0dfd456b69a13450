"""The driver: passes events from the intake to the core, and carries out the core's effects.

The effect queue (core/effect_queue.py) decides in which order effects are carried out and which of them wait for the
disk. Long work (training, applying, fetching) runs in a task, and its result comes back as an event. No decision about
rounds is made here.

The queue of events, and what peers put into it, is in intake.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.effect_queue import EffectQueue
from p2ptrain.core.history import HISTORY_BYTES_MAX, encode_answer
from p2ptrain.core.messages import NUMBER_MAX, author_of
from p2ptrain.core.node import Node
from p2ptrain.core.state import Taken
from p2ptrain.errors import (
    DataError,
    MemoryShortError,
    PassedError,
    PrivacySpentError,
    RemoteProtocolError,
    TrainingError,
)
from p2ptrain.identity import peer_id_of
from p2ptrain.net.blobs.blob import verified
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.mail import Deliver, MessageQuery, TellHistory
from p2ptrain.net.transport import TransportError
from p2ptrain.node.edges import Edges, Outbox
from p2ptrain.node.fetching import ignore
from p2ptrain.node.intake import Intake
from p2ptrain.node.limits import Pauses
from p2ptrain.node.model_progress import ModelProgress
from p2ptrain.node.replica_thread import ReplicaThread
from p2ptrain.node.work import StoppedError, Task, Worker
from p2ptrain.store.store import PayloadLostError

EFFECTS_MAX = 4_096  # waiting for a failing disk; beyond it, no more events are handled
EVENTS_IN_A_ROW = 32  # before other tasks on the loop get their turn
DISK_SECONDS = 5.0  # between attempts to write to a failing disk
HISTORIES_MAX = 16  # being encoded, or waiting for that, a second for all; beyond it only for members
SHUN_SECONDS = 60.0  # before a peer that we disconnected from is dialled again
DATA_SECONDS = 120.0  # to fetch a round's training data
CATCH_UP_SECONDS = 3_600.0  # to fetch a state; a stalled fetch ends sooner

TO_A_PEER = ev.Send, ev.Ask, ev.AskHistory, ev.SendHistory, ev.Disconnect

OnEvent = Callable[[float, ev.Event, Sequence[ev.Effect] | None], None]  # effects is None if the core crashed

log = logging.getLogger("p2ptrain.node")


class Driver:
    """Connects the core to the replica, the worker and the edges."""

    def __init__(
        self, node: Node, replica: ReplicaThread, worker: Worker, intake: Intake, edges: Edges, on_event: OnEvent
    ) -> None:
        """`on_event` is called after the core has handled an event, with the time, the event and its effects."""
        self.node, self.replica, self.worker, self.intake, self.edges = node, replica, worker, intake, edges
        self.counters = intake.counters
        self.pauses = Pauses()
        self.progress = ModelProgress(worker, edges.fetching)
        self._boundary = edges.transport.boundary
        self._outbox = Outbox(edges.gossip, self.counters, self._boundary)
        self.effects: EffectQueue[ev.Effect] = EffectQueue()
        self.disk_trouble = ""  # the error, while the disk cannot be written
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.has_begun = asyncio.Event()  # the core has handled `Started` and can be queried
        self.applied_at: float | None = None  # when the last round was applied, in the loop's time
        self._on_event = on_event
        self._has_effects = asyncio.Event()
        self._catching_up: asyncio.Task[None] | None = None
        self._fetching_ahead: asyncio.Task[None] | None = None  # the data of the next training
        self._fetching: dict[bytes, dict[asyncio.Task[None], Sequence[bytes]]] = {}  # by payload: who is asked by each
        self._told: set[bytes] = set()  # peers for whom a history is being encoded
        self._encoding = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group = asyncio.TaskGroup()
        self._actions: dict[type, Callable[[Any], object]] = {
            ev.Publish: self._publish,
            ev.Send: lambda effect: self.edges.mailboxes.post(effect.peer, Deliver(effect.envelopes)),
            ev.Ask: lambda effect: self.edges.mailboxes.post(effect.peer, MessageQuery(effect.names)),
            ev.AskHistory: lambda effect: self.edges.mailboxes.ask_history(effect.peer, effect.branch, effect.round),
            ev.SendHistory: self._tell_history,
            ev.Fetch: self._fetch,
            ev.Train: lambda effect: self._spawn(self._train(effect), "train"),
            ev.Pace: lambda effect: worker.keep_pace(effect.round, effect.usual, effect.last),
            ev.Apply: lambda effect: self._spawn(self._apply(effect, replica.replica.adopted), "apply"),
            ev.Return: lambda effect: worker.settled(effect.round, None),
            ev.Persist: lambda effect: None,  # the record is on the disk by now
            ev.NoteWrongState: lambda effect: self._spawn(
                self.edges.persistence.note_mismatch(effect.round), "mismatch"
            ),
            ev.CatchUp: self._catch_up,
            ev.Disconnect: self._disconnect,
            ev.Stop: self._stop,
        }

    def give(self, event: ev.Event) -> None:
        self.intake.give(event)

    # -----------------------------------------------------------------------------------------------
    # The loops

    async def run(self, started: ev.Started) -> str:
        """Runs until the node has stopped, and returns why."""
        async with self._group as group:
            self.intake.begin(started, self._spawn)
            tasks = [
                group.create_task(self._handle_for_ever(), name="events"),
                group.create_task(self._carry_out_for_ever(), name="effects"),
                group.create_task(self._outbox.run(), name="outbox"),
            ]
            why = await self.stopped
            self.intake.end()
            self.worker.stop()
            await self._outbox.drain(lambda: self.edges.mailboxes.queued_frames)
            for task in (*tasks, *self._tasks):
                task.cancel()
        return why

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _handle_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        count = 0
        while True:
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
                self._has_effects.set()
            count += 1
            if count % EVENTS_IN_A_ROW == 0:
                await asyncio.sleep(0)

    async def _carry_out_for_ever(self) -> None:
        while True:
            await self._has_effects.wait()
            self._has_effects.clear()
            while records := self.effects.carry_out(self._act):
                await self._write(records)
                self.effects.written()

    def _act(self, effect: ev.Effect) -> None:
        if isinstance(effect, TO_A_PEER):
            with self._boundary.contain("what the core says to a peer", effect.peer):
                self._actions[type(effect)](effect)
        else:
            self._actions[type(effect)](effect)

    async def _write(self, records: Sequence[ev.Record]) -> None:
        """Writes the records with one sync, and retries until the disk accepts them."""
        while True:
            try:
                await self.edges.persistence.on_disk(self.edges.persistence.store.write, records)
            except PayloadLostError as error:
                log.warning("%s; fetching it again", error)
                await self._fetch_lost(error.name)
            except DataError as error:
                if not self.disk_trouble:
                    log.error("%s; the node sends and applies nothing until this can be written", error)
                elif self.node.view().is_stopping and not self.stopped.done():  # it cannot even announce that it leaves
                    self.stopped.set_result(f"the disk cannot be written: {error}")
                self.disk_trouble = str(error)
                await asyncio.sleep(DISK_SECONDS)
            else:
                break
        if self.disk_trouble:
            log.warning("the disk can be written again")
        self.disk_trouble = ""

    def _publish(self, effect: ev.Publish) -> None:
        if not self.edges.tell(effect.envelope):
            self._outbox.put(effect.envelope)

    def _tell_history(self, effect: ev.SendHistory) -> None:
        is_member = self.node.view().is_in(effect.peer)
        if effect.peer not in self._told and (is_member or len(self._told) < HISTORIES_MAX):
            self._told.add(effect.peer)
            told = partial(self._told.discard, effect.peer)
            work = self._boundary.contained(
                "the history for a peer", effect.peer, self._send_history, effect, ended=told
            )
            self._spawn(work, "history")

    async def _send_history(self, effect: ev.SendHistory) -> None:
        """Encodes a history in a thread, one at a time: it may have 64 MiB."""
        async with self._encoding:
            encoded = await asyncio.to_thread(encode_answer, effect.history)
        if encoded is None:
            self.counters["histories too long to send"] += 1
            log.warning(
                "a history has more than %d bytes and is not sent; the peer has to ask another node", HISTORY_BYTES_MAX
            )
            return
        self.edges.mailboxes.post(effect.peer, TellHistory(encoded))

    # -----------------------------------------------------------------------------------------------
    # Payloads

    def _fetch(self, effect: ev.Fetch) -> None:
        if effect.payload_bytes != self.replica.payload_bytes:
            self._fetch_failed(effect, f"no contribution has {effect.payload_bytes} bytes")
            return
        fetches = self._fetching.setdefault(effect.payload, {})
        asked = {source for sources in fetches.values() for source in sources}
        fresh = tuple(source for source in effect.sources if source not in asked)
        task = self._spawn(self._fetch_beside(list(fetches), fresh, effect), "fetch")
        fetches[task] = fresh
        task.add_done_callback(lambda task: self._forget_fetch(effect.payload, task))

    def _fetch_failed(self, effect: ev.Fetch, why: str) -> None:
        for source in effect.sources:
            self.give(ev.FetchFailed(effect.payload, source, why))

    def _forget_fetch(self, payload: bytes, task: asyncio.Task[None]) -> None:
        del self._fetching[payload][task]
        if not self._fetching[payload]:
            del self._fetching[payload]

    async def _fetch_beside(self, others: list[asyncio.Task[None]], fresh: Sequence[bytes], effect: ev.Fetch) -> None:
        """Fetches a payload from those who are not being asked for it: another announcement of it may be a lie, whose
        author holds up what is fetched from it. If there are none, the other fetches may make this one unnecessary."""
        if others and not fresh:
            await asyncio.wait(others)
            others, fresh = [], effect.sources
        payload = await self.edges.persistence.payload(effect.payload)
        if payload is None:
            failed = dict.fromkeys(effect.sources, "")

            def tell(peer: bytes, why: str) -> None:
                failed.pop(peer, None)
                self.give(ev.FetchFailed(effect.payload, peer, why))

            try:
                with self._boundary.guard("the fetch of a payload"):
                    payload = await self.edges.fetching.payload(effect.payload, effect.payload_bytes, fresh, tell)
            except (FetchError, TransportError) as error:
                if others:
                    await asyncio.wait(others)
                for source in failed:
                    self.give(ev.FetchFailed(effect.payload, source, str(error)))
                return
            for other in others:
                other.cancel()
            self.edges.persistence.put(effect.payload, payload)
        why = await self.intake.refusal(author_of(payload), payload)
        if why is not None:
            log.info("contribution rejected: %s", why)
        self.give(ev.PayloadArrived(effect.payload, why is None, author_of(payload), len(payload)))

    # -----------------------------------------------------------------------------------------------
    # The worker and the replica

    async def _train(self, effect: ev.Train) -> None:
        await self.pauses.are_over()
        if self._fetching_ahead is not None:
            self._fetching_ahead.cancel()  # what is needed now comes first
        await self.edges.persistence.is_safe.wait()
        task = Task(effect.round, effect.place, effect.places, frozenset(effect.unsettled))
        try:
            await self.worker.repeat(self._fetch_again)
            async with asyncio.timeout(DATA_SECONDS):
                await self._fetch_data(effect.round, effect.place, effect.places)
            held_out = await self.progress.look(effect)
            self._fetching_ahead = self._spawn(self._fetch_ahead(effect), "data ahead")
            done = await self.worker.train(task)
        except StoppedError:
            return
        except PassedError as error:
            self.give(ev.TrainingFailed(effect.round, str(error)))
            return
        except PrivacySpentError as error:  # from now on this node is one that never finishes its training
            self.pauses.begin(complaint(Code.PRIVACY_SPENT, spent=f"{error.spent:.2f}", budget=f"{error.budget:g}"))
            return
        except (TrainingError, MemoryShortError, DataError, FetchError, TransportError, TimeoutError) as error:
            why = str(error) or "timed out fetching the training data"
            log.warning("no contribution to round %d: %s", effect.round, why)
            # The log of events may be given to others, and a damaged piece's name tells of the data.
            self.give(ev.TrainingFailed(effect.round, why if self._is_data_shared else type(error).__name__))
            return
        self.edges.persistence.put(done.name, done.payload)
        figures, size = self.worker.figures, len(done.payload)
        attachment = done.payload if self.node.view().run.agreement.is_inline(size) else b""
        loss = 0 if self.worker.privacy else min(round(1e6 * (figures.loss or 0.0)), NUMBER_MAX - 1)
        self.give(
            ev.TrainingFinished(effect.round, done.name, size, attachment, figures.steps, loss, held_out, done.base)
        )
        with suppress(StoppedError):
            await self.progress.write(effect)

    async def _fetch_data(self, number: int, place: int, places: int) -> None:
        if self._is_data_shared and self.worker.reads_data:
            positions = await asyncio.to_thread(self.worker.positions, number, place, places)
            await self.edges.fetching.data(positions)

    @property
    def _is_data_shared(self) -> bool:
        """Whether peers have the data that this node trains on; its own is all here."""
        return self.node.view().run.data.source == "shared"

    async def _fetch_ahead(self, effect: ev.Train) -> None:
        """Fetches the data of the next round while this one trains, assuming that the roster stays as it is."""
        view = self.node.view()
        if not (self._is_data_shared and self.worker.reads_data):
            return

        def goes_on() -> bool:
            return not self.pauses and not view.is_stopping

        try:
            async with asyncio.timeout(DATA_SECONDS):
                positions = await asyncio.to_thread(
                    self.worker.positions, effect.round + 1, effect.place, effect.places
                )
                await self.edges.fetching.ahead(positions, goes_on)
        except (DataError, FetchError, TransportError, TimeoutError) as error:  # the next training tells
            log.debug("no data ahead of round %d: %s", effect.round + 1, error)

    async def _fetch_again(self, number: int, place: int, places: int) -> None:
        """Fetches the data of a training that is repeated after a restart; some of it may have had to go since."""
        try:
            async with asyncio.timeout(DATA_SECONDS):
                await self._fetch_data(number, place, places)
        except (DataError, FetchError, TransportError, TimeoutError) as error:  # the worker tells it, too
            log.info("no data to repeat the training of round %d: %s", number, error)

    async def _apply(self, effect: ev.Apply, adopted: int) -> None:
        """Applies a round, unless another state has been adopted since the core asked for it."""
        manifest = effect.manifest
        good, mine = [], {}
        for taken in manifest.taken:
            payload = await self._payload_of(taken, adopted)
            if payload is None:
                return
            good.append(payload)
            if taken.author == self.node.view().me:
                mine[taken.round] = payload
        try:
            await self.worker.repeat(self._fetch_again, is_applying=True)
            root = await self.replica.apply(manifest, good, mine, adopted)
        except StoppedError:
            return
        if root is None:
            return
        self.applied_at = asyncio.get_running_loop().time()
        self.give(ev.Applied(manifest.branch, manifest.round, root))
        await self.edges.persistence.checkpoint(self.worker, self.replica.standings, manifest.round)
        await self.edges.persistence.let_go(manifest)

    async def _fetch_lost(self, name: bytes) -> None:
        """Fetches a payload that was stored here but has been lost. Any connected peer may still have it."""
        size, sources = self.replica.payload_bytes, list(self.edges.connections.linked)
        try:
            with self._boundary.guard("the fetch of a lost payload"):
                payload = await self.edges.fetching.payload(name, size, sources, ignore)
        except (FetchError, TransportError) as error:
            log.warning("%s; trying again", error)
            await asyncio.sleep(DISK_SECONDS)
            return
        self.edges.persistence.put(name, payload)

    async def _payload_of(self, taken: Taken, adopted: int) -> bytes | None:
        """Returns a payload of an agreed round, and fetches it again if the disk has lost it.

        None if another state has been adopted meanwhile, and the payload is no longer needed.
        """
        payload = await self.edges.persistence.payload(taken.payload)
        while payload is None and self.replica.replica.adopted == adopted:
            log.warning("payload %s of an agreed round is lost; fetching it again", taken.payload.hex()[:16])
            await self._fetch_lost(taken.payload)
            payload = await self.edges.persistence.payload(taken.payload)
        return payload

    def _catch_up(self, effect: ev.CatchUp) -> None:
        if self._catching_up is not None:
            self._catching_up.cancel()  # it belonged to a branch that we have left
        self._catching_up = self._spawn(self._fetch_state(effect), "catch up")

    async def _fetch_state(self, effect: ev.CatchUp) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    like = await self.replica.state_of({number for number, _ in effect.roots})
                    with self._boundary.guard("the fetch of a state"):
                        size = self.replica.replica.state_bytes
                        fetched = self.edges.fetching.state(effect.roots, effect.sources, size, like)
                        number, root, state = await stack.enter_async_context(fetched)
                was_wrong = self.node.view().is_quarantined
                await self.replica.adopt(number, root, verified(state), was_wrong=was_wrong)
        except (FetchError, DataError, RemoteProtocolError, TransportError, TimeoutError) as error:
            log.info("cannot fetch the state yet: %s", error)
            self.give(ev.CatchUpFailed(str(error), effect.attempt))
            return
        log.info("adopted the state of round %d, root %s", number, root.hex()[:16])
        with self.edges.persistence.training_waits():  # as it builds on this state
            self.give(ev.CaughtUp(number, root, effect.attempt))
            await self.edges.persistence.save(self.worker, self.replica.standings)

    # -----------------------------------------------------------------------------------------------
    # The rest

    def _disconnect(self, effect: ev.Disconnect) -> None:
        log.info("disconnecting from %s: %s", peer_id_of(effect.peer), effect.why)
        self.edges.connections.shun(effect.peer, asyncio.get_running_loop().time() + SHUN_SECONDS)
        work = self._boundary.contained("parting from a peer", effect.peer, self._let_go, effect.peer)
        self._spawn(work, "disconnect")

    async def _let_go(self, peer: bytes) -> None:
        try:
            await self.edges.transport.disconnect(peer)
        except TransportError as error:
            log.debug("cannot disconnect: %s", error)

    def _stop(self, effect: ev.Stop) -> None:
        if not self.stopped.done():
            self.stopped.set_result(effect.why)
