"""A device whose local steps a script's loop takes, or a region, in a process of its own.

The node keeps a replica of the agreed state on the CPU: it checks, applies and votes whatever the script does. When the
core asks for a training, the script's next request is answered with its round, and the weights are put into the memory
that both share; when its steps are over, the node makes the contribution. A script that is elsewhere for ten minutes
comes too late with it: it then returns to the residual, as any late contribution does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter

from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.core.messages import authored, payload_digest
from p2ptrain.data.assignment import Positions
from p2ptrain.errors import ConfigError, DataError, NodeEndedError, P2ptrainError, PassedError
from p2ptrain.loop.channel import Memory, RoundTrained
from p2ptrain.node.device import Device, StoppedError
from p2ptrain.store.diary import Trained
from p2ptrain.train.trainer import Trainer

AWAY_SECONDS = 60.0  # without a step, until the node says so; the first step of a compiled model takes as long


@dataclass(slots=True)
class Work:
    """A training that the core has asked for."""

    number: int
    outstanding: frozenset[int]
    positions: Positions
    base: tuple[int, int]  # the trainer's round, and the states adopted
    done: asyncio.Future[RoundTrained]
    is_laid: bool = False  # the script has its weights
    began: float = field(default_factory=perf_counter)


class LoopDevice(Device):
    """A trainer whose steps come from a script."""

    def __init__(
        self,
        trainer: Trainer,
        me: bytes,
        thread: ThreadPoolExecutor,
        threads: int,
        memory: Memory,
        reads_data: bool = True,
    ) -> None:
        super().__init__(trainer, me, thread, threads)
        self.reads_data = reads_data
        if trainer.run.recipe.fragments > 1:  # its model would differ from what was agreed on, in what it saves, too
            what = "a script's model would not be the agreed one while its own movement waits for its round"
            raise ConfigError(
                what, key="recipe.fragments", fix="Join with `p2ptrain join`, or use 1 in a run for scripts"
            )
        self.memory = memory
        self._work: Work | None = None
        self._has_work = asyncio.Event()
        self._has_moved = asyncio.Event()  # what is agreed on

    async def train(
        self, number: int, place: int, places: int, outstanding: frozenset[int]
    ) -> tuple[bytes, bytes, Trained | None]:
        """Has the script take a round's steps. They cannot be repeated after a restart, so no diary has them."""
        positions = self.trainer.positions_for(number, place, places)
        base = self.trainer.round, self.adopted
        work = Work(number, outstanding, positions, base, asyncio.get_running_loop().create_future())
        self._work = work
        self._has_work.set()
        trained = await work.done
        return (*await self.run(self._contribute, work, trained), None)

    async def next(self, seen: int = -1) -> Work:
        """Waits for the next round to train, and puts its weights into the memory, if they are of another one than
        `seen`; until then, rounds pass without this node's contribution."""
        while True:
            await self._has_work.wait()
            work = self._work
            if work is None:
                continue
            if work.base[0] == seen:
                self._has_moved.clear()
                if (self.trainer.round, self.adopted) == work.base:
                    await self._has_moved.wait()
                if self._work is work and (self.trainer.round, self.adopted) != work.base:
                    self.drop(PassedError("its turn has not come"))
            elif work.is_laid or await self.run(self._lay, work):
                return work
            else:
                self.drop(DataError("the training loop was elsewhere"))

    async def apply(
        self, number: int, payloads: Sequence[bytes], mine: Mapping[int, bytes], manifest: bytes, adopted: int
    ) -> bytes | None:
        root = await super().apply(number, payloads, mine, manifest, adopted)
        self._has_moved.set()
        return root

    async def adopt(self, number: int, pieces: Iterable[bytes], was_wrong: bool = False) -> None:
        await super().adopt(number, pieces, was_wrong)
        self._has_moved.set()

    def _lay(self, work: Work) -> bool:
        """Puts the weights into the memory; returns whether they are still those that the core meant."""
        if (self.trainer.round, self.adopted) != work.base:
            return False
        self.memory.base.copy_(self.trainer.recipe.agreed)
        work.is_laid = True
        return True

    def current(self) -> Work:
        """Returns the round that the script trains. ConfigError if there is none."""
        if self.is_stopping:
            raise NodeEndedError("the node is ending; its log says why")
        if self._work is None or not self._work.is_laid:
            raise ConfigError("no round is being trained", fix="Call step() first")
        return self._work

    def take(self, trained: RoundTrained) -> None:
        """Takes the steps of the script, and lets the training go on."""
        self.current()
        done = self._end()
        if not done.done():
            done.set_result(trained)

    def begin_again(self) -> None:
        """Has the script take the current round's steps from the start: what it had of them is lost."""
        self.current().is_laid = False

    def drop(self, error: P2ptrainError) -> None:
        """Ends the current training, if there is one, without a contribution."""
        if self._work is not None and not (done := self._end()).done():
            done.set_exception(error)

    def _end(self) -> asyncio.Future[RoundTrained]:
        """Forgets the current training; returns its future."""
        assert self._work is not None
        done, self._work = self._work.done, None
        self._has_work.clear()
        return done

    def _contribute(self, work: Work, trained: RoundTrained) -> tuple[bytes, bytes]:
        self._give_back_all_but(work.outstanding)
        self.trainer.take_steps(work.number, self.memory.moved)
        payload = authored(self.me, self.trainer.contribute(work.number))
        self.loss, self.steps, self.own_drift = trained.loss, trained.steps, self.trainer.own_drift
        self.step = trained.steps
        if trained.tokens:
            self._rates.append(trained.tokens / max(trained.seconds, 1e-9))
        self.training_seconds += trained.seconds
        self.last_training_seconds = trained.seconds
        self.tokens += trained.tokens
        return payload_digest(payload), payload

    @property
    def tokens_per_second(self) -> float | None:
        """None while the script trains on what a loader of its own reads, which nobody counts."""
        return super().tokens_per_second if self._rates or not self.training_seconds else None

    def keep_pace(self, number: int, usual: float, last: float) -> None:
        self.memory.keep_pace(number, usual, last)

    def stop_training(self) -> None:
        super().stop_training()
        self.drop(StoppedError("the node ends"))

    @property
    def complaints(self) -> list[Complaint]:
        """The loop's absence, once it has lasted."""
        if self._work is None:
            return []
        away = perf_counter() - max(self._work.began, self.memory.stepped_at)
        return [complaint(Code.LOOP_AWAY, minutes=int(away // 60))] if away >= AWAY_SECONDS else []
