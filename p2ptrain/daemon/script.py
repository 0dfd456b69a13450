"""The node's side of a script's loop: a process of its own, which the script starts.

    python -m p2ptrain.daemon.script SOCKET MEMORY

It is a daemon as any other but for its worker. It ends when the script does: whoever holds the other end of the socket
need not say goodbye. What it logs goes where its standard error does."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from p2ptrain.config import (
    ModelConfig,
    NodeConfig,
    RunConfig,
    exact,
    load_node_config,
    read_table,
    run_config_of,
    with_options,
)
from p2ptrain.daemon import launch
from p2ptrain.daemon.order import JoinOrder, StartOrder
from p2ptrain.daemon.script_loop import ScriptLoop
from p2ptrain.errors import INTERRUPTED, P2ptrainError
from p2ptrain.loop.channel import Begin, Memory, NodeAnswer, NodeFailed, ScriptRequest, framed, receive_frame
from p2ptrain.models.kinds import named_shapes
from p2ptrain.models.plugins import allow
from p2ptrain.node.home import Home
from p2ptrain.train.begin import GivenWeights

_DECODER = msgspec.msgpack.Decoder(ScriptRequest)


def _node_config(begin: Begin) -> NodeConfig:
    config = load_node_config(_path(begin.config_file))
    own = {"name": "cpu", "compile": False, "processes": 1, "shard": False, "nnodes": 1}  # the script takes the steps
    options = {f"device.{name}": value for name, value in own.items()} | begin.options
    parts = ((key.partition("."), value) for key, value in options.items())
    return with_options(config, {(section, name): value for (section, _, name), value in parts})


def take_part(begin: Begin, connection: socket.socket, memory: Memory) -> None:
    """Runs the node until the script has left."""
    config = _node_config(begin)
    allow(config.plugins.allow)
    loop, data = ScriptLoop(connection, memory, begin, Home(config).directory), _path(begin.data)
    if begin.joins:
        wanted, invitation, trust = (text or None for text in (begin.wanted, begin.invitation, begin.trust))
        order = JoinOrder(config=config, data=data, wanted=wanted, invitation=invitation, trust=trust)
        launch.take_part(order, loop)
        return
    said, run = run_of(begin)
    loop.check(run)
    given = GivenWeights(Path("the script's model"), lambda model: _in_order(memory.base, begin, model))
    launch.take_part(StartOrder(config=config, data=data, run=run, said=said, given=given), loop)


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def run_of(begin: Begin) -> tuple[dict[str, object], RunConfig]:
    """Returns what the script says of its run, and the run: with the script's model, unless it names another."""
    path = _path(begin.run_file)
    said: dict[str, Any] = read_table(path) if path else exact(begin.run)
    model = said.get("model", {})
    if isinstance(model, dict) and "kind" not in model and "preset" not in model:
        texts = [" ".join([name, *map(str, shape)]) for name, shape in begin.parameters]
        frozen = {"frozen": begin.frozen} if begin.frozen else {}
        said = {"name": "mine", **said, "model": {**model, "kind": "own", "parameters": texts, **frozen}}
    return said, run_config_of(said, path or Path("the script"))


def _in_order(weights: Tensor, begin: Begin, model: ModelConfig) -> Tensor:
    """Returns the weights of the script's model in the order of the run's."""
    parts = torch.split(weights, [prod(shape) for _, shape in begin.parameters])
    named = dict(zip((name for name, _ in begin.parameters), parts, strict=True))
    return torch.cat([named[name] for name, _ in named_shapes(model)])


def main() -> int:
    """Runs the node, and tells the script why it ended, if it cannot go on."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    begin = _DECODER.decode(receive_frame(connection, bytearray())).body
    assert isinstance(begin, Begin)
    memory = Memory(int(sys.argv[2]), sum(prod(shape) for _, shape in begin.parameters))
    os.dup2(2, 1)  # what the daemon prints belongs into the log
    try:
        take_part(begin, connection, memory)
    except KeyboardInterrupt:
        return INTERRUPTED
    except P2ptrainError as error:
        with suppress(OSError):
            connection.setblocking(True)
            connection.sendall(framed(NodeAnswer(0, NodeFailed(type(error).__name__, str(error)))))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
