"""Ranks that hold a part of the model each come to what one process comes to, and really hold no more."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import msgspec
import pytest
import torch

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import DataError, MemoryShortError, RanksLostError, TrainingError
from p2ptrain.ranks import channel
from p2ptrain.ranks.sharded import dealt, rows_of
from p2ptrain.share import Share
from tests.helpers.hf_models import hf_model
from tests.helpers.ranks import SHARDED, adapted, make_short, ranked, with_ranks
from tests.helpers.trainer import ONE_THREAD, Trainer, embedded, make

# Sums of some hundred fp32 numbers in another order are 1e-6 apart, and the norm that clips them is: over a flat
# gradient fp32 adds up 2e-6 too little. AdamW divides such differences by a small root, twelve times.
MOVED = 1e-4
IN_BF16 = 0.03  # the same numbers rounded to eight bits, some of them to the other side
TWO, THREE = ["cpu"] * 2, ["cpu"] * 3
MUON = {"inner": "muon"}
ADAMW = {"inner": "adamw"}
UNEVEN = {"inner": "adamw", "sequences_per_pass": 3, "local_steps": 2}
HALF = {"autocast": "bf16"}
pytestmark = pytest.mark.timeout(300)  # each start of processes imports torch


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("data"))


def compare(alone: Trainer, together: Trainer, rounds: int, tolerance: float) -> None:
    """Trains both, and has both apply what one contributes: so their next rounds begin from the same weights."""
    for number in range(rounds):
        ours, theirs = (each.train(Share(number, 0, 1)) for each in (alone, together))
        for one, other in zip(ours, theirs, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=tolerance)
            assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=10 * tolerance)
            assert (other.tokens, other.learned) == (one.tokens, one.learned)
        is_moved = together.run.recipe.spec.kind == "local"
        moved = [(each.live.weights if is_moved else each.live.gradient) for each in (alone, together)]
        assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < tolerance
        for name, tensor in alone.recipe.state().items():
            apart = (together.recipe.state()[name] - tensor).to(torch.float32).norm()
            assert float(apart) <= tolerance * float(tensor.to(torch.float32).norm()), name
        payloads = [alone.contribute(number), together.contribute(number)]
        assert len({*map(len, payloads)}) == 1
        for each, own in zip((alone, together), payloads, strict=True):
            each.apply(number, payloads[:1], {number: own})
        assert together.root() == alone.root()


@pytest.mark.parametrize(
    ("devices", "name", "changes"),
    [
        (["cpu"], "local", MUON), (TWO, "local", MUON), (THREE, "local", MUON), (TWO, "local", UNEVEN),
        (THREE, "local", ADAMW), (TWO, "distro", {}),
    ],
)  # fmt: skip
def test_parts_come_to_what_one_process_comes_to(
    dataset: TokenDataset, devices: list[str], name: str, changes: dict[str, Any]
) -> None:
    with ranked(dataset, devices, name, settings=SHARDED, **changes) as (together, _):
        compare(make(dataset, name, **changes), together, 3, MOVED)


@pytest.mark.parametrize("more", [HALF, HALF | {"checkpointing": True}, {"checkpointing": True}])
def test_also_in_bf16_and_where_layers_are_computed_again(dataset: TokenDataset, more: dict[str, Any]) -> None:
    """Beside ranks that each have the whole model, in bf16 as well."""
    settings = ONE_THREAD.model_copy(update=more)
    parts = settings.model_copy(update={"shard": True})
    with (
        ranked(dataset, TWO, settings=settings, **MUON) as (whole, _),
        ranked(dataset, TWO, settings=parts, **MUON) as (together, _),
    ):
        compare(whole, together, 1, IN_BF16 if "autocast" in more else MOVED)


@pytest.mark.hf
@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_models_of_transformers_are_cut_as_well(kind: str, dataset: TokenDataset) -> None:
    pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")
    recipe = {"name": "local", "inner": "muon", "local_steps": 3, "sequences_per_pass": 4, "k": 64}
    undrawn = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) if kind == "gpt2" else {}
    run = RunConfig(name="test", model=hf_model(kind, **undrawn), recipe=recipe)
    with with_ranks(Trainer(run, ONE_THREAD, dataset), TWO, settings=SHARDED) as (together, _):
        compare(Trainer(run, ONE_THREAD, dataset), together, 1, MOVED)


def test_adapters_are_cut_beside_the_frozen_weights(tmp_path: Path) -> None:
    alone, other, base = adapted(tmp_path)
    with with_ranks(other, TWO, settings=SHARDED, base=base) as (together, _):
        compare(alone, together, 2, MOVED)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_rows_and_matrices_are_dealt_completely(ranks: int) -> None:
    for length in (1, 2, 5, 64):
        cut = [rows_of(length, rank, ranks) for rank in range(ranks)]
        assert [place for each in cut for place in range(length)[each]] == [*range(length)]
    sizes = dict(enumerate([100, 10, 10, 10, 60, 1], start=5))
    owned = dealt(sizes, ranks)
    held = [sum(sizes[place] for place in some) for some in owned]
    assert sorted(place for some in owned for place in some) == [*sizes]
    assert max(held) - min(held) <= max(sizes.values())


PART = """
import sys
from pathlib import Path
import msgspec
import torch.distributed as dist
from p2ptrain.ranks.channel import RankJob
from p2ptrain.ranks.sharded import ShardedTrainer

