"""Starting a run: its sealed config is the same each time, and an error names the key and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from p2ptrain.config import (
    AdaptConfig,
    AdmissionConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    StateConfig,
    TokenizerConfig,
)
from p2ptrain.data.dataset import TokenDataset, manifest_digest, read_manifest
from p2ptrain.data.tokenizer import JsonTokenizer
from p2ptrain.digest import leaf_digests, merkle_root
from p2ptrain.errors import ConfigError
from p2ptrain.train.begin import GivenWeights, NewRun, begin, begin_again
from tests.helpers.hf_models import hf_model
from tests.helpers.tokenizers import json_lines, prepared, tokenizer_json, written
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer

ME, OTHER = "ab" * 32, "cd" * 32
RUN = RunConfig(name="test", seed=3, model=ModelConfig(**TINY))


def run_of(**changes: Any) -> RunConfig:
    return RUN.model_copy(update=changes)


def text_set(directory: Path) -> tuple[Path, str]:
    made = prepared(directory / "data", written(directory / "a.txt", "a line of text\n" * 9_000), held_out=Fraction(0))
    return made.path, made.digest


def test_an_embedded_run_is_sealed_and_ready_to_train(tmp_path: Path) -> None:
    run, path, state, _ = begin(RUN, tmp_path / "data", [OTHER, ME])
    assert run.is_sealed
    assert path == tmp_path / "data"
    assert run.data.manifest == manifest_digest(read_manifest(path))
    assert run.state.initial_root == merkle_root(leaf_digests(state), len(state)).hex()
    assert run.admission.founders == (ME, OTHER)
    assert run == RUN.sealed(
        manifest=run.data.manifest, initial_root=run.state.initial_root, founders=run.admission.founders
    )
    dataset = TokenDataset.open(path, run.data.manifest)
    assert dataset.missing_anywhere() == []
    assert dataset.held_out_sequences(1_024) > 64
    trainer = Trainer(run, ONE_THREAD, dataset)
    assert (trainer.state_bytes(), trainer.root().hex()) == (state, run.state.initial_root)


def test_beginning_again_gives_the_same_run(tmp_path: Path) -> None:
    first = begin(RUN, tmp_path / "data", [ME])
    assert begin(RUN, tmp_path / "data", [ME]) == first
    assert begin(first.run, tmp_path / "data", [ME]) == first
    assert begin(first.run, tmp_path / "elsewhere", [ME], first.dataset) == first
    elsewhere = begin(RUN, tmp_path / "other", [ME])
    assert (elsewhere.run, elsewhere.state) == (first.run, first.state)
    assert begin(run_of(seed=4), tmp_path / "data", [ME]).run.run_id != first.run.run_id


def test_a_run_begins_with_data_of_its_own(tmp_path: Path) -> None:
    path, digest = text_set(tmp_path)
    begun = begin(run_of(data=DataConfig(manifest=digest)), tmp_path / "unused", [ME], path)
    assert (begun.dataset, begun.run.data.manifest) == (path, digest)
    assert not (tmp_path / "unused").exists()


def test_a_run_begins_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(tokenizer_json())
    file = json_lines(tmp_path / "a.jsonl", ["hello all of you " * 50])
    made = prepared(tmp_path / "data", file, tokenizer=tokenizer, held_out=Fraction(0))
    run = run_of(
        data=DataConfig(manifest=made.digest),
        tokenizer=TokenizerConfig(kind="json", digest=tokenizer.digest),
        model=ModelConfig(**TINY, vocab_size=tokenizer.vocab_size),
    )
    assert begin(run, tmp_path / "unused", [ME], made.path).run.is_sealed
    (made.path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=rf"tokenizer\.digest: .* lacks the tokenizer {tokenizer.digest}\. Copy the"):
        begin(run, tmp_path / "unused", [ME], made.path)
    with pytest.raises(ConfigError, match=r"^data\.manifest: embedded text is read as bytes.*--tokenizer FILE"):
        begin(run.model_copy(update={"data": DataConfig()}), tmp_path / "unused", [ME])


DIGEST = "0" * 64
MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "data that is named and not given": (
        lambda path: begin(run_of(data=DataConfig(manifest=DIGEST)), path / "new", [ME]),
        rf"^data\.manifest: names data set {DIGEST}, but none was given\. Give its directory with --data$",
    ),
    "data that is given and not named": (
        lambda path: begin(RUN, path / "new", [ME], path / "data"),
        r"^data\.manifest: is embedded, but a data set was given\. Write the digest .* or leave --data out$",
    ),
    "other data than is named": (
        lambda path: begin(run_of(data=DataConfig(manifest=DIGEST)), path / "new", [ME], path / "data"),
        r'^data\.manifest: .*data holds data set [0-9a-f]{64}\. Write manifest = "[0-9a-f]{64}", or give',
    ),
    "a directory without data": (
        lambda path: begin(run_of(data=DataConfig(manifest=DIGEST)), path / "new", [ME], path),
        r"^data\.manifest: .* holds no data set.*\. Give the directory that `p2ptrain data prepare` made with --data$",
    ),
    "a tokenizer that the data was not made with": (
        lambda path: begin(
            run_of(data=_named(path), tokenizer=TokenizerConfig(kind="json", digest=DIGEST)),
            path / "new",
            [ME],
            path / "data",
        ),
        r"^tokenizer: the data was made with tokenizer bytes\. Prepare",
    ),
    "sequences that the data is too short for": (
        lambda path: begin(
            run_of(data=_named(path), model=ModelConfig(**(TINY | {"sequence_length": 2**20}))),
            path / "new",
            [ME],
            path / "data",
        ),
        r"^model\.sequence_length: the data is shorter",
    ),
    "other first weights": (
        lambda path: begin(
            run_of(data=_named(path), state=StateConfig(initial_root=DIGEST)), path / "new", [ME], path / "data"
        ),
        r"^state\.initial_root: this machine makes different first weights \([0-9a-f]{64}\)\. Join the run",
    ),
    "other founders": (
        lambda path: begin(run_of(admission=AdmissionConfig(founders=(OTHER,))), path / "new", [ME]),
        r"^admission\.founders: names different founders\. Join the run",
    ),
    "a founder twice": (
        lambda path: begin(run_of(data=_named(path)), path / "new", [ME, ME], path / "data"),
        r"^admission: founders has the same key twice\. Remove one$",
    ),
    "a founder that is no key": (
        lambda path: begin(run_of(data=_named(path)), path / "new", ["me"], path / "data"),
        r'^admission\.founders: "me" is not valid\. Choose a list of at most 256, each 64 hexadecimal digits',
    ),
}


def _named(path: Path) -> DataConfig:
    return DataConfig(manifest=manifest_digest(read_manifest(path / "data")))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_key_and_the_fix_and_makes_nothing(tmp_path: Path, mistake: str) -> None:
    attempt, why = MISTAKES[mistake]
    text_set(tmp_path)
    with pytest.raises(ConfigError, match=why):
        attempt(tmp_path)
    assert not (tmp_path / "new").exists()


def test_data_that_is_not_all_there_is_refused(tmp_path: Path) -> None:
    path, digest = text_set(tmp_path)
    for piece in (path / "pieces").iterdir():
        piece.unlink()
    with pytest.raises(ConfigError, match=r"^data\.manifest: .* lacks 1 pieces\. Prepare it again, or copy the whole"):
        begin(run_of(data=DataConfig(manifest=digest)), tmp_path / "unused", [ME], path)


def test_a_run_goes_on_without_its_first_weights_and_with_a_piece_of_its_data_missing(tmp_path: Path) -> None:
    """Another machine draws other weights, and a piece comes from peers."""

    def refuse(model: ModelConfig) -> Tensor:
        raise AssertionError("the weights of a run that goes on are kept elsewhere")

    path, digest = text_set(tmp_path)
    wanted = run_of(data=DataConfig(manifest=digest), adapt=AdaptConfig(kind="lora", rank=4))
    run, _, _, base = begin(wanted, tmp_path / "unused", [ME], path, bases=tmp_path / "bases")
    for piece in (path / "pieces").iterdir():
        piece.unlink()
    given = GivenWeights(tmp_path, refuse, is_state=True)
    assert base is not None
    assert begin_again(run, tmp_path / "unused", path, given, tmp_path / "bases") == NewRun(run, path, b"", base)


def test_a_tokenizer_with_more_tokens_than_the_carried_model_is_refused_before_it_is_built(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(tokenizer_json(fill=50))
    file = json_lines(tmp_path / "a.jsonl", ["hello all of you " * 50])
    made = prepared(tmp_path / "data", file, tokenizer=tokenizer, held_out=Fraction(0))
    run = run_of(
        data=DataConfig(manifest=made.digest),
        tokenizer=TokenizerConfig(kind="json", digest=tokenizer.digest),
        model=hf_model("llama", vocab_size=tokenizer.vocab_size - 1),
    )
    what = f"model.vocab_size: the data has {tokenizer.vocab_size} tokens. The model has {tokenizer.vocab_size - 1}: "
    with pytest.raises(ConfigError, match=re.escape(what + "prepare the data with its own tokenizer.json")):
        begin(run, tmp_path / "unused", [ME], made.path)
