"""One rank: a process with a device, which takes its part of each step's sequences.

    python -m p2ptrain.ranks.rank DIRECTORY

All ranks have the same weights and the same state of the inner optimizer. In a step each computes the gradient of its
own sequences; they are added, weighted by the tokens that are learned, so that the sum is the gradient of the mean over
the whole step. Clipping and the inner step are then the same on all. A rank that cannot compute its part says so to the
others before they add: all drop the step together, and are ready for the next round. With `device.shard` each rank has
a part of the weights (sharded.py)."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from p2ptrain.config import DeviceConfig
from p2ptrain.errors import P2ptrainError, TrainingError
from p2ptrain.exact.shortage import told
from p2ptrain.models.adapters import AdaptedModel
from p2ptrain.models.kinds import build
from p2ptrain.models.plugins import allow, blamed_in_run
from p2ptrain.ranks import channel
from p2ptrain.ranks.machines import lent_here
from p2ptrain.ranks.together import NodeStore, Rank, add_up, gone_if_it_fails
from p2ptrain.train.compiling import Compiling
from p2ptrain.train.live import LiveModel

if TYPE_CHECKING:
    from p2ptrain.ranks.sharded import ShardedTrainer


class RankTrainer(Rank):
    """A rank with the whole model and the whole state of the inner optimizer."""

    def __init__(self, job: channel.RankJob, memory: int | None, store: NodeStore) -> None:
        super().__init__(job, store)
        run, settings = self.run, self.settings
        self._of_sums = torch.device("cpu") if self.device.type == "mps" else self.device  # which has no fp64
        base = Path(job.base) if job.base else None
        model = build(run.model, settings.is_checkpointed, run.seed, run.adapt, base).to(self.device)
        if job.address and isinstance(model, AdaptedModel):
            self._send_all(each.data for each in model.base().values())
        self.compiling = Compiling(model, settings, self.device, is_built_in=run.model.kind == "builtin")
        self.live = LiveModel(model, autocast=self.autocast, half_state=settings.is_half, packing=job.packing)
        self.optimizer, self._is_guest = self.inner(self.live), memory is None
        self._memory = channel.RoundMemory(self.live, self.optimizer, memory)

    def begin(self, begun: channel.BeginSteps) -> None:
        super().begin(begun)
        self.live.set_sequences_per_pass(begun.sequences_per_pass)
        for place, own in () if self._is_guest else self._memory.given:
            own.copy_(place)
        if self.job.address:
            self._send_all(own for _, own in self._memory.given)

    def _send_all(self, tensors: Iterable[Tensor]) -> None:
        """Sends those of rank 0 to all others, which some of them, on other machines, do not have."""
        for each in tensors:
            sent = each.to(self.device)
            with gone_if_it_fails():
                dist.broadcast(sent, 0)
            each.copy_(sent)

    def bring_back(self) -> None:
        for place, own in self._memory.made if self.rank == 0 else ():
            place.copy_(own)

    def take(self, order: channel.TakeStep) -> channel.RankAnswer:
        """Takes a step with all others."""
        live, began, failed = self.live, perf_counter(), None
        loss, tokens, learned = torch.zeros((), device=self.device), 0, 0
        live.gradient.zero_()
        try:
            if order.rows:
                loss, tokens, learned = self._gradient(order)
        except P2ptrainError as error:
            failed = channel.RankFailed.by(error, live.sequences_per_pass)
        counts = torch.tensor([tokens, learned, failed is not None], dtype=torch.float64, device=self._of_sums)
        total = torch.cat([loss.to(self._of_sums).to(torch.float64)[None] * learned, counts])
        seconds = perf_counter() - began
        if self.ranks > 1:
            live.gradient.mul_(learned)
            add_up(total)
            add_up(live.gradient)
            live.gradient.div_(total[2].clamp_min(1))
        total[0] /= total[2].clamp_min(1)
        norm_of_all = torch.linalg.vector_norm(live.gradient).to(self._of_sums).to(torch.float64)
        mean, all_tokens, all_learned, failures, norm = torch.cat([total, norm_of_all[None]]).tolist()  # the one wait
        if failures:
            return failed or channel.RankFailed()
        live.clip_gradient(mean, norm, order.step, order.positions, self.run.recipe)
        if self.optimizer is not None:
            self.optimizer.step(self.begun.rate)
        own = tokens, seconds, self.memory_taken(), live.sequences_per_pass
        return channel.StepTaken(mean, int(all_tokens), norm, int(all_learned), *own)

    def _gradient(self, order: channel.TakeStep) -> tuple[Tensor, int, int]:
        """Leaves the gradient of the mean loss of its own sequences; returns that, their tokens, and those learned."""
        live, packing, (own, rows) = self.live, self.live.packing, self.part(order)
        with told("training", self.device), blamed_in_run(self.run, "trained"):
            batch = packing.batch(rows, own, self.begun.round)
            if self.compiling.is_due:
                with self.drawing(live.model, order.step):
                    self.compiling.begin(partial(live.try_pass, batch, self.run.recipe))
            with self.drawing(live.model, order.step):
                loss = live.gradient_of(batch, self.run.recipe)
        return loss, packing.tokens(batch), packing.learned(batch)


def _open(job: channel.RankJob, memory: int | None, store: NodeStore) -> RankTrainer | ShardedTrainer:
    """Makes a rank's trainer, which meets the others."""
    allow(job.plugins)
    if not DeviceConfig.model_validate_json(job.settings).is_sharded:
        return RankTrainer(job, memory, store)
    from p2ptrain.ranks.sharded import ShardedTrainer  # noqa: PLC0415  # half a second

    assert memory is not None, "all ranks are on the node's machine"
    return ShardedTrainer(job, memory, store)