directory, (rank, ranks, descriptor) = Path(sys.argv[1]), map(int, sys.argv[2:])
store = dist.FileStore(str(directory / "store"), ranks)
job = msgspec.msgpack.decode((directory / "job").read_bytes(), type=RankJob)
trainer = ShardedTrainer(msgspec.structs.replace(job, rank=rank, ranks=ranks), descriptor, store)
assert trainer.optimizer is not None
held = trainer.weights, trainer.gradients(), trainer.optimizer.means, trainer.optimizer.squares
print(*(sum(each.numel() for each in some) for some in held))
dist.barrier()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_holds_its_rows_and_no_more(dataset: TokenDataset, ranks: int, tmp_path: Path) -> None:
    alone = make(dataset, "local", **ADAMW)
    memory = channel.RoundMemory(alone.live, alone.recipe.inner)
    descriptor = memory.descriptor
    said = alone.run.canonical(), SHARDED.model_dump_json(exclude_defaults=True).encode(), "cpu", alone.live.packing
    (tmp_path / "job").write_bytes(msgspec.msgpack.encode(channel.RankJob(0, ranks, "", *said, "", ())))
    command = [sys.executable, "-c", PART, str(tmp_path)]
    parts = [
        subprocess.Popen([*command, str(rank), str(ranks), str(descriptor)], stdout=PIPE, pass_fds=[descriptor])
        for rank in range(ranks)
    ]
    held = [[int(count) for count in part.communicate()[0].split()] for part in parts]
    expected = [
        sum(math.prod(shape[1:]) * len(range(shape[0])[rows_of(shape[0], rank, ranks)]) for shape in alone.live.shapes)
        for rank in range(ranks)
    ]
    assert held == [[each] * 4 for each in expected]
    assert sum(expected) == alone.live.weights.numel()
    assert max(expected) < 1.1 * sum(expected) / ranks


@pytest.mark.parametrize("settings", [ONE_THREAD, SHARDED], ids=["whole", "parts"])
def test_memory_that_runs_out_in_one_rank_ends_the_step_for_all(
    dataset: TokenDataset, settings: DeviceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_short(tmp_path, monkeypatch, rank="1")
    with ranked(dataset, TWO, settings=settings, **MUON) as (trainer, group):
        trainer.train(Share(0, 0, 1))
        trainer.contribute(0)
        there, before = group.pids, {name: each.clone() for name, each in trainer.recipe.state().items()}
        file.touch()
        with pytest.raises((MemoryShortError, RanksLostError), match="memory"):
            trainer.train(Share(1, 0, 1))
        for name, each in trainer.recipe.state().items():
            assert torch.equal(each, before[name]), f"{name} has been changed"
        file.unlink()
        assert len(trainer.train(Share(2, 0, 1))) == 4
        assert trainer.live.sequences_per_pass == 1, "as few as there was memory for: the diary notes it"
        assert (group.pids == there) == (not settings.is_sharded), "who waits within a step is started again"


def test_a_step_that_cannot_be_taken_leaves_the_ranks_as_they_are(tmp_path: Path) -> None:
    dataset = embedded(tmp_path)
    pieces = {path: path.read_bytes() for path in (dataset.directory / "pieces").iterdir()}
    for path, piece in pieces.items():
        path.write_bytes(bytes(len(piece)))
    with ranked(dataset, TWO, settings=SHARDED, **MUON) as (trainer, group):
        with pytest.raises(DataError):
            trainer.train(Share(0, 0, 1))
        for path, piece in pieces.items():
            dataset.add_piece(bytes.fromhex(path.name), piece)
        trainer.train(Share(1, 0, 1))
        there = group.pids
        trainer.replica.weights[0] = float("nan")
        with pytest.raises(TrainingError, match="the loss is not finite in step 0"):
            trainer.train(Share(2, 0, 1))
        assert group.pids == there
