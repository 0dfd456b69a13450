"""The channel between a script and its node, or a region's node and its world node: messages over a pair of sockets,
weights in shared memory.

Each request has a number, and its answers repeat it, so that an answer that was interrupted is not taken for another's.
The memory begins with what both look at all the time, as three doubles: the round that the pace is for, and when the
others usually contribute to it and no longer wait, by the monotonic clock that both processes see. A fourth is when the
script took its last step. Then come the weights that a round began from, and how far its steps have moved them."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec import Struct

if TYPE_CHECKING:
    import asyncio

HEAD_DOUBLES, HEAD_BYTES = 4, 64
FLOAT_BYTES = 4
FRAME_BYTES_MAX = 2**28  # a step's sequences, or the held-out ones
LENGTH_BYTES, READ_BYTES = 4, 2**20
LEAVE_SECONDS = 660.0  # for the node to leave, which may take ten minutes (core/membership.py), and to save
LOG_NAME = "node.log"  # in the node's directory

Parameters = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes, in the model's order


class Begin(Struct, frozen=True, tag="begin"):
    """The first message: what the node is to do."""

    joins: bool  # a run that exists; otherwise it starts one
    run: dict[str, object]  # what the script says of a run that it starts
    options: dict[str, object]  # of the node's config, by "section.key"
    parameters: Parameters  # of the script's model
    frozen: str = ""  # digest of the rest of it
    run_file: str = ""
    config_file: str = ""
    data: str = ""
    wanted: str = ""
    invitation: str = ""
    trust: str = ""
    reads_data: bool = True  # whether the script may ask for the run's own


class NextRound(Struct, frozen=True, tag="next"):
    """Asks for the next round to train, whose weights are then in the memory, and of another round than `seen`."""

    seen: int = -1


class RoundTrained(Struct, frozen=True, tag="trained"):
    """A round's steps have been taken; how far they moved the weights is in the memory."""

    steps: int
    loss: float | None  # the mean, in nats a token
    tokens: int
    seconds: float


class RoundDropped(Struct, frozen=True, tag="dropped"):
    """A round's steps are lost."""

    why: str


class TakeSequences(Struct, frozen=True, tag="take"):
    """Asks for the sequences of a step of this round."""

    step: int


class TakeHeldOut(Struct, frozen=True, tag="held_out"):
    """Asks for held-out sequences."""

    count: int


class NodeReady(Struct, frozen=True, tag="ready"):
    """The node takes part."""

    run_id: str
    directory: str  # the node's data
    addresses: tuple[str, ...]
    names: tuple[str, ...]  # of the parameters, in the run's order
    steps: int
    steps_min: int


class RoundToTrain(Struct, frozen=True, tag="round"):
    """A round to train, from the weights in the memory."""

    number: int
    base: int  # the round whose weights these are
    sequences: int  # of a step


class Sequences(Struct, frozen=True, tag="sequences"):
    """Token sequences, as int32."""

    count: int
    data: bytes


class CarriedOut(Struct, frozen=True, tag="done"):
    """The request has been carried out."""


class NodeNote(Struct, frozen=True, tag="note"):
    """A sentence for a script that waits, before the answer: why there is none yet. With number 0, a warning."""

    text: str
    is_trouble: bool = False  # False: the others are not done


class NodeFailed(Struct, frozen=True, tag="failed"):
    """The request, or the node (number 0), has failed."""

    kind: str  # of error, by its class
    text: str


Request = Begin | NextRound | RoundTrained | RoundDropped | TakeSequences | TakeHeldOut
Answer = NodeReady | RoundToTrain | Sequences | CarriedOut | NodeNote | NodeFailed


class ScriptRequest(Struct, frozen=True):
    """A request with its number."""

    number: int
    body: Request


class NodeAnswer(Struct, frozen=True):
    """An answer with its request's number; 0: nobody asked."""

    number: int
    body: Answer


def framed(message: Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def receive_frame(connection: socket.socket, received: bytearray) -> bytes:
    """Waits for a frame's body. `received` holds what has come beyond the last one, also after an interrupt. Raises
    EOFError if the other process is gone."""
    while len(received) < (end := LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")):
        if not (part := connection.recv(READ_BYTES)):
            raise EOFError
        received += part
    body = bytes(received[LENGTH_BYTES:end])
    del received[:end]
    return body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Reads a frame's body. Raises IncompleteReadError if the other process is gone."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    assert size <= FRAME_BYTES_MAX, "our own processes"
    return await reader.readexactly(size)


def make_shared(size: int) -> int:
    """Makes shared memory of so many bytes, which ends with its users. Returns its descriptor."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("p2ptrain")
    else:
        with tempfile.TemporaryFile() as file:  # has no name any more
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def make_memory(parameters: int) -> int:
    """Makes the memory for a model of this many parameters. Returns its descriptor."""
    return make_shared(HEAD_BYTES + 2 * FLOAT_BYTES * parameters)


class Memory:
    """The shared memory, seen from one of both processes."""

    def __init__(self, descriptor: int, parameters: int) -> None:
        whole = mmap.mmap(descriptor, HEAD_BYTES + 2 * FLOAT_BYTES * parameters)
        os.close(descriptor)
        self._head = memoryview(whole)[: 8 * HEAD_DOUBLES].cast("d")
        self.base = torch.frombuffer(whole, dtype=torch.float32, count=parameters, offset=HEAD_BYTES)
        second = HEAD_BYTES + FLOAT_BYTES * parameters
        self.moved = torch.frombuffer(whole, dtype=torch.float32, count=parameters, offset=second)

    def keep_pace(self, number: int, usual: float, last: float) -> None:
        """Notes when the others contribute to this round and no longer wait, in seconds from now."""
        now = perf_counter()
        self._head[0], self._head[1], self._head[2] = float(number), now + usual, now + last

    def pace(self, number: int) -> tuple[float, float] | None:
        """Returns in how many seconds the others contribute to this round, and no longer wait, if that is known."""
        now = perf_counter()
        return (self._head[1] - now, self._head[2] - now) if self._head[0] == number else None

    def note_step(self) -> None:
        self._head[3] = perf_counter()

    @property
    def stepped_at(self) -> float:
        return self._head[3]


def spawn_node(parameters: Parameters, directory: Path) -> tuple[subprocess.Popen[bytes], socket.socket, Memory]:
    """Starts a node for a model of these parameters, which waits for `Begin`, in a session of its own, so that Ctrl-C
    reaches the script alone. Returns it with our ends of what joins both."""
    size = sum(prod(shape) for _, shape in parameters)
    ours, theirs = socket.socketpair()
    descriptor = make_memory(size)
    try:
        memory = Memory(os.dup(descriptor), size)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        arguments = [sys.executable, "-m", "p2ptrain.daemon.script", str(theirs.fileno()), str(descriptor)]
        with (directory / LOG_NAME).open("ab") as output:
            process = subprocess.Popen(  # noqa: S603
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                pass_fds=(theirs.fileno(), descriptor),
            )  # fmt: skip
    finally:
        theirs.close()
        os.close(descriptor)
    return process, ours, memory
