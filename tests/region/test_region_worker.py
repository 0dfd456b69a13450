"""The worker of a region's node: it starts from what the world has agreed on, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from p2ptrain.config import WorldConfig
from p2ptrain.core.complaints import Code
from p2ptrain.core.messages import author_of, content_of
from p2ptrain.errors import PassedError
from p2ptrain.exact.outer import TAIL_BYTES, Tail
from p2ptrain.node.local_worker import LearnerThread
from p2ptrain.node.replica_thread import ReplicaThread
from p2ptrain.node.work import Task
from p2ptrain.region import world as module
from p2ptrain.region.shift import Region, World
from p2ptrain.region.world import RegionWorker
from p2ptrain.share import Share
from p2ptrain.store.diary import Diary, Trained
from tests.helpers.trainer import ONE_THREAD, Trainer, embedded, make

ME = bytes([1]) * 32


class RegionNode:
    """A region's worker and replica."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.told: list[Tensor] = []  # movements, to be contributed to the world
        self.noted: list[Trained] = []
        self.thread = LearnerThread(trainer)
        self.worker = RegionWorker(self.thread, ME, self.note, Region(ME, 2, 1.0), "ab" * 32, self.told.append)
        self.replica = ReplicaThread(self.worker)

    async def note(self, entry: Trained) -> None:
        self.noted.append(entry)

    def hear(self, number: int = 0, weights: Tensor | None = None) -> None:
        self.worker.hear(World(number, self.trainer.replica.weights.clone() if weights is None else weights))

    async def train(self, number: int) -> bytes:
        return (await self.worker.train(Task(Share(number, 0, 1)))).payload

    async def apply(self, number: int, payload: bytes) -> None:
        manifest: Any = SimpleNamespace(round=number, branch=bytes(32), digest=bytes(32))
        root = await self.replica.apply(manifest, [payload], {number: payload}, self.replica.replica.adopted)
        assert root == self.trainer.root(bytes(32))

    def close(self) -> None:
        self.worker.close()
        self.replica.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RegionNode]:
    run = make(data := embedded(tmp_path / "data"), "sixteen bits", residual_share=0).run
    region_run = run.model_copy(update={"world": WorldConfig(run="ab" * 32, rounds=2)})
    made = RegionNode(Trainer(region_run, ONE_THREAD, data))
    yield made
    made.close()


async def test_what_the_world_has_agreed_on_becomes_part_of_the_next_contribution(node: RegionNode) -> None:
    trainer, region = node.trainer, node.worker.region
    first = trainer.replica.weights.clone()
    node.hear(0, first)
    payload = await node.train(1)
    assert node.noted == [], "it could not be repeated without the world's weights"
    assert Tail.of(payload) == Tail(0, is_shifted=True)
    assert trainer.check(content_of(payload)) is None
    assert trainer.check(content_of(payload)[:-1] + b"\x08") == "a tail of 010000000000000008"
    await node.apply(1, payload)
    assert node.told == [], "one of two rounds"
    payload = await node.train(2)
    [noted] = node.noted
    assert (noted.number, noted.tail) == (2, payload[-TAIL_BYTES:].hex())
    assert Tail.of(payload) == Tail(0, is_aware=True)
    await node.apply(2, payload)
    (moved,) = node.told
    assert torch.equal(moved, first - trainer.replica.weights)
    there = first + 0.1  # further than the steps of one round could move it
    node.hear(1, there)
    payload = await node.train(3)
    assert len(node.noted) == 1
    assert Tail.of(payload) == Tail(1, is_shifted=True, is_aware=True, has_told=True)
    await node.apply(3, payload)
    ahead = (trainer.replica.weights - there).square().mean().sqrt()
    assert ahead < 0.05, "it went on from there"
    assert region.world_round == 1


async def test_a_killed_node_repeats_what_it_had_contributed_with_its_tail(node: RegionNode, tmp_path: Path) -> None:
    async def fetch(*_: object) -> None: ...

    node.hear()
    await node.apply(1, await node.train(1))
    (await node.worker.capture()).write(tmp_path / "saved")
    payload = await node.train(2)
    again = RegionNode(Trainer(node.trainer.run, ONE_THREAD, node.trainer.dataset))
    again.trainer.load(tmp_path / "saved")
    again.worker.repeat_all(node.noted, 2)
    await again.worker.repeat(fetch)
    assert await again.train(2) == payload
    assert Tail.of(payload) == Tail(0, is_aware=True)
    again.close()


async def test_nothing_is_repeated_without_what_the_world_was_a_part_of(node: RegionNode, tmp_path: Path) -> None:
    node.hear()
    await node.apply(1, await node.train(1))
    await node.train(2)
    for each in node.noted:
        Diary(tmp_path / "diary.jsonl").note(each)
    assert [each.number for each in node.noted] == [2]
    assert Diary(tmp_path / "diary.jsonl").after(0) == [], "it would come out differently"
    assert Diary(tmp_path / "diary.jsonl").after(1) == node.noted


async def test_nothing_is_trained_before_the_world_is_known(node: RegionNode) -> None:
    training = asyncio.create_task(node.train(1))
    await asyncio.sleep(0)
    await node.thread.run(lambda: None)  # behind any training
    assert (node.worker.figures.step, training.done()) == (0, False)
    node.hear()
    assert author_of(await training) == ME


async def test_a_round_that_passed_while_the_world_was_unknown_is_not_trained(node: RegionNode) -> None:
    training = asyncio.create_task(node.train(1))
    await asyncio.sleep(0)
    node.replica.replica.round = 2  # others were let in
    node.hear()
    with pytest.raises(PassedError):
        await training


async def test_a_region_that_has_begun_trains_without_the_world(node: RegionNode) -> None:
    node.replica.replica.round = 1
    payload = await node.train(2)
    assert len(node.noted) == 1
    assert Tail.of(payload) == Tail()


async def test_a_state_that_was_adopted_tells_nothing_of_the_rounds_before(node: RegionNode) -> None:
    node.hear()
    await node.apply(1, await node.train(1))
    assert node.worker.region.world_round == 0
    await node.replica.adopt(7, bytes(32), [node.trainer.state_bytes()])
    assert node.worker.region.world_round is None
    assert Tail.of(await node.train(8)) == Tail(0)


def test_the_worlds_absence_is_told_once_it_has_lasted(node: RegionNode, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.worker.complaints == []
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.0)
    node.worker.lose("nobody answers")
    (found,) = node.worker.complaints
    assert (found.code, found.fields) == (Code.WORLD_AWAY, {"why": "nobody answers"})
    node.hear()
    assert node.worker.complaints == []
