"""A script's training loop, as its node sees it: it takes the steps, asks for data, and is told why it waits."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from p2ptrain.config import RunConfig
from p2ptrain.core.complaints import Code
from p2ptrain.daemon.life import Daemon
from p2ptrain.errors import ConfigError, DataError, P2ptrainError, StoppedError
from p2ptrain.loop import channel
from p2ptrain.loop.worker import ScriptWorker
from p2ptrain.models.kinds import named_shapes
from p2ptrain.node.local_worker import LearnerThread, Note
from p2ptrain.node.trainings import DATA_SECONDS
from p2ptrain.observe.build import complaints_of
from p2ptrain.train.learner import EVALUATED_SEQUENCES
from p2ptrain.train.own_data import PREPARE_FIX

FROZEN_FIX = (
    "Load the same ones, in the same types, or freeze the same; what each machine computes for itself is to be a buffer"
)
NOTE_SECONDS = 20.0  # between notes to a script that waits

log = logging.getLogger("p2ptrain.daemon")
_DECODER = msgspec.msgpack.Decoder(channel.ScriptRequest)


class ScriptLoop:
    """The channel to a script, and the worker that stands for its loop."""

    def __init__(self, connection: socket.socket, memory: channel.Memory, begin: channel.Begin, place: Path) -> None:
        self._connection, self._memory, self._begin, self._place = connection, memory, begin, place
        self._worker: ScriptWorker | None = None
        self._daemon: Daemon | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self, run: RunConfig) -> None:
        """Refuses a run that trains another model than the script's, or not by local steps."""
        if run.recipe.spec.kind != "local":
            what = f"recipe {run.recipe.name} takes one gradient a round, which a loop of one's own does not have"
            raise ConfigError(what, key="recipe.name", fix="A script can take part in runs of recipe local")
        if run.recipe.plugin:
            what = f"the run's steps are those of the plug-in {run.recipe.plugin}, and not a script's"
            raise ConfigError(what, key="recipe.plugin", fix="Take part with `p2ptrain join`")
        if run.world.run:
            what = "the run is a region, whose nodes start from what the world's run has agreed on, and a script cannot"
            raise ConfigError(what, key="world.run", fix="Take part with `p2ptrain join`")
        if run.adapt.is_on:
            what = "the run trains adapters beside a model of its own"
            raise ConfigError(what, key="adapt.kind", fix="Take part with `p2ptrain join`")
        own = run.model.named if run.model.kind == "own" else named_shapes(run.model)  # nothing is made of a stranger's
        ours, theirs = dict(self._begin.parameters), dict(own)
        for name, shape in theirs.items():
            if name not in ours:
                fix = "Make the model that the run was begun with; parameters that do not train are left out"
                raise ConfigError(f"the script's model has no {name} {list(shape)}", key="model", fix=fix)
            if ours[name] != shape:
                what = f"{name} is {list(ours[name])} in the script's model, and {list(shape)} in the run"
                raise ConfigError(what, key="model", fix="Make the model that the run was begun with")
        if more := sorted(ours.keys() - theirs.keys()):
            what = f"the run does not train {more[0]}, which trains in the script's model"
            raise ConfigError(what, key="model", fix="Make the model that the run was begun with, or freeze it")
        if run.model.kind == "own" and run.model.frozen != self._begin.frozen:
            here, there = (each[:16] or "none" for each in (self._begin.frozen, run.model.frozen))
            what = f"the parameters that do not train are others than in the run (digest {here} instead of {there})"
            raise ConfigError(what, key="model", fix=FROZEN_FIX)

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[None]:
        """Listens to the script inside the block, and ends this node with it. A script that waits hears of warnings."""
        life = asyncio.current_task()
        assert life is not None
        reader, self._writer = await asyncio.open_connection(sock=self._connection.dup())  # ours stays, to say why
        async with asyncio.TaskGroup() as group:
            self._tasks.add(group.create_task(self._listen(reader, group, life), name="the script"))
            with _passed_on(lambda text: self._send(0, channel.NodeNote(text)) if self._daemon is None else None):
                yield
            for task in self._tasks:
                task.cancel()

    def worker(self, thread: LearnerThread, me: bytes, note: Note) -> ScriptWorker:
        self._worker = ScriptWorker(thread, me, self._memory, reads_data=self._begin.reads_data)
        return self._worker

    def joined(self, daemon: Daemon) -> None:
        """Tells the script that its node takes part."""
        run = self._run = daemon.run
        self._daemon = daemon
        addresses = tuple(daemon.edges.transport.addresses())
        directory = str(self._place)
        names = tuple(name for name, _ in named_shapes(run.model))
        recipe = run.recipe
        steps_min = recipe.local_steps_min or recipe.local_steps
        self._send(0, channel.NodeReady(run.run_id, directory, addresses, names, recipe.local_steps, steps_min))

    def _send(self, number: int, answer: channel.Answer) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(channel.framed(channel.NodeAnswer(number, answer)))

    async def _listen(self, reader: asyncio.StreamReader, group: asyncio.TaskGroup, life: asyncio.Task[Any]) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                asked = _DECODER.decode(await channel.read_frame(reader))
                task = group.create_task(self._answer(asked), name="a request of the script")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if self._daemon is not None:
            self._daemon.stop()
        else:
            life.cancel()

    async def _answer(self, asked: channel.ScriptRequest) -> None:
        try:
            answer = await self._do(asked.number, asked.body)
        except P2ptrainError as error:
            answer = channel.NodeFailed(type(error).__name__, str(error))
        self._send(asked.number, answer)

    async def _do(self, number: int, request: channel.Request) -> channel.Answer:
        worker, daemon = self._worker, self._daemon
        assert worker is not None and daemon is not None, "the script waits until the node takes part"
        match request:
            case channel.NextRound(seen=seen):
                return await self._next(number, seen, worker, daemon)
            case channel.RoundTrained():
                worker.take(request)
            case channel.RoundDropped(why=why):
                log.warning("the script takes the steps of round %d again: %s", worker.current().task.round, why)
                worker.begin_again()
            case channel.TakeSequences(step=step):
                if daemon.run.data.source == "own" and worker.learner.own is None:
                    fix = f"{PREPARE_FIX}, or read batches from a loader of the script"
                    raise ConfigError("the run's nodes bring their own data, and this script has none", fix=fix)
                each = self._sequences
                chosen = worker.current().positions[step * each : (step + 1) * each]
                if not len(chosen):
                    raise ConfigError("the round has no such step", fix="Call step() after each batch")
                return await self._read(chosen, daemon)
            case channel.TakeHeldOut(count=count):
                data, length = worker.learner.dataset, daemon.run.model.sequence_length
                count = min(count or EVALUATED_SEQUENCES, data.held_out_sequences(length))
                if count < 1:
                    raise DataError("the run's data has no held-out sequence")
                try:
                    async with asyncio.timeout(DATA_SECONDS):
                        await daemon.driver.edges.fetching.held_out(count)
                    return await self._read(range(count), daemon, is_held_out=True)
                except TimeoutError:
                    raise DataError("no connected peer has sent the held-out sequences in time") from None
                finally:
                    data.need_held_out(0, length)  # they may go again
        return channel.CarriedOut()

    @property
    def _sequences(self) -> int:
        return self._run.recipe.step_sequences

    async def _read(self, positions: Any, daemon: Daemon, is_held_out: bool = False) -> channel.Sequences:
        import numpy as np  # noqa: PLC0415

        assert self._worker is not None
        learner, length = self._worker.learner, daemon.run.model.sequence_length
        data = learner.dataset if is_held_out else learner.trained_on
        run = daemon.run
        if data.is_masked or run.data.documents == "apart" or run.model.objective == "masked":
            what = "the run masks tokens or keeps documents apart, and a plain batch can carry neither"
            raise DataError(f"{what}. Load and mask the data in the script instead of calling batches() or evaluate()")
        read = data.held_out_batch if is_held_out else data.batch
        batch = await asyncio.to_thread(read, np.asarray(positions), length)
        return channel.Sequences(len(batch), batch.astype(np.int32).tobytes())

    async def _next(self, number: int, seen: int, worker: ScriptWorker, daemon: Daemon) -> channel.RoundToTrain:
        waiting = asyncio.ensure_future(worker.next(seen))
        try:
            while True:
                done, _ = await asyncio.wait([waiting], timeout=NOTE_SECONDS)
                if done:
                    work = waiting.result()
                    return channel.RoundToTrain(work.task.round, work.base[0], self._sequences)
                if worker.is_stopping:
                    raise StoppedError("the node has ended")
                complaints = [each.text for each in complaints_of(daemon) if each.code is not Code.CRASH_ONLY]
                why = "; ".join(complaints) or "the others are not done"
                text = f"waiting for round {daemon.driver.node.view().state.round + 1}: {why}"
                self._send(number, channel.NodeNote(text, is_trouble=bool(complaints)))
        finally:
            waiting.cancel()


class _Warnings(logging.Handler):
    """Passes warnings on to a function, in the event loop's thread."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell, self._loop = tell, asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._tell, record.getMessage())


@contextmanager
def _passed_on(tell: Callable[[str], None]) -> Iterator[None]:
    handler, logger = _Warnings(tell), logging.getLogger("p2ptrain")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
