"""The device of a region's node (train/region.py): it trains from what the world has agreed on, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.core.messages import author_of
from p2ptrain.errors import PassedError
from p2ptrain.exact.outer import TAIL_BYTES, Tail
from p2ptrain.node.device import Applying, Device
from p2ptrain.store.diary import Trained
from p2ptrain.train.region import Region, World
from p2ptrain.train.trainer import Trainer

AWAY_SECONDS = 60.0  # without the world's run, until the node says so


class RegionDevice(Device):
    """The device of a node whose run is a region; `contribute` passes a movement on to the world's run."""

    def __init__(
        self,
        trainer: Trainer,
        me: bytes,
        thread: ThreadPoolExecutor,
        threads: int,
        region: Region,
        contribute: Callable[[Tensor], None],
    ) -> None:
        super().__init__(trainer, me, thread, threads)
        self.region, self._contribute = region, contribute
        self.contributions = 0  # to the world, by this node
        self.addresses: tuple[str, ...] = ()  # at which this node takes part in the world's run
        self.is_lost = True  # the world's run
        self._lost = monotonic(), "not joined yet"
        self._is_known = asyncio.Event()  # the world; a region that begins would train in vain before

    # -----------------------------------------------------------------------------------------------
    # The world, as the event loop hears of it

    def hear(self, world: World) -> None:
        """Takes notice of the world's agreed weights."""
        self.region.hear(world)
        self.follow()
        self._is_known.set()

    def follow(self) -> None:
        """Notes that the world's run can be followed."""
        self.region.follow()
        self.is_lost = False

    def lose(self, why: str) -> None:
        """Notes that the world's run cannot be followed at the moment."""
        self.region.lose()
        self._lost = self._lost[0] if self.is_lost else monotonic(), why
        self.is_lost = True

    def meet(self, addresses: tuple[str, ...]) -> None:
        """Notes at which addresses this node takes part in the world's run."""
        self.addresses = addresses

    def contributed(self) -> None:
        """Notes that this node has contributed to the world."""
        self.contributions += 1

    @property
    def complaints(self) -> list[Complaint]:
        """The world's absence, once it has lasted."""
        since, why = self._lost
        is_told = self.is_lost and monotonic() - since >= AWAY_SECONDS
        return [complaint(Code.WORLD_AWAY, why=why)] if is_told else []

    # -----------------------------------------------------------------------------------------------
    # The region's rounds

    async def train(
        self, number: int, place: int, places: int, outstanding: frozenset[int]
    ) -> tuple[bytes, bytes, Trained | None]:
        if not self.trainer.round:
            await self._is_known.wait()
            if self.trainer.round + 1 != number:  # rounds have passed that let others in
                raise PassedError("the world was not known yet")
        return await super().train(number, place, places, outstanding)

    def _train_now(
        self, number: int, place: int, places: int, outstanding: frozenset[int], before: Trained | None = None
    ) -> bytes:
        tail = bytes.fromhex(before.tail) if before else b""
        self._shift = None if before else self.region.begin(number, self.trainer.recipe.agreed)
        payload = super()._train_now(number, place, places, outstanding, before)
        if before is None:
            self.region.offer(number)
        return payload[:-TAIL_BYTES] + (tail or self.region.tail.encoded())

    def _noted(self, *training: Any) -> Trained | None:
        """Has no entry for a training with a shift: it could not be repeated without the world's weights."""
        noted = super()._noted(*training)
        if noted is None or self._shift is not None:
            return None
        return replace(noted, tail=self.region.tail.encoded().hex())

    def _apply(self, applying: Applying) -> bytes | None:
        root = super()._apply(applying)
        if root is not None:
            tails = {author_of(payload): Tail.of(payload) for payload in applying.payloads}
            moved = self.region.applied(applying.number, tails, self.trainer.recipe.agreed)
            if moved is not None:
                self._contribute(moved)
        return root

    def _adopt(self, number: int, pieces: Iterable[bytes], was_wrong: bool = False) -> None:
        super()._adopt(number, pieces, was_wrong)
        self.region.forget()
