"""`p2ptrain generate`: daemon and checkpoint give the same text, and invalid requests are refused."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.config import RunConfig
from p2ptrain.daemon import life
from p2ptrain.daemon.life import Daemon
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import NoDaemonError, P2ptrainError, SilentDaemonError
from p2ptrain.models.built_in import Transformer
from p2ptrain.models.sample import PROMPT_BYTES_MAX, SampleRequest
from p2ptrain.node import control
from p2ptrain.node.control import Control, ask
from p2ptrain.share import Share
from tests.helpers.core import KEYS
from tests.helpers.export import Command, NodeDirectory, saved_node, state_of
from tests.helpers.tokenizers import prepared, written
from tests.helpers.trainer import ONE_THREAD, RECIPES, TINY, Trainer
from tests.helpers.web import STATUS, a_status
from tests.helpers.worker import worker_of

MORE = ("--tokens", "30")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def node(tmp_path: Path) -> NodeDirectory:
    return saved_node(tmp_path / "node")


# ---------------------------------------------------------------------------------------------------
# From a checkpoint


def test_the_seed_the_temperature_and_the_round_decide_the_text(p2ptrain: Command, node: NodeDirectory) -> None:
    def text(*arguments: str) -> str:
        status, out, err = p2ptrain("generate", "ab", *MORE, *node.place, *arguments)
        assert (status, out[:2], out[-1]) == (0, "ab", "\n")
        which = r"round (8|16) of x, root [0-9a-f]{16}, not certified: there is no log of its run here\n"
        assert re.fullmatch(which, err)
        return out

    usual = text()
    assert usual == text() == text("--seed", "0", "--temperature", "0.8") == text("--round", "16")
    assert len({usual, text("--seed", "1"), text("--temperature", "0"), text("--round", "8")}) == 4
    assert text("--temperature", "0") == text("--temperature", "0", "--seed", "7")


def test_a_copied_checkpoint_writes_the_same_without_the_node(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path
) -> None:
    p2ptrain("checkpoint", "export", tmp_path / "copy", *node.place)
    away = ("--checkpoint", tmp_path / "copy", "--data-dir", tmp_path / "nothing")
    assert p2ptrain("generate", "ab", *MORE, *away) == p2ptrain("generate", "ab", *MORE, *node.place)


def test_a_prompt_may_come_on_stdin(p2ptrain: Command, node: NodeDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(content: bytes) -> tuple[int, str, str]:
        stdin = io.BytesIO(content)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stdin))
        told = p2ptrain("generate", "-", *MORE, *node.place)
        assert stdin.tell() <= PROMPT_BYTES_MAX + 1, "whatever comes, no more is read"
        return told

    assert given("aß\n".encode()) == p2ptrain("generate", "aß\n", *MORE, *node.place)
    assert given(b"")[0] == 0
    assert given(b"x" * PROMPT_BYTES_MAX)[0] == 0
    for content, told in (
        (b"a\xff", "prompt: not text. Write it in UTF-8\n"),
        (b"a\xc3", "prompt: not text. Write it in UTF-8\n"),
        (b"x" * (PROMPT_BYTES_MAX + 1), "prompt: more than 8,192 bytes. "),
        ("ß".encode() * PROMPT_BYTES_MAX, "prompt: more than 8,192 bytes. "),
    ):
        status, out, err = given(content)
        assert (status, out, err[: len(told)]) == (2, "", told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("a", "--tokens", "0"), "tokens: 0 is not valid. Choose 1 to 4,096\n"),
        (("a", "--tokens", "4097"), "tokens: 4097 is not valid. Choose 1 to 4,096\n"),
        (("a", "--tokens", "many"), "Invalid value for '--tokens'"),
        (("a", "--seed", "-1"), "seed: -1 is not valid."),
        (("a", "--temperature", "nan"), "temperature: nan is not valid."),
        (("a", "--temperature", "-1"), "temperature: -1.0 is not valid."),
        (("a\udcff",), "prompt: not text. Write it in UTF-8\n"),
        (("x" * 8_193,), "prompt: more than 8,192 bytes. "),
        (("a", "--run", "none"), "--data-dir: no run none in "),
        (("a", "--checkpoint", "nowhere"), "--checkpoint: nowhere holds no checkpoint."),
        (("a", "--checkpoint", "nowhere", "--round", "8"), "--round: the directory holds one round only."),
        ((), "Missing argument 'TEXT'"),
    ],
)
def test_who_errs_is_told_what_to_do(
    arguments: tuple[str, ...], told: str, p2ptrain: Command, node: NodeDirectory
) -> None:
    status, out, err = p2ptrain("generate", *arguments, *node.place)
    assert (status, out) == (2, "")
    assert err.startswith(told)


def test_where_nothing_is_saved_it_is_said_so(p2ptrain: Command, node: NodeDirectory, tmp_path: Path) -> None:
    status, _, err = p2ptrain("generate", "a", "--round", "9", *node.place)
    assert (status, err) == (1, f"{node.checkpoints.directory}: no undamaged checkpoint of round 9\n")
    status, _, err = p2ptrain("generate", "a", "--data-dir", tmp_path / "nothing")
    assert (status, err.partition(".")[0]) == (2, f"--data-dir: no run in {tmp_path / 'nothing'}")
    node.save(24, state_of(node.run), root=b"r" * 32)
    status, out, err = p2ptrain("generate", "a", *node.place)
    assert (status, out, "not the weights of round 24" in err) == (1, "", True)


def test_a_terminal_is_not_commanded_by_a_model(
    p2ptrain: Command, node: NodeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "\x1b[2Jß\t\x9b\n"
    drawn = ("generate", prompt, "--tokens", "1", "--temperature", "0", *node.place)
    plain = p2ptrain(*drawn)[1]
    assert plain.startswith(prompt)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = p2ptrain(*drawn)[1]
    assert shown.startswith("\\x1b[2Jß\t\\x9b\n")


# ---------------------------------------------------------------------------------------------------
# From the daemon


class Lived:
    """A node that has trained, its checkpoint, and the part of a daemon that answers its owner."""

    def __init__(self, directory: Path) -> None:
        made = prepared(directory / "data", written(directory / "a.txt", "some text\n" * 5_000), held_out=Fraction(0))
        raw = {"name": "x", "model": TINY, "recipe": {"name": "local", "sequences_per_pass": 4, **RECIPES["local"]}}
        founders = [KEYS[0].hex()]
        run = RunConfig.model_validate(raw).sealed(manifest=made.digest, initial_root="2" * 64, founders=founders)
        self.trainer = Trainer(run, ONE_THREAD, TokenDataset.open(made.path, made.digest))
        self.trainer.train(Share(0, 0, 1))
        self.trainer.apply(0, [self.trainer.contribute(0)])
        self.node = NodeDirectory(directory / "node", run)
        self.node.save(1, self.trainer.replica.weights, root=self.trainer.root())
        self.trainer.train(Share(1, 0, 1))  # its own weights are others now
        self.trainer.contribute(1)
        self.worker = worker_of(self.trainer)
        has_begun = asyncio.Event()
        has_begun.set()
        driver: Any = SimpleNamespace(has_begun=has_begun, worker=self.worker)
        nothing: Any = None
        self.daemon = Daemon.__new__(Daemon)
        self.daemon.run, self.daemon.driver, self.daemon.edges = run, driver, nothing

    async def ask(self, **request: Any) -> dict[str, Any]:
        return await asyncio.to_thread(ask, self.node.directory, {"do": "sample", **request})


@pytest.fixture
def lived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lived]:
    monkeypatch.setattr(life, "status_of", lambda daemon: a_status(STATUS | {"run_id": daemon.run.run_id}))
    lived = Lived(tmp_path)
    yield lived
    lived.worker.close()


@asynccontextmanager
async def answering(lived: Lived) -> AsyncIterator[None]:
    with tempfile.TemporaryDirectory(prefix="p2p-") as runtime:  # pytest's own paths are too long for sockets
        made = Control(lived.node.directory, Path(runtime), lived.daemon.answer)
        await made.start()
        try:
            yield
        finally:
            await made.close()


async def test_the_daemon_and_its_checkpoint_write_the_same(lived: Lived, p2ptrain: Command) -> None:
    drawn = ("generate", "some ", *MORE, "--seed", "3", "--temperature", "1.5", *lived.node.place)
    own = lived.trainer.live.weights.clone()
    asked: list[dict[str, Any]] = []
    answer = lived.daemon.answer

    async def noted(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return await answer(request)

    lived.daemon.answer = noted  # type: ignore[method-assign]
    async with answering(lived):
        from_daemon = await asyncio.to_thread(p2ptrain, *drawn)
        assert [request["do"] for request in asked] == ["status", "sample"]
        forced = await asyncio.to_thread(p2ptrain, *drawn, "--round", "1")
        other_run = await asyncio.to_thread(p2ptrain, *drawn, "--run", "none")
        assert len(asked) == 3, "the round is asked of no daemon, and another run's is not asked for text"
        assert (await asyncio.to_thread(p2ptrain, *drawn, "--tokens", "0"))[0] == 2
        assert len(asked) == 3, "who errs is told so before anyone is asked"
    from_checkpoint = p2ptrain(*drawn)
    assert from_daemon[:2] == forced[:2] == from_checkpoint[:2]
    assert (from_daemon[2], forced[2]) == ("", from_checkpoint[2]), "the daemon's is the newest there is"
    assert (from_daemon[0], from_daemon[1][:5]) == (0, "some ")
    assert (other_run[0], "no run none in" in other_run[2]) == (2, True)
    assert not torch.equal(own, lived.trainer.replica.weights), "it wrote with the agreed weights"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": 4_097}, "tokens: 4097 is not valid"),
        ({"tokens": 0}, "tokens: 0 is not valid"),
        ({"tokens": True}, "sample: Expected `int`, got `bool`"),
        ({"tokens": 1.0}, "sample: Expected `int`, got `float`"),
        ({"tokens": "1"}, "sample: Expected `int`, got `str`"),
        ({"prompt": None}, "sample: Expected `str`, got `null`"),
        ({"prompt": "a\udcff"}, "prompt: not text"),
        ({"prompt": "ß" * 4_097}, "prompt: more than 8,192 bytes"),
        ({"seed": 2**63}, "seed: "),
        ({"temperature": float("nan")}, "temperature: nan is not valid"),
        ({"temperature": "hot"}, "sample: Expected `float`, got `str`"),
        ({"more": 1}, "sample: Object contains unknown field `more`"),
    ],
)
async def test_a_request_that_is_not_one_is_refused(change: dict[str, Any], told: str, lived: Lived) -> None:
    async with answering(lived):
        with pytest.raises(P2ptrainError, match=f"^{told}"):
            await lived.ask(**({"prompt": "a", "tokens": 2, "seed": 1} | change))
        with pytest.raises(P2ptrainError, match=r"^sample: Object missing required field `tokens`"):
            await lived.ask(prompt="a", seed=1)
        assert (await lived.ask(prompt="a", tokens=2, seed=1))["text"].startswith("a")


async def test_the_longest_prompt_fits_a_request(lived: Lived) -> None:
    async with answering(lived):
        prompt = "\x01" * PROMPT_BYTES_MAX  # each takes six bytes in JSON
        assert len(json.dumps(prompt)) < control.REQUEST_BYTES_MAX - 1_000
        assert (await lived.ask(prompt=prompt, tokens=1, seed=1))["text"].startswith(prompt)


async def test_what_would_hold_up_training_for_too_long_is_broken_off(
    lived: Lived, p2ptrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    generate = Transformer.generate

    def counted(*arguments: Any) -> Any:
        drawn.append(1)
        return generate(*arguments)

    monkeypatch.setattr(Transformer, "generate", counted)
    async with answering(lived):
        monkeypatch.setattr(life, "SAMPLE_SECONDS_MAX", -1.0)
        status, out, err = await asyncio.to_thread(p2ptrain, "generate", "a", *lived.node.place)
        assert (status, out) == (1, "")
        assert err.startswith("tokens: this many take more than ")
        assert err.endswith("Ask for fewer, or sample from a checkpoint with --round\n")
        monkeypatch.setattr(life, "SAMPLE_SECONDS_MAX", 60.0)
        lived.worker.stop()
        with pytest.raises(P2ptrainError, match="the daemon is stopping"):
            await lived.ask(prompt="a", tokens=2, seed=1)
    assert drawn == []


async def test_an_answer_that_takes_too_long_is_told_so(lived: Lived, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SAMPLE_SECONDS", 0.2)
    is_over = asyncio.Event()

    async def never(_: object) -> dict[str, Any]:
        await is_over.wait()
        return {}

    lived.daemon.answer = never  # type: ignore[method-assign]
    async with answering(lived):
        with pytest.raises(P2ptrainError, match=r"^busy: no answer within 0 s$") as raised:
            await lived.ask(prompt="a", tokens=1, seed=1)
        assert not isinstance(raised.value, NoDaemonError)


@pytest.mark.parametrize("hangs_at", ["status", "sample"])
async def test_a_daemon_that_hangs_is_told_of_with_the_checkpoint_that_writes_instead(
    hangs_at: str, lived: Lived, p2ptrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    [checkpoint] = lived.node.checkpoints.directory.iterdir()
    saved_at = time.time() - 7_260
    os.utime(checkpoint / "checkpoint.json", (saved_at, saved_at))
    asked: list[str] = []

    def hangs(data_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request["do"])
        if request["do"] == hangs_at:
            raise SilentDaemonError(f"the daemon in {data_dir} (pid 77) does not answer; it may be suspended")
        return {"run_id": lived.node.run.run_id}

    drawn = ("generate", "some ", *MORE, *lived.node.place)
    alone = p2ptrain(*drawn)
    monkeypatch.setattr("p2ptrain.cli.model.ask", hangs)
    status, out, err = p2ptrain(*drawn)
    assert (status, out, asked[-1]) == (0, alone[1], hangs_at)
    assert err == (
        f"the daemon in {lived.node.directory} (pid 77) does not answer; it may be suspended. "
        f"Using a checkpoint instead, saved 2 h 1 min ago:\n{alone[2]}"
    )
    assert "saved" not in alone[2], "where there is no daemon, it is what was asked for"


def test_drawing_stops_where_the_document_ends(monkeypatch: pytest.MonkeyPatch, lived: Lived) -> None:
    drawn = iter(b"de\0fg")

    def one(_: object, tokens: torch.Tensor, count: int, *__: object) -> torch.Tensor:
        assert count == 1
        return torch.cat((tokens, torch.tensor([[next(drawn)]])), dim=1)

    monkeypatch.setattr(Transformer, "generate", one)
    steps: list[int] = []
    assert lived.trainer.sample(SampleRequest("abc", 5, 1), on_token=lambda: steps.append(1)) == "abcde"
    assert (len(steps), list(drawn)) == (3, [*b"fg"])
