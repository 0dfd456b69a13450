"""Steps that several processes take together come to what one process comes to, and their end harms no more than a
round."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from itertools import count, pairwise
from pathlib import Path
from random import Random
from threading import Timer
from time import monotonic, perf_counter
from typing import Any

import psutil
import pytest
import torch

from p2ptrain.config import DeviceConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import DataError, RanksLostError, StoppedError, TrainingError
from p2ptrain.node.local_worker import LearnerThread
from p2ptrain.ranks import channel
from p2ptrain.ranks import group as group_module
from p2ptrain.ranks.group import Patience, RankGroup
from p2ptrain.ranks.machines import begin
from p2ptrain.share import Share
from p2ptrain.train.live import StepResult
from tests.helpers.ranks import GONE_SECONDS, SHARDED, make_short, ranked
from tests.helpers.trainer import ONE_THREAD, embedded, make

ONE, TWO = ["cpu"], ["cpu", "cpu"]
LOCAL = {"inner": "muon"}
UNEVEN = {"inner": "adamw", "sequences_per_pass": 3, "local_steps": 2}
pytestmark = pytest.mark.timeout(300)  # each start of processes imports torch


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    ("devices", "name", "changes"),
    [(ONE, "local", LOCAL), (ONE, "distro", {}), (TWO, "local", LOCAL), (TWO, "local", UNEVEN), (TWO, "distro", {})],
)
def test_ranks_contribute_what_one_process_contributes(
    dataset: TokenDataset, devices: list[str], name: str, changes: dict[str, Any]
) -> None:
    alone = make(dataset, name, **changes)
    with ranked(dataset, devices, name, **changes) as (together, group):
        for number in range(3):
            share, times = Share(number, 0, 1), [perf_counter()]
            ours = alone.train(share)
            times.append(perf_counter())
            theirs = together.train(share)
            times.append(perf_counter())
            for one, other in zip(ours, theirs, strict=True):
                assert other.loss == pytest.approx(one.loss, rel=1e-5)
                assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)
                assert (other.tokens, other.learned) == (one.tokens, one.learned)
            moved = [(it.live.gradient if name == "distro" else it.live.weights) for it in (alone, together)]
            assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < 1e-4
            payloads = [alone.contribute(number), together.contribute(number)]
            assert len({*map(len, payloads)}) == 1
            for each, own in zip((alone, together), payloads, strict=True):
                each.apply(number, payloads[:1], {number: own})
            assert together.root() == alone.root()
        spent = [f"{1e3 * (end - begin) / len(ours):.0f} ms" for begin, end in pairwise(times)]
        sys.stderr.write(f"{name}: a step takes {spent[0]} in the node, {spent[1]} in {len(devices)} rank(s)\n")
        assert sum(each.tokens for each in group.figures) == sum(each.tokens for each in theirs)
        assert all(each.memory_bytes for each in group.figures)


def test_a_state_that_ranks_have_made_is_opened_by_one_process_and_by_ranks(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    with ranked(dataset, TWO, **LOCAL) as (together, _):
        together.train(Share(0, 0, 1))
        together.contribute(0)
        together.save(path)
        alone = make(dataset, "local", **LOCAL)
        alone.load(path)
        for name, tensor in together.recipe.state().items():
            assert torch.equal(alone.recipe.state()[name], tensor), name
        assert alone.recipe.state()["inner_steps"] == 4
        together.load(path)  # and trains the next round from there
        one, other = alone.train(Share(1, 0, 1)), together.train(Share(1, 0, 1))
        assert other[-1].loss == pytest.approx(one[-1].loss, rel=1e-5)


def test_a_round_may_begin_long_after_its_ranks(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranked(dataset, TWO, **LOCAL) as (trainer, _):
        monkeypatch.setattr(group_module, "monotonic", lambda: monotonic() + 10_000)
        assert trainer.train(Share(0, 0, 1))


@pytest.mark.parametrize("settings", [ONE_THREAD, SHARDED], ids=["whole", "parts"])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_dies_costs_the_round_and_nothing_else(
    dataset: TokenDataset, seed: int, settings: DeviceConfig
) -> None:
    drawn = Random(seed)
    victim, step = drawn.randrange(2), drawn.randrange(4)
    with ranked(dataset, TWO, settings=settings, **LOCAL) as (trainer, group):
        times = list[float]()
        trainer.train(Share(0, 0, 1), lambda result: times.append(perf_counter()))
        trainer.apply(0, [payload := trainer.contribute(0)], {0: payload})
        before = {name: each.clone() for name, each in trainer.recipe.state().items()}
        steps = 0

        def kill(result: StepResult) -> None:
            nonlocal steps
            if steps == step:  # at any time within the next step, or while the round's tensors are brought back
                delay = drawn.random() * (times[-1] - times[-2])
                Timer(delay, os.kill, (group.figures[victim].pid, signal.SIGKILL)).start()
            steps += 1

        try:
            trainer.train(Share(1, 0, 1), kill)
        except RanksLostError as error:
            assert "has ended; 2 ranks are started again" in str(error)
            assert group.kept == 0
            for name, each in trainer.recipe.state().items():
                assert torch.equal(each, before[name]), f"{name} has been changed"
            began = perf_counter()
            trainer.train(Share(1, 0, 1))
            sys.stderr.write(f"from the loss of a rank to the next contribution: {perf_counter() - began:.1f} s\n")
        else:
            assert step == 3, "it had done all of its work"
        assert len(trainer.contribute(1)) == len(payload)


def test_a_rank_that_hangs_is_named_and_replaced(dataset: TokenDataset) -> None:
    with ranked(dataset, TWO, patience=Patience(step_seconds_min=1.0, first_step_seconds=1.0), **LOCAL) as it:
        trainer, group = it
        group.wait()
        hung = group.figures[1].pid
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(RanksLostError, match=rf"no answer in time from rank 1 \(cpu, process {hung}\)"):
            trainer.train(Share(0, 0, 1))
        assert not psutil.pid_exists(hung)


def test_ranks_that_cannot_be_started_again_cost_their_rounds(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranked(dataset, ONE, **LOCAL) as (trainer, group):
        trainer.train(Share(0, 0, 1))
        trainer.contribute(0)

        def full(**_: object) -> str:
            raise OSError(errno.ENOSPC, "no room")

        with monkeypatch.context() as patch:
            patch.setattr(group_module.tempfile, "mkdtemp", full)
            os.kill(group.figures[0].pid, signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(RanksLostError, match=r"cannot be started: .*no room"):
                    trainer.train(Share(1, 0, 1))
        with pytest.raises(RanksLostError, match="ended before they began"):
            trainer.train(Share(1, 0, 1))
        assert len(trainer.train(Share(1, 0, 1))) == 4


def test_the_file_by_which_ranks_meet_does_not_grow(dataset: TokenDataset) -> None:
    with ranked(dataset, TWO, **LOCAL) as (trainer, group):
        trainer.train(Share(0, 0, 1))
        (directory,) = [Path(each) for each in psutil.Process(group.pids[0]).cmdline() if "p2ptrain-ranks-" in each]
        path = directory / "agents"
        size, until = path.stat().st_size, perf_counter() + 7.0  # an agent would say every five that it lives
        while perf_counter() < until:
            trainer.train(Share(0, 0, 1))
        assert path.stat().st_size == size > 0


def test_a_device_that_is_gone_leaves_the_others(dataset: TokenDataset) -> None:
    with ranked(dataset, ["cpu", "cuda:9"], **LOCAL) as (trainer, group):
        with pytest.raises(RanksLostError, match=r"rank 1 .* cannot begin: device cuda:9 not found"):
            trainer.train(Share(0, 0, 1))
        assert len(trainer.train(Share(0, 0, 1))) == 4
        assert [each.device for each in group.figures] == ["cpu"]


def test_a_card_that_fails_within_a_step_costs_the_round(
    dataset: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = 'p2ptrain.errors.DeviceError("cuda:1 has fallen off the bus", fix="Look at it")'
    file = make_short(tmp_path, monkeypatch, rank="1", error=failure)
    with ranked(dataset, TWO, **LOCAL) as (trainer, _):
        file.touch()
        with pytest.raises(RanksLostError, match=r"cuda:1 has fallen off .*; 2 ranks are started again"):
            trainer.train(Share(0, 0, 1))
        file.unlink()
        assert len(trainer.train(Share(1, 0, 1))) == 4


def test_a_card_that_fails_while_a_rank_starts_is_left_out(
    dataset: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = 'RuntimeError("CUDA error: an illegal memory access was encountered")'
    file = make_short(tmp_path, monkeypatch, "1", failure, what="p2ptrain.models.kinds.build")
    file.touch()
    with ranked(dataset, TWO, **LOCAL) as (trainer, group):
        with pytest.raises(RanksLostError, match=r"rank 1 .* cannot begin: the graphics card has failed: CUDA error"):
            trainer.train(Share(0, 0, 1))
        assert len(trainer.train(Share(0, 0, 1))) == 4
        assert len(group.figures) == 1


def test_memory_that_runs_out_while_a_rank_starts_is_told(
    dataset: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_short(tmp_path, monkeypatch, rank="0", what="p2ptrain.models.kinds.build")
    file.touch()
    with ranked(dataset, ONE, **LOCAL) as (trainer, _):
        with pytest.raises(RanksLostError, match=r"rank 0 .* cannot begin: out of memory while starting a rank"):
            trainer.train(Share(0, 0, 1))
        file.unlink()
        assert len(trainer.train(Share(0, 0, 1))) == 4


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (ONE_THREAD, "p2ptrain.train.inner.orthogonalised"),
        (SHARDED, "p2ptrain.train.inner.orthogonalised"),
        (SHARDED, "torch.distributed.all_to_all_single"),
    ],
    ids=["whole", "parts", "exchanged"],
)
def test_memory_that_runs_out_in_the_inner_step_is_told(
    dataset: TokenDataset, settings: DeviceConfig, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_short(tmp_path, monkeypatch, rank="1", what=what)
    with ranked(dataset, TWO, settings=settings, **LOCAL) as (trainer, _):
        trainer.train(Share(0, 0, 1))
        trainer.contribute(0)
        before = {name: each.clone() for name, each in trainer.recipe.state().items()}
        file.touch()
        with pytest.raises(RanksLostError, match=r"out of memory while taking a step.*; 2 ranks are started again"):
            trainer.train(Share(1, 0, 1))
        for name, each in trainer.recipe.state().items():
            assert torch.equal(each, before[name]), f"{name} has been changed"
        file.unlink()
        assert len(trainer.train(Share(1, 0, 1))) == 4


@pytest.mark.parametrize("step", [0, 3], ids=["within a step", "while tensors are brought back"])
@pytest.mark.parametrize("hears", [False, True])
def test_a_round_in_which_the_node_ends_never_counts_as_done(
    dataset: TokenDataset, step: int, hears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranked(dataset, TWO, **LOCAL) as (trainer, group):

        class Closing(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                """As if another thread ended the ranks, with answers that have come or before they do."""
                found = super().select(timeout) if hears else []
                group.close()
                return found

        steps = count()

        def end(_: StepResult) -> None:
            if next(steps) == step:
                monkeypatch.setattr(group_module.selectors, "DefaultSelector", Closing)

        with pytest.raises(StoppedError, match="the node ends"):
            trainer.train(Share(0, 0, 1), end)


def test_a_group_that_is_gone_keeps_no_memory(dataset: TokenDataset) -> None:
    trainer = make(dataset, "local", **LOCAL)
    memory = channel.RoundMemory(trainer.live, None)
    descriptor = memory.descriptor
    os.fstat(descriptor)
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_one_rank_removes_its_directory_where_the_node_dies_before_it_has_work() -> None:
    directory = Path(tempfile.mkdtemp(prefix="p2ptrain-ranks-", dir="/tmp"))  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / channel.SOCKET_NAME))
        listener.listen(1)
        with begin(directory, 1) as rank:
            listener.accept()[0].close()
            assert rank.wait(GONE_SECONDS) == 1
    assert not directory.exists()


def test_a_step_that_cannot_be_taken_leaves_the_ranks_as_they_are(tmp_path: Path) -> None:
    dataset = embedded(tmp_path)
    pieces = {path: path.read_bytes() for path in (dataset.directory / "pieces").iterdir()}
    for path, piece in pieces.items():
        path.write_bytes(bytes(len(piece)))
    with ranked(dataset, TWO, **LOCAL) as (trainer, group):
        with pytest.raises(DataError):
            trainer.train(Share(0, 0, 1))
        for path, piece in pieces.items():
            dataset.add_piece(bytes.fromhex(path.name), piece)
        there = group.pids
        trainer.train(Share(1, 0, 1))
        good = trainer.replica.weights.clone()
        trainer.replica.weights[0] = float("nan")
        with pytest.raises(TrainingError, match="the loss is not finite in step 0"):
            trainer.train(Share(2, 0, 1))
        trainer.replica.weights.copy_(good)
        trainer.train(Share(3, 0, 1))
        assert group.pids == there


def test_a_node_that_ends_waits_for_no_rank(dataset: TokenDataset) -> None:
    with ranked(dataset, TWO, **LOCAL) as (trainer, group):
        group.stop()
        with pytest.raises(StoppedError, match="the node ends"):
            trainer.train(Share(0, 0, 1))
        agent = psutil.Process(group.pids[0])
        agent.suspend()  # and so does not end
        began = perf_counter()
        LearnerThread(trainer).close()
        assert perf_counter() - began < 1.0
        agent.resume()


ORPHANS = """
import sys
from pathlib import Path
from p2ptrain.share import Share
from tests.helpers.ranks import ranked
from tests.helpers.trainer import embedded

with ranked(embedded(Path(sys.argv[1])), ["cpu", "cpu"], inner="adamw") as (trainer, group):
    trainer.train(Share(0, 0, 1))
    print(*group.pids, flush=True)
    while True:
        trainer.train(Share(1, 0, 1))
"""


def test_no_rank_outlives_a_node_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        there = [psutil.Process(int(pid)) for pid in node.stdout.readline().split()]
        assert len(there) == 3
        node.kill()
    _, alive = psutil.wait_procs(there, GONE_SECONDS)
    assert alive == []


def test_a_group_that_never_begins_is_given_up(dataset: TokenDataset) -> None:
    with ranked(dataset, TWO, patience=Patience(start_seconds=0.0), **LOCAL) as (trainer, group):
        assert isinstance(group, RankGroup)
        with pytest.raises(RanksLostError, match=r"no answer in time from rank 0 \(cpu, process 0\), rank 1 .*"):
            trainer.train(Share(0, 0, 1))