def _listen(connection: socket.socket, orders: SimpleQueue[channel.Order], store: NodeStore) -> None:
    """Passes orders on; ends this process, whatever it waits for, when the node has ended or is done with it."""
    with suppress(OSError, EOFError):
        while True:
            order = channel.hear_order(connection)
            if isinstance(order, channel.StoreValue):
                store.told.put(order)
            else:
                orders.put(order)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Ends this process at once, without waiting for what others have begun."""
    if "RANK" not in os.environ:  # otherwise its agent does
        shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(status)


def main() -> int:
    rank, memory = int(os.environ.get("RANK", "0")), None
    if (lent := lent_here(rank)) is not None:
        connection = lent[1]
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(Path(sys.argv[1], channel.SOCKET_NAME)))
        channel.say(connection, channel.RankStarted(rank, os.getpid()))
        _, (memory, *_), _, _ = socket.recv_fds(connection, 1, 1)  # which travels with a byte
    job = channel.hear_order(connection)
    assert isinstance(job, channel.RankJob), "the node's first message"
    if lent is not None:  # with which code and devices is for this machine's owner to say
        mine, here = lent[0], connection.getsockname()[0]
        job = replace(job, base="", address=here, device=mine.devices[rank], plugins=mine.plugins, threads=mine.threads)
    orders, store = SimpleQueue[channel.Order](), NodeStore(connection)
    Thread(target=_listen, args=(connection, orders, store), daemon=True).start()
    try:
        with told("starting a rank", torch.device(job.device)):
            trainer = _open(job, memory, store)
    except P2ptrainError as error:
        store.say(channel.RankFailed.by(error))
        return 1
    except ConnectionError as error:  # another rank has ended, or they cannot meet at all
        store.say(channel.RankFailed(text=f"the ranks cannot meet: {error}"))
        os._exit(1)
    answer: channel.RankAnswer = channel.RankDone()
    while True:
        store.say(answer)
        order, answer = orders.get(), channel.RankDone()
        match order:
            case channel.BeginSteps():
                trainer.begin(order)
            case channel.TakeStep():
                try:
                    with told("taking a step", trainer.device):
                        answer = trainer.take(order)
                except P2ptrainError as error:  # a TrainingError is raised in all of them
                    answer = channel.RankFailed.by(error, leaves_others=not isinstance(error, TrainingError))
            case channel.BringBack():
                trainer.bring_back()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, EOFError):  # the node or another rank is gone
        _leave(1)
