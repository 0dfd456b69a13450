"""The replica of a node, in a thread of its own: what the swarm agrees on is applied at once, whatever the worker does.

Payloads are checked in another thread: strict decoding only uses numpy, and a vote waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import KEY_BYTES, content_of, contents_by_author
from p2ptrain.node.work import Base, Worker

STANDINGS_KEPT = 64  # more than are applied while a worker makes a copy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Standing:
    """The replica's place in the history after a round."""

    round: int
    branch: bytes  # empty, like `head`: the state was adopted
    head: bytes
    root: bytes


class ReplicaThread:
    """Changes a node's replica, and tells its worker."""

    def __init__(self, worker: Worker, threads: int = 0) -> None:
        """threads: of torch, which counts them for each thread; 0: as it likes"""
        self.replica, self._worker = worker.replica, worker
        self.standings: dict[int, Standing] = {}  # of the last rounds
        begin = partial(torch.set_num_threads, threads) if threads else None
        self._thread = ThreadPoolExecutor(1, "replica", initializer=begin)
        self._check_thread = ThreadPoolExecutor(1, "check")

    def close(self) -> None:
        """Cancels the waiting jobs. A running job ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._check_thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        """Runs a job in the replica's thread, after the jobs before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, *arguments)

    @property
    def payload_sizes(self) -> set[int]:
        """The sizes that contributions of the run have; a dishonest peer may claim gigabytes."""
        return {KEY_BYTES + size for size in self.replica.outer.sizes.values()}

    @property
    def attachment_sizes(self) -> set[int]:
        """The sizes of those that come with their announcements."""
        return {size for size in self.payload_sizes if self.replica.run.agreement.is_inline(size)}

    async def check(self, payload: bytes) -> str | None:
        """Returns why a payload is invalid, or None."""
        return await asyncio.get_running_loop().run_in_executor(
            self._check_thread, self.replica.check, content_of(payload)
        )

    async def apply(
        self, manifest: Manifest, payloads: Sequence[bytes], mine: Mapping[int, bytes], adopted: int
    ) -> bytes | None:
        """Applies a round; `mine` are this node's own payloads among these, by the rounds that they were made for.
        Returns the new root, or None if another state has been adopted since `adopted` was read."""
        return await self.run(self._apply, manifest, payloads, mine, adopted)

    def _apply(
        self, manifest: Manifest, payloads: Sequence[bytes], mine: Mapping[int, bytes], adopted: int
    ) -> bytes | None:
        replica, number = self.replica, manifest.round
        with replica.lock:
            if (replica.round, replica.adopted) != (number - 1, adopted):
                return None
            counted = replica.apply(number, contents_by_author(payloads))
            for taken, payload in mine.items():
                self._worker.settled(taken, counted.uncounted(content_of(payload)))
            root = replica.root(manifest.digest)
            self._note(Standing(number, manifest.branch, manifest.digest, root))
            self._worker.moved(Base(number, replica.weights, payloads))
        return root

    def _note(self, standing: Standing) -> None:
        self.standings.pop(standing.round, None)
        self.standings[standing.round] = standing
        while len(self.standings) > STANDINGS_KEPT:
            del self.standings[next(iter(self.standings))]

    async def adopt(self, number: int, root: bytes, pieces: Iterable[bytes | memoryview]) -> None:
        """Adopts a state that has this root."""
        await self.run(self._adopt, Standing(number, b"", b"", root), pieces)

    def _adopt(self, standing: Standing, pieces: Iterable[bytes | memoryview]) -> None:
        replica = self.replica
        with replica.lock:
            replica.adopt(standing.round, pieces)
            self.standings.clear()
            self._note(standing)
            self._worker.moved(Base(standing.round, replica.weights, None))

    def begin(self, standing: Standing) -> None:
        """Notes what the replica is when the node starts."""
        self._note(standing)
