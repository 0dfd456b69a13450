"""The script's side of a round: how many steps it takes, with a stand-in for its node and a clock of the test's own."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import p2ptrain
from p2ptrain import Swarm
from p2ptrain import swarm as swarm_module
from p2ptrain.loop import channel
from p2ptrain.loop.channel import Begin, Memory, RoundTrained, ScriptRequest
from p2ptrain.swarm import keeps_gradients

LEAST, MOST, STEP_SECONDS = 2, 10, 1.0


class AnsweringNode:
    """Answers a script as its node would, and keeps what it is told of each round."""

    returncode = 0

    def __init__(self, memory: Memory, theirs: socket.socket) -> None:
        self.trained: list[RoundTrained] = []
        self.memory, self._socket = memory, theirs
        self._thread = Thread(target=self._answer_until_it_leaves)
        self._thread.start()

    def wait(self, _: float | None = None) -> None:
        self._thread.join()

    def _answer_until_it_leaves(self) -> None:
        decoder, number = msgspec.msgpack.Decoder(ScriptRequest), 0
        with self._socket, self._socket.makefile("rb") as file:
            while head := file.read(4):
                asked = decoder.decode(file.read(int.from_bytes(head, "big")))
                answer: channel.Answer = channel.CarriedOut()
                match asked.body:
                    case Begin(parameters=((name, _),)):
                        answer = channel.NodeReady("run", "nowhere", ("/ip4/127.0.0.1",), (name,), MOST, LEAST)
                    case channel.NextRound():
                        number += 1
                        answer = channel.RoundToTrain(number, number - 1, 8)
                    case RoundTrained():
                        self.trained.append(asked.body)
                self._socket.sendall(channel.framed(channel.NodeAnswer(asked.number, answer)))


class FakeClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    for module in (swarm_module, channel):
        monkeypatch.setattr(module, "perf_counter", made)
    return made


@pytest.fixture
def nodes() -> list[AnsweringNode]:
    """The nodes of the scripts of a test."""
    return []


@pytest.fixture
def swarm(
    clock: FakeClock, nodes: list[AnsweringNode], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Swarm]:
    def spawned(parameters: channel.Parameters, _: Path) -> tuple[AnsweringNode, socket.socket, Memory]:
        ((_, shape),) = parameters
        size, (ours, theirs) = math.prod(shape), socket.socketpair()
        memory = Memory(channel.make_memory(size), size)
        nodes.append(AnsweringNode(memory, theirs))
        return nodes[-1], ours, memory

    monkeypatch.setattr(channel, "spawn_node", spawned)
    with p2ptrain.start(nn.Linear(4, 3, bias=False), directory=tmp_path) as made:
        yield made


def steps_of_a_round(swarm: Swarm, clock: FakeClock, node: AnsweringNode) -> int:
    """Takes steps until the round ends, and returns how many the node is told of."""
    ended = False
    while not ended:
        clock.now += STEP_SECONDS
        ended = swarm.step(1.0)
    return node.trained[-1].steps


def test_what_is_no_number_of_sequences_is_an_error_in_the_script_and_not_in_the_node(swarm: Swarm) -> None:
    with pytest.raises(TypeError):
        swarm.evaluate(lambda batch: 0.0, None)  # type: ignore[arg-type]
    swarm.step(1.0)


@pytest.mark.parametrize("wrapped", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_a_name_is_plain_however_a_model_is_wrapped(wrapped: str) -> None:
    assert swarm_module._plain(f"{wrapped}a.weight") == "a.weight"


@pytest.mark.parametrize(
    ("usual", "last", "steps"),
    [(10.5, 11.0, MOST), (9.0, 10.5, MOST), (4.5, 5.0, 4), (0.0, 0.0, LEAST)],
    ids=["as fast as the others", "little slower", "half as fast", "late from the start"],
)
def test_a_script_takes_as_many_steps_as_fit_the_pace(
    swarm: Swarm, clock: FakeClock, nodes: list[AnsweringNode], usual: float, last: float, steps: int
) -> None:
    [node] = nodes
    node.memory.keep_pace(swarm.round, usual, last)
    assert steps_of_a_round(swarm, clock, node) == steps
    assert steps_of_a_round(swarm, clock, node) == MOST, "the next round has a pace of its own, not known yet"


def test_a_pace_may_become_known_within_a_round_and_another_round_s_is_none(
    swarm: Swarm, clock: FakeClock, nodes: list[AnsweringNode]
) -> None:
    [node] = nodes
    node.memory.keep_pace(swarm.round - 1, 0.0, 0.0)
    for _ in range(4):
        clock.now += STEP_SECONDS
        assert not swarm.step(1.0)
    node.memory.keep_pace(swarm.round, 1.5, 2.0)
    assert steps_of_a_round(swarm, clock, node) == 5
    told = node.trained[-1]
    assert (told.steps, told.loss, told.seconds) == (5, 1.0, 5 * STEP_SECONDS)


def test_an_interrupt_at_any_place_leaves_gradients_on() -> None:
    """Otherwise every later loss in the notebook has no gradient, until its kernel is started again."""

    @keeps_gradients
    def looks() -> None:
        with torch.no_grad():
            assert not torch.is_grad_enabled()

    left = places = 0

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    while True:
        left = places
        sys.settrace(interrupt)
        try:
            looks()
            break
        except KeyboardInterrupt:
            assert torch.is_grad_enabled(), f"interrupted at place {places}"
            places += 1
        finally:
            sys.settrace(None)
    assert places > 20
