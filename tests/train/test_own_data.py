"""Own data: what is shared of it, in which order it is trained on, and data that does not fit the run."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2ptrain.config import RunConfig
from p2ptrain.core.messages import content_of
from p2ptrain.data.dataset import TokenDataset, decode_manifest, manifest_digest, read_manifest
from p2ptrain.data.tokenizer import JsonTokenizer
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.node.work import Task
from p2ptrain.share import Share
from p2ptrain.train.begin import begin
from p2ptrain.train.own_data import OwnData, open_own, share_held_out
from tests.helpers.tokenizers import json_lines, prepared, tokenizer_json, written
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer
from tests.helpers.worker import worker_of

ME, OTHER = b"m" * 32, b"o" * 32
KEY = ME.hex()
CLOSED = {"policy": "allowlist", "keys": [KEY]}
RAW: dict[str, Any] = {
    "name": "test",
    "model": TINY,
    "recipe": {"name": "distro", "k": 32, "sequences_per_pass": 4},
    "data": {"source": "own"},
    "admission": CLOSED,
}
RUN = RunConfig.model_validate(RAW)


def text_of(word: str) -> str:
    return "".join(f"line {n} of the {word}\n" for n in range(9_000))


def own_set(directory: Path, word: str = "owner", held_out: Fraction = Fraction(1, 20)) -> TokenDataset:
    made = prepared(directory, written(directory.with_name(f"{word}.txt"), text_of(word)), held_out=held_out)
    return TokenDataset.open(made.path, made.digest)


@pytest.fixture
def own(tmp_path: Path) -> TokenDataset:
    return own_set(tmp_path / "own")


def a_trainer(run: RunConfig, shared: TokenDataset, own: OwnData | None) -> Trainer:
    return Trainer(run, ONE_THREAD, shared, own=own)


# ---------------------------------------------------------------------------------------------------
# What is shared


def test_only_the_held_out_split_is_shared_and_no_digest_of_the_rest(own: TokenDataset, tmp_path: Path) -> None:
    run, path, *_ = begin(RUN, tmp_path / "data" / "embedded", [KEY], own.directory)
    assert path.parent == tmp_path / "data"
    assert run.data.manifest == manifest_digest(read_manifest(path))
    shared = TokenDataset.open(path, run.data.manifest)
    length = run.model.sequence_length
    assert shared.held_out_sequences(length) == own.held_out_sequences(length) > 10
    everything = np.arange(shared.held_out_sequences(length))
    assert np.array_equal(shared.held_out_batch(everything, length), own.held_out_batch(everything, length))
    assert shared.sequences(length) == 0
    told = read_manifest(path)
    for piece in own.manifest.training.pieces:
        assert piece.encode() not in told
        assert not (path / "pieces" / piece).exists()
    assert {each.name for each in (path / "pieces").iterdir()} == set(own.manifest.held_out.pieces)


def test_beginning_again_gives_the_same_run_even_when_the_owner_has_other_data(tmp_path: Path) -> None:
    own, place = own_set(tmp_path / "own"), tmp_path / "data" / "embedded"
    first = begin(RUN, place, [KEY], own.directory)
    assert begin(RUN, place, [KEY], own.directory) == first
    later = own_set(tmp_path / "later", "later")
    assert begin(first.run, first.dataset, [KEY], later.directory) == first
    with pytest.raises(ConfigError, match=r"^--data: the run's nodes bring their own data.*`p2ptrain data prepare`"):
        begin(RUN, place, [KEY])


def test_a_tokenizer_is_shared_with_the_held_out_data(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(tokenizer_json())
    texts = json_lines(tmp_path / "a.jsonl", [f"hello all of you {n} " * 50 for n in range(40)])
    made = prepared(tmp_path / "own", texts, tokenizer=tokenizer, held_out=Fraction(1, 4))
    shared = share_held_out(TokenDataset.open(made.path, made.digest), tmp_path)
    assert shared.open_tokenizer().file_bytes == tokenizer.file_bytes


def test_data_without_a_held_out_sequence_begins_no_run(tmp_path: Path) -> None:
    own = own_set(tmp_path / "own", held_out=Fraction(0))
    with pytest.raises(ConfigError, match=r"^--data: .*no held-out sequence.*Prepare it with a larger --held-out$"):
        begin(RUN, tmp_path / "data" / "embedded", [KEY], own.directory)


def test_a_manifest_that_names_all_of_the_data_is_to_be_left_out(own: TokenDataset, tmp_path: Path) -> None:
    named = manifest_digest(own.manifest_bytes())  # as `data prepare` prints it
    run = RunConfig.model_validate(RAW | {"data": {"source": "own", "manifest": named}})
    with pytest.raises(ConfigError, match=r"^data\.manifest: names other data than what the nodes share.*Leave it out"):
        begin(run, tmp_path / "data" / named[:16], [KEY], own.directory)


def test_a_damaged_held_out_piece_begins_no_run(own: TokenDataset, tmp_path: Path) -> None:
    piece = own.directory / "pieces" / own.manifest.held_out.pieces[0]
    piece.write_bytes(bytes(piece.stat().st_size))
    with pytest.raises(DataError, match=r"held-out piece [0-9a-f]{64} of .*own is missing or damaged"):
        share_held_out(own, tmp_path / "data")
    assert not list((tmp_path / "data").glob("*/manifest.json"))


def test_a_shared_set_without_training_tokens_is_for_runs_of_own_data_alone(own: TokenDataset, tmp_path: Path) -> None:
    shared = share_held_out(own, tmp_path)
    assert decode_manifest(shared.manifest_bytes()).training.tokens == 0
    usual = RunConfig.model_validate(RAW | {"data": {}})
    with pytest.raises(ConfigError, match="the data is shorter than one sequence"):
        a_trainer(usual, shared, None)
    with pytest.raises(DataError, match="shared data has a training split"):
        a_trainer(RUN, own, OwnData(own, ME))
    assert a_trainer(usual, own, None).trained_on is own


# ---------------------------------------------------------------------------------------------------
# What is trained on


def test_a_node_trains_on_its_own_sequences_whatever_its_place(own: TokenDataset, tmp_path: Path) -> None:
    shared = share_held_out(own, tmp_path)
    one, other = (a_trainer(RUN, shared, OwnData(own, key)) for key in (ME, OTHER))
    assert one.positions_for(Share(3, 0, 1)).tolist() == one.positions_for(Share(3, 5, 9)).tolist()
    assert one.positions_for(Share(3, 0, 1)).tolist() != one.positions_for(Share(4, 0, 1)).tolist()
    assert one.positions_for(Share(3, 0, 1)).tolist() != other.positions_for(Share(3, 0, 1)).tolist()
    sequences = own.sequences(RUN.model.sequence_length)
    each = len(one.positions_for(Share(0, 0, 1)))
    drawn = [n for number in range(sequences // each) for n in one.positions_for(Share(number, 0, 1)).tolist()]
    assert len(set(drawn)) == len(drawn) <= sequences  # nothing twice in a pass


async def test_a_training_of_own_data_is_repeated_to_the_bit_in_another_place(
    own: TokenDataset, tmp_path: Path
) -> None:
    shared = share_held_out(own, tmp_path)
    elsewhere = own_set(tmp_path / "others", "others")
    payloads = []
    for key, data in ((ME, own), (ME, own), (OTHER, own), (ME, elsewhere)):
        worker = worker_of(a_trainer(RUN, shared, OwnData(data, key)), key)
        payloads.append(content_of((await worker.train(Task(Share(1, len(payloads), 5)))).payload))
        worker.close()
    assert payloads[0] == payloads[1]
    assert len(set(payloads)) == 3


def test_the_held_out_loss_is_that_of_the_shared_data(own: TokenDataset, tmp_path: Path) -> None:
    shared = share_held_out(own, tmp_path)
    losses = {
        a_trainer(RUN, shared, OwnData(data, ME)).evaluate() for data in (own, own_set(tmp_path / "b", "somewhere"))
    }
    assert len(losses) == 1


# ---------------------------------------------------------------------------------------------------
# Data that does not fit


def test_data_of_another_tokenizer_is_named_with_what_to_do(own: TokenDataset, tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(tokenizer_json())
    texts = json_lines(tmp_path / "a.jsonl", ["hello all of you " * 50] * 40)
    made = prepared(tmp_path / "other", texts, tokenizer=tokenizer, held_out=Fraction(1, 4))
    why = (
        rf"^--data: {made.path} was prepared with tokenizer {tokenizer.digest[:16]}, and the run has the bytes "
        r"tokenizer\. Prepare the data again without --tokenizer$"
    )
    with pytest.raises(ConfigError, match=why):
        open_own(RUN, made.path, ME)
    wanted = {"kind": "json", "digest": tokenizer.digest}
    run = RunConfig.model_validate(RAW | {"tokenizer": wanted, "model": TINY | {"vocab_size": tokenizer.vocab_size}})
    why = (
        rf"^--data: {own.directory} was prepared with the bytes tokenizer, and the run has tokenizer "
        rf"{tokenizer.digest[:16]}\. Prepare the data again with --tokenizer FILE, and the tokenizer\.json of whoever"
    )
    with pytest.raises(ConfigError, match=why):
        open_own(run, own.directory, ME)
    assert open_own(run, made.path, ME).dataset.tokenizer.digest == tokenizer.digest


def test_data_that_is_missing_incomplete_or_too_short_is_named_with_what_to_do(
    own: TokenDataset, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^--data: .*nowhere holds no data set.*as own_data in \[storage\]$"):
        open_own(RUN, tmp_path / "nowhere", ME)
    short = prepared(tmp_path / "short", written(tmp_path / "short.txt", "few words"), held_out=Fraction(0))
    with pytest.raises(ConfigError, match=r"^--data: .*too little text.* 64 tokens\. Prepare more$"):
        open_own(RUN, short.path, ME)
    (own.directory / "pieces" / own.manifest.training.pieces[0]).unlink()
    with pytest.raises(ConfigError, match=r"^--data: .* lacks 1 pieces\. Nobody else has them"):
        open_own(RUN, own.directory, ME)


def test_a_run_of_own_data_is_never_open() -> None:
    with pytest.raises(ValueError, match=r'data\.source = "own" does not work .*: set "invite" or "allowlist"'):
        RunConfig.model_validate({"name": "test", "data": {"source": "own"}})
    assert b'"source":"own"' in RUN.canonical()
