"""`p2ptrain evaluate`: the held-out loss of a saved model."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.config import NodeConfig, RunConfig, StorageConfig
from p2ptrain.data.chats import ChatTemplate
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.packing import PLAIN, Packing
from p2ptrain.data.prepare import DatasetSummary, prepare
from p2ptrain.data.tokenizer import JsonTokenizer
from p2ptrain.models.kinds import shapes_digest
from p2ptrain.node.home import Home
from p2ptrain.train.evaluate import Evaluation
from tests.helpers.export import Command, NodeDirectory, model_of, run_of, state_of
from tests.helpers.tokenizers import json_lines, prepared, tokenizer_json, written

LENGTH = 33
TEXTS = [f"{number} bottles of beer on the wall, {number} bottles of beer" for number in range(60)]


pytestmark = pytest.mark.usefixtures("one_thread")


def texts(path: Path) -> DatasetSummary:
    return prepared(path, json_lines(path.with_suffix(".jsonl"), TEXTS))


def chats(path: Path) -> DatasetSummary:
    line = (
        '{{"messages": [{{"role": "user", "content": "{0}?"}}, {{"role": "assistant", "content": "{0} bottles"}}]}}\n'
    )
    source = written(path.with_suffix(".jsonl"), "".join(line.format(number) for number in range(120)))
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {}, {}, "test")
    how = Reading(column="messages", chats=template)
    return prepare(path, [source], embedded=False, how=how, held_out=Fraction(1, 4), progress=lambda *_: None)


def node_with(
    tmp_path: Path, make: Callable[[Path], DatasetSummary] = texts, **sections: Any
) -> tuple[NodeDirectory, TokenDataset]:
    made = make(tmp_path / "made")
    run = RunConfig.model_validate(
        {**run_of(**sections).model_dump(), "data": {"manifest": made.digest, **sections.get("data", {})}}
    )
    config = NodeConfig(storage=StorageConfig(directory=str(tmp_path / "node")))
    place = Home(config).usual_dataset(made.digest)
    place.parent.mkdir(parents=True)
    shutil.move(made.path, place)
    node = NodeDirectory(tmp_path / "node", run)
    node.save(8, state_of(run, 1))
    node.save(16, state_of(run, 2))
    return node, TokenDataset.open(place, made.digest)


def loss_of(
    node: NodeDirectory, dataset: TokenDataset, packing: Packing = PLAIN, seed: int = 2, count: int = 0
) -> float:
    """Returns the loss by hand, a token at a time."""
    model, losses = model_of(node.run, state_of(node.run, seed)), []
    for place in range(count or dataset.held_out_sequences(LENGTH)):
        inputs, targets, positions = packing.split(torch.from_numpy(dataset.held_out_batch(np.array([place]), LENGTH)))
        for at in np.flatnonzero(targets[0] >= 0):
            alone = torch.full_like(targets, -1)
            alone[0, at] = targets[0, at]
            losses.append(float(model.packed_loss(inputs, alone, positions)))
    return float(np.mean(losses))


def said(out: str) -> tuple[float, int, int]:
    found = re.fullmatch(
        r"held-out loss ([\d.]+) nats a token(?: \(standard error ([\d.]+)\))?, perplexity ([\d.]+): "
        r"([\d,]+) tokens of ([\d,]+) sequences\n",
        out,
    )
    assert found is not None, out
    assert float(found[3]) == pytest.approx(np.exp(float(found[1])), rel=1e-3)
    return float(found[1]), int(found[4].replace(",", "")), int(found[5])


@torch.no_grad()
def test_the_loss_is_that_of_the_newest_checkpoint_on_all_held_out_text(p2ptrain: Command, tmp_path: Path) -> None:
    node, dataset = node_with(tmp_path)
    status, out, err = p2ptrain("evaluate", *node.place)
    count = dataset.held_out_sequences(LENGTH)
    assert status == 0, err
    assert said(out) == (pytest.approx(loss_of(node, dataset), abs=1e-4), LENGTH * count, count)
    assert "standard error" in out
    assert err.startswith("round 16 of x, root ")


@torch.no_grad()
def test_round_and_number_of_sequences_are_chosen(p2ptrain: Command, tmp_path: Path) -> None:
    node, dataset = node_with(tmp_path)
    status, out, err = p2ptrain("evaluate", "--round", "8", "--sequences", "3", *node.place)
    assert status == 0, err
    assert said(out) == (pytest.approx(loss_of(node, dataset, seed=1, count=3), abs=1e-4), LENGTH * 3, 3)
    assert "standard error" not in out, "one pass differs from no other"
    assert err.startswith("round 8 of x, root ")


@torch.no_grad()
def test_of_chats_only_what_is_learned_counts_and_documents_are_kept_apart(p2ptrain: Command, tmp_path: Path) -> None:
    node, dataset = node_with(tmp_path, chats, data={"documents": "apart"})
    status, out, err = p2ptrain("evaluate", *node.place)
    assert status == 0, err
    loss, tokens, count = said(out)
    packing = Packing(is_masked=True, document_end=0)
    assert loss == pytest.approx(loss_of(node, dataset, packing), abs=1e-4)
    assert tokens < LENGTH * count * 0.6


@torch.no_grad()
def test_another_data_set_may_be_named(p2ptrain: Command, tmp_path: Path) -> None:
    node, _ = node_with(tmp_path)
    made = chats(tmp_path / "other")
    status, out, err = p2ptrain("evaluate", "--data", made.path, *node.place)
    assert status == 0, err
    expected = loss_of(node, TokenDataset.open(made.path, made.digest), Packing(is_masked=True))
    assert said(out)[0] == pytest.approx(expected, abs=1e-4)


def test_what_is_missing_or_does_not_fit_is_told(p2ptrain: Command, tmp_path: Path) -> None:
    node, dataset = node_with(tmp_path)
    for name in dataset.manifest.held_out.pieces:
        (dataset.directory / "pieces" / name).unlink()
    status, out, err = p2ptrain("evaluate", *node.place)
    assert (status, out) == (1, "")
    count = dataset.held_out_sequences(LENGTH)
    assert err.startswith(f"only 0 of {count} held-out sequences are on this machine. Name a complete data set with")
    other = prepared(
        tmp_path / "other", json_lines(tmp_path / "o.jsonl", TEXTS), tokenizer=JsonTokenizer(tokenizer_json())
    )
    status, _, err = p2ptrain("evaluate", "--data", other.path, *node.place)
    assert status == 2
    assert err.startswith("tokenizer: the data was made with tokenizer json ")
    status, _, err = p2ptrain("evaluate", "--data", tmp_path / "nothing", *node.place)
    assert status == 1
    assert "holds no data set" in err
    tiny = prepared(tmp_path / "tiny", written(tmp_path / "t.txt", "short"), held_out=Fraction(0))
    status, _, err = p2ptrain("evaluate", "--data", tiny.path, *node.place)
    assert status == 1
    assert "the held-out split is shorter than one sequence of 34 tokens. Prepare" in err


def test_a_script_s_own_model_is_left_to_the_script(p2ptrain: Command, tmp_path: Path) -> None:
    made = texts(tmp_path / "made")
    sections = {"model": {"kind": "own", "parameters": ["a 2 3"]}, "data": {"manifest": made.digest}}
    run = RunConfig.model_validate({"name": "x", **sections}).sealed(
        manifest=made.digest, initial_root="2" * 64, founders=["3" * 64], shapes=shapes_digest((("a", (2, 3)),))
    )
    node = NodeDirectory(tmp_path / "node", run)
    node.save(8, torch.zeros(6))
    status, _, err = p2ptrain("evaluate", *node.place)
    assert status == 2, err
    assert "only the script that trains this model can compute its loss. Call swarm.evaluate(loss)" in err


def test_a_loss_beyond_all_floats_has_a_perplexity() -> None:
    assert Evaluation(1e4, math.nan, 1, 1).perplexity == math.inf
