"""Ranks among themselves: how they meet, sums over all of them, the end of one for all, and the part of each."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from queue import SimpleQueue
from threading import Lock
from time import sleep

import numpy as np
import numpy.typing as npt
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.data.assignment import Positions
from p2ptrain.models.built_in import Model
from p2ptrain.ranks.channel import BeginSteps, RankAnswer, RankJob, StoreValue, TakeStep, say
from p2ptrain.share import Share
from p2ptrain.train.devices import find_device
from p2ptrain.train.inner import INNER_OPTIMIZERS, AdamW, Muon
from p2ptrain.train.live import LiveModel, drawing

NAP_SECONDS = 0.01  # between looks whether another has set a value
STEP_TIME_MAX = timedelta(days=1)  # the node knows how long a step takes, and ends a group that hangs
LOOPBACK = ("lo", "lo0")  # the interface that no other machine reaches, by the system's name


class NodeStore(dist.Store):  # type: ignore[name-defined, misc]  # torch does not declare it
    """By which ranks meet: values that the node keeps, over the connections that ranks have to it. torch's own TCPStore
    would listen for everybody, without a password."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self.told = SimpleQueue[StoreValue]()
        self._connection, self._lock = connection, Lock()  # torch has threads, too

    def say(self, message: RankAnswer) -> None:
        with self._lock:
            say(self._connection, message)

    def _ask(self, key: str, value: bytes | None = None) -> bytes | None:
        with self._lock:
            say(self._connection, StoreValue(key, value))
            return self.told.get().value

    def set(self, key: str, value: bytes) -> None:
        self._ask(key, bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for it; the node knows how long."""
        while (value := self._ask(key)) is None:
            sleep(NAP_SECONDS)
        return value

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        for each in keys:
            self.get(each)


class Rank:
    """A rank that has met all others, and its part of each step."""

    def __init__(self, job: RankJob, store: dist.Store) -> None:  # type: ignore[name-defined]
        self.job, self.rank, self.ranks = job, job.rank, job.ranks
        self.run = RunConfig.from_canonical(job.run)
        self.settings = DeviceConfig.model_validate_json(job.settings).model_copy(update={"name": job.device})
        self.device, self.autocast = find_device(self.settings)
        self.begun = BeginSteps(0, 0, 0.0, 1, 0)
        if job.ranks > 1 or self.settings.is_sharded:
            _meet(job, store, self.device)

    def begin(self, begun: BeginSteps) -> None:
        self.begun = begun
        torch.set_num_threads(self.job.threads or begun.threads)

    def inner(self, live: LiveModel) -> AdamW | Muon | None:
        """Makes the inner optimizer, in a recipe that has one."""
        recipe = self.run.recipe
        return INNER_OPTIMIZERS[recipe.inner](recipe, live) if recipe.spec.kind == "local" else None

    def part(self, order: TakeStep) -> tuple[Positions, npt.NDArray[np.int64]]:
        """Returns its sequences of a step: their positions and their tokens."""
        positions = np.array_split(np.array(order.positions, np.int64), self.ranks)[self.rank]
        rows = np.frombuffer(order.rows, np.int32).astype(np.int64)
        return positions, rows.reshape(len(positions), self.run.model.sequence_length + 1)

    def drawing(self, model: Model, step: int) -> AbstractContextManager[None]:
        share = Share(self.begun.round, self.begun.place, 0)
        return drawing(self.run, self.device, share, step, self.rank, is_drawn=model.draws)

    def memory_taken(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        beside = torch.mps.driver_allocated_memory() if self.device.type == "mps" else 0
        return int(psutil.Process().memory_info().rss) + beside


def _meet(job: RankJob, store: dist.Store, device: torch.device) -> None:  # type: ignore[name-defined]
    """Meets the other ranks, on the interface with an address alone, or without one on that of this machine alone."""
    there = psutil.net_if_addrs()
    found = {each.address: name for name, has in there.items() for each in has}.get(job.address)
    interface = found or next(name for name in there if name in LOOPBACK)
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with gone_if_it_fails():
        dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.ranks, timeout=STEP_TIME_MAX)
    add_up(torch.ones(1, device=device))


@contextmanager
def gone_if_it_fails() -> Iterator[None]:
    """Raises ConnectionError if another rank has ended."""
    try:
        yield
    except RuntimeError as error:  # which of torch's errors depends on the library below
        raise ConnectionError(str(error)) from error


def add_up(tensor: Tensor) -> None:
    """Replaces a tensor by the sum of all ranks'; one that is alone needs no group."""
    if dist.is_initialized():
        with gone_if_it_fails():
            dist.all_reduce(tensor)
