"""The replica of a node, in a thread of its own: what the swarm agrees on is applied at once, whatever the worker does.

Payloads are checked in another thread: strict decoding only uses numpy, and a vote waits for it.

If a state came out wrong, the digests of its pieces are kept until its round has been applied again from a correct
state: then the log can name the wrong pieces, even if no peer has kept the state of that round.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import KEY_BYTES, content_of, contents_by_author
from p2ptrain.node.fetching import PIECES_TOLD
from p2ptrain.node.work import Base, Worker

STANDINGS_KEPT = 64  # more than are applied while a worker makes a copy

log = logging.getLogger("p2ptrain.node")
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
        self._wrong: tuple[int, list[bytes]] | None = None  # the round of a wrong state, and its leaves
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

        Returns the new root, or None if another state has been adopted since `adopted` was read.
        """
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
        if self._wrong is not None and number == self._wrong[0]:
            self._tell_what_differed(*self._wrong)
            self._wrong = None
        return root

    def _note(self, standing: Standing) -> None:
        self.standings.pop(standing.round, None)
        self.standings[standing.round] = standing
        while len(self.standings) > STANDINGS_KEPT:
            del self.standings[next(iter(self.standings))]

    def _tell_what_differed(self, number: int, before: list[bytes]) -> None:
        pairs = enumerate(zip(before, self.replica.leaves(), strict=True))
        differing = [index for index, (was, now) in pairs if was != now]
        if not differing:
            log.error("the state of round %d, wrong before, came out the same again", number)
            return
        pieces = ", ".join(map(str, differing[:PIECES_TOLD]))
        what = "the state of round %d, wrong before, came out differently: %d pieces (1 MiB each) differ: %s"
        log.error(what, number, len(differing), pieces)

    async def state_of(self, rounds: Collection[int]) -> tuple[int, bytes] | None:
        """Returns the current round and state, if it is one of `rounds`; a newcomer has none."""

        def look() -> tuple[int, bytes] | None:
            number = self.replica.round
            return (number, self.replica.as_bytes()) if number and number in rounds else None

        return await self.run(look)

    async def adopt(
        self, number: int, root: bytes, pieces: Iterable[bytes | memoryview], *, was_wrong: bool = False
    ) -> None:
        """Adopts a state that has this root; `was_wrong` if it replaces one that differed from what was agreed."""
        await self.run(self._adopt, Standing(number, b"", b"", root), pieces, was_wrong)

    def _adopt(self, standing: Standing, pieces: Iterable[bytes | memoryview], was_wrong: bool) -> None:
        replica, wrong = self.replica, self._wrong
        if was_wrong and standing.round < replica.round:  # for the same round, the fetch has logged the difference
            wrong = replica.round, replica.leaves()
        elif wrong is not None and standing.round >= wrong[0]:  # that round will not be applied again
            wrong = None
        with replica.lock:
            replica.adopt(standing.round, pieces)
            self.standings.clear()
            self._note(standing)
            self._worker.moved(Base(standing.round, replica.weights, None))
        self._wrong = wrong

    def begin(self, standing: Standing) -> None:
        """Notes what the replica is when the node starts."""
        self._note(standing)
