"""Helpers for tests of export and generate: a node's directory with a run and checkpoints, made by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.config.node import StorageConfig
from p2ptrain.exact.root import covered_pieces, octets, state_root
from p2ptrain.models.built_in import Transformer
from p2ptrain.models.export import Weights
from p2ptrain.node.home import Home
from p2ptrain.store.checkpoints import STATE_NAME, Checkpoint, Checkpoints
from p2ptrain.store.store import CHECKPOINTS_NAME
from tests.helpers.cli import p2ptrain
from tests.helpers.core import KEYS
from tests.helpers.exact_numbers import weights as known_weights

SMALL: dict[str, Any] = {"dim": 24, "layers": 2, "heads": 6, "kv_heads": 3, "ffn_dim": 40, "sequence_length": 33}
HEAD, BRANCH = b"h" * 32, b"b" * 32


def run_of(name: str = "x", **sections: Any) -> RunConfig:
    raw = {"name": name, "model": SMALL, **sections}
    founders = [key.hex() for key in KEYS[:3]]
    return RunConfig.model_validate(raw).sealed(manifest="1" * 64, initial_root="2" * 64, founders=founders)


def shapes_of(run: RunConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(run.model).named_parameters()}


def state_of(run: RunConfig, seed: int = 1) -> torch.Tensor:
    """Makes weights with which every part of the model matters: norms around 1.5, matrices scaled by their inputs."""
    parts = []
    for number, shape in enumerate(shapes_of(run).values()):
        part = known_weights(seed * 1_000 + number, shape)
        parts.append(part * 0.5 + 1.5 if len(shape) == 1 else part * (4 / shape[1] ** 0.5))
    return torch.cat([part.flatten() for part in parts])


def model_of(run: RunConfig, state: torch.Tensor) -> Transformer:
    """Builds the model with these weights by hand."""
    model, at = Transformer(run.model), 0
    with torch.no_grad():
        for parameter in model.parameters():
            size = math.prod(parameter.shape)
            parameter.copy_(state[at : at + size].view(parameter.shape))
            at += size
    return model


class NodeDirectory:
    """A node's data directory."""

    def __init__(self, directory: Path, run: RunConfig) -> None:
        self.directory, self.run = directory, run
        self.config = NodeConfig(storage=StorageConfig(directory=str(directory)))
        run_id = run.id
        self.run_directory = Home(self.config).of_run(run_id)
        self.run_directory.mkdir(parents=True)
        (self.run_directory / "run.json").write_bytes(run.canonical())
        self.checkpoints = Checkpoints(self.run_directory / CHECKPOINTS_NAME, run_id)
        self.checkpoints.tidy()

    def save(
        self, number: int, state: torch.Tensor, root: bytes | None = None, head: bytes = HEAD, trainer: bytes = b"t"
    ) -> Checkpoint:
        if root is None:
            root = state_root(state, covered_pieces(state.numel() * 4, self.run.state, number, head))

        def write(path: Path) -> None:
            path.write_bytes(trainer)

        return self.checkpoints.write(number, BRANCH, head, root, number, write, octets(state))

    @property
    def place(self) -> tuple[str, Path]:
        return "--data-dir", self.directory


def weights_of(checkpoint: Checkpoint, run: RunConfig, **changes: Any) -> Weights:
    content = (checkpoint.path / STATE_NAME).read_bytes()
    found = Weights(
        checkpoint.path / STATE_NAME, len(content), blake3(content).hexdigest(), run, checkpoint.round,
        checkpoint.branch, checkpoint.head, checkpoint.root,
    )  # fmt: skip
    return replace(found, **changes)


class Command:
    """Runs `p2ptrain` in this process; returns exit status, stdout and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        return p2ptrain(self.capsys, *arguments)


def saved_node(directory: Path, rounds: Iterable[int] = (8, 16)) -> NodeDirectory:
    """Makes a node with a checkpoint of each of these rounds."""
    node = NodeDirectory(directory, run_of())
    for number in rounds:
        node.save(number, state_of(node.run, number))
    return node
