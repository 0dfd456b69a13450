"""Messages between a node and its ranks, over a Unix socket for each, and the memory that they share.

The socket lies in a directory that this user alone may enter; that of a rank on another machine is a connection that
`machines` has let in. A rank's end of it is its life line: the rank ends when the node does, however that ends.

The memory holds what a round goes on from and what it comes to: the live weights, and the inner optimizer's state or,
in a recipe without one, the gradient. Both sides copy from and to it: so what the node has is changed only once its
ranks have done all of their steps, and is whole when one of them dies while it writes."""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from time import monotonic
from typing import Self

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from p2ptrain.data.packing import Packing
from p2ptrain.errors import P2ptrainError, TrainingError
from p2ptrain.loop.channel import LENGTH_BYTES, framed, make_shared
from p2ptrain.train.inner import AdamW, Muon
from p2ptrain.train.live import LiveModel

SOCKET_NAME = "node"  # in the directory of a group of ranks
ALIGNED_BYTES = 64  # where a tensor begins
PART_BYTES = 2**20  # received at a time: recv takes the memory before anything has come


class RankJob(Struct, frozen=True, tag="job"):
    """The node's first message, after the memory's descriptor: what a rank trains, and where."""

    rank: int
    ranks: int
    address: str  # of the node's machine, if some ranks are on others: these get all tensors from rank 0
    run: bytes  # in its canonical encoding
    settings: bytes  # [device] of the node's config, as JSON
    device: str
    packing: Packing
    base: str  # the file of the frozen weights, if adapters train
    plugins: tuple[str, ...]  # that this machine's owner has allowed
    threads: int = 0  # of this rank; 0: as the node says


class BeginSteps(Struct, frozen=True, tag="begin"):
    """A round's steps begin, or go on, from the tensors in the memory."""

    round: int
    place: int  # of the node among those of the round
    rate: float  # of the inner optimizer
    threads: int
    sequences_per_pass: int  # at most; 0: as the run says


class TakeStep(Struct, frozen=True, tag="take"):
    """Asks for a step on the sequences at these positions, of which each rank takes its part."""

    step: int
    positions: list[int]
    rows: bytes  # the tokens of this rank's part of them, as int32


class BringBack(Struct, frozen=True, tag="bring"):
    """Asks for the tensors after the steps so far, in the memory."""


class RankStarted(Struct, frozen=True, tag="started"):
    """A rank's first message; all but the first two are for one on another machine."""

    rank: int  # among those of its machine
    pid: int  # 0: the machine only asks whether it may come
    machine: str = ""  # a name that was drawn
    devices: tuple[str, ...] = ()  # of that machine
    kind: str = ""  # of each, as `devices.kind_of` calls it
    plugins: tuple[str, ...] = ()  # that its owner has allowed
    threads: int = 0


class StoreValue(Struct, frozen=True, tag="store"):
    """Sets the value of a key, by which ranks meet, or asks for it; and the answer. None: it has none."""

    key: str
    value: bytes | None = None


class StepTaken(Struct, frozen=True, tag="step"):
    """A step's figures, which are those of all ranks, and this rank's part of it."""

    loss: float
    tokens: int
    gradient_norm: float
    learned: int
    own_tokens: int
    own_seconds: float  # without waiting for the others
    memory_bytes: int
    sequences_per_pass: int  # at most: fewer than before if memory has run out; 0: as the run says


class RankDone(Struct, frozen=True, tag="done"):
    """The request has been carried out; first of all: the rank has met all others. From the node: it takes the rank."""


class RankFailed(Struct, frozen=True, tag="failed"):
    """A rank cannot begin, or none of them can take this step. From the node: it does not take it."""

    kind: str = ""  # of error, by its class; empty: another rank says why
    text: str = ""
    sequences_per_pass: int = 0  # at most from now on, if memory has run out
    leaves_others: bool = False  # waiting within the step: none can go on

    @classmethod
    def by(cls, error: P2ptrainError, sequences: int = 0, *, leaves_others: bool = False) -> Self:
        text = error.what if isinstance(error, TrainingError) else str(error)
        return cls(type(error).__name__, text, sequences, leaves_others)


Order = RankJob | BeginSteps | TakeStep | BringBack | StoreValue | RankDone | RankFailed
RankAnswer = RankStarted | StoreValue | StepTaken | RankDone | RankFailed
_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_ANSWERS: msgspec.msgpack.Decoder[RankAnswer] = msgspec.msgpack.Decoder(RankAnswer)


def say(connection: socket.socket, message: Order | RankAnswer) -> None:
    connection.sendall(framed(message))


def hear_order(connection: socket.socket) -> Order:
    """Waits for an order; EOFError if the node is gone."""
    return _ORDERS.decode(_frame(connection))


def hear_answer(connection: socket.socket) -> RankAnswer:
    """Waits for an answer; EOFError if the rank is gone."""
    return _ANSWERS.decode(_frame(connection))


def _frame(connection: socket.socket) -> bytes:
    return exactly(connection, int.from_bytes(exactly(connection, LENGTH_BYTES), "big"))


def exactly(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    """Waits for so many bytes, however slowly they come; until: TimeoutError then."""
    received = bytearray()
    while len(received) < size:
        if until is not None:
            connection.settimeout(max(1e-3, until - monotonic()))
        if not (part := connection.recv(min(size - len(received), PART_BYTES))):
            raise EOFError
        received += part
    return bytes(received)


class RoundMemory:
    """A round's tensors, each after its place in the memory: those that it goes on from, and those that it comes to."""

    def __init__(self, live: LiveModel, inner: AdamW | Muon | None, descriptor: int | None = None) -> None:
        """inner: the optimizer, in a recipe that has one; descriptor: of the memory; None: it is made"""
        tensors = [live.weights, *(inner.state().values() if inner else [live.gradient])]
        sizes = [-(-each.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for each in tensors]
        if descriptor is None:
            weakref.finalize(self, os.close, descriptor := make_shared(sum(sizes)))
        self.descriptor = descriptor
        whole, pairs, start = mmap.mmap(self.descriptor, sum(sizes)), list[tuple[Tensor, Tensor]](), 0
        for each, size in zip(tensors, sizes, strict=True):
            flat = torch.frombuffer(whole, dtype=each.dtype, count=each.numel(), offset=start)
            pairs.append((flat.view(each.shape), each))
            start += size
        self.given, self.made = (pairs, pairs) if inner else (pairs[:1], pairs[1:])
