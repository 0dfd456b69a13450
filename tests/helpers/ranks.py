"""Trainers whose steps are taken by real processes on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2ptrain.config import DeviceConfig, ModelConfig, RunConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.ranks.group import Patience, RankGroup, RankWork
from p2ptrain.train.begin import begin
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer, make

GONE_SECONDS = 30.0  # for processes to end
PATIENCE = Patience()
SHARDED = ONE_THREAD.model_copy(update={"shard": True})
# Imported by each Python that starts: one rank's call of this name fails while the file is there.
SHORT = """
import os
if os.environ.get("RANK", "0") == {rank!r}:
    import pkgutil, torch
    of, _, name = {what!r}.rpartition(".")
    holder = pkgutil.resolve_name(of)
    usual = getattr(holder, name)
    def short(*args, **kwargs):
        if os.path.exists({file!r}):
            import p2ptrain.errors
            raise {error}
        return usual(*args, **kwargs)
    setattr(holder, name, short)
"""


@contextmanager
def ranked(
    dataset: TokenDataset,
    devices: Sequence[str],
    name: str = "local",
    patience: Patience = PATIENCE,
    *,
    token: bytes = b"",
    settings: DeviceConfig = ONE_THREAD,
    **changes: Any,
) -> Iterator[tuple[Trainer, RankGroup]]:
    """Yields a trainer whose steps a group of ranks takes; at the end none of its processes is left."""
    with with_ranks(make(dataset, name, **changes), devices, patience, settings=settings, token=token) as made:
        yield made


@contextmanager
def with_ranks(
    trainer: Trainer,
    devices: Sequence[str],
    patience: Patience = PATIENCE,
    *,
    settings: DeviceConfig = ONE_THREAD,
    base: Path | None = None,
    token: bytes = b"",
) -> Iterator[tuple[Trainer, RankGroup]]:
    work = RankWork(trainer.run, settings, trainer.dataset, base, token=token)
    group = RankGroup(work, devices, trainer.live, trainer.recipe, patience)
    trainer.elsewhere = group
    try:
        yield trainer, group
    finally:
        there = [psutil.Process(each) for each in group.pids if psutil.pid_exists(each)]
        group.close()
        _, alive = psutil.wait_procs(there, GONE_SECONDS)
        assert alive == []


def adapted(directory: Path) -> tuple[Trainer, Trainer, Path]:
    """Makes two trainers of one run of adapters; returns the file of its frozen weights as well."""
    recipe = {"name": "local", "local_steps": 3, "sequences_per_pass": 4, "chunk": 16, "k": 64}
    adapt = {"kind": "lora", "rank": 4, "alpha": 8}
    wanted = RunConfig(name="test", model=ModelConfig(**TINY), adapt=adapt, recipe=recipe)
    made = begin(wanted, directory / "data", ["ab" * 32], None, None, directory / "bases")
    assert made.base is not None
    data = TokenDataset.open(made.dataset, made.run.data.manifest)
    one, other = (Trainer(made.run, ONE_THREAD, data, base=made.base.path) for _ in range(2))
    for each in (one, other):
        each.adopt(0, [made.state])
    return one, other, made.base.path


def make_short(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
    error: str = 'torch.OutOfMemoryError("of this test")',
    what: str = "torch.Tensor.backward",
) -> Path:
    """Returns the file that takes this rank's memory away in a call while it is there, or causes another error."""
    file = directory / "short"
    (directory / "sitecustomize.py").write_text(SHORT.format(rank=rank, file=str(file), error=error, what=what))
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=":")
    return file
