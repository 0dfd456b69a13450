"""Tokens that are hidden and filled in: the same ones for everybody who trains a round, and by BERT's shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from p2ptrain.config import NodeConfig, RunConfig, TokenizerConfig
from p2ptrain.config.text import config_error
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.packing import Masking, Packing
from p2ptrain.data.run_data import check_data, packing_of
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer
from p2ptrain.errors import ConfigError
from tests.helpers.hf_models import hf_model, raw_config
from tests.helpers.tokenizers import prepared, tokenizer_json, written

MASK, VOCABULARY, END = 256, 256, 0
MASKING = Masking(7, MASK, VOCABULARY, END)
GOLDEN = {  # place: what is read there, what is learned
    16: (199, 17), 17: (MASK, 18), 21: (MASK, 22), 23: (87, 24), 26: (27, 27), 30: (129, 31), 39: (MASK, 40),
}  # fmt: skip
BERT = hf_model("bert", vocab_size=257)


def sequences(count: int, length: int = 128) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(1).integers(1, 256, (count, length + 1))


# ---------------------------------------------------------------------------------------------------
# The draw


def test_of_fifteen_percent_most_are_hidden_some_exchanged_and_some_left() -> None:
    given = sequences(2_000)
    inputs, targets = (MASKING.draw(given, np.arange(2_000), 3)[:, row] for row in (0, 1))
    kept, is_learned = given[:, :-1], targets >= 0
    assert np.array_equal(inputs[~is_learned], kept[~is_learned])
    assert np.array_equal(targets[is_learned], kept[is_learned])
    assert is_learned.mean() == pytest.approx(0.15, abs=0.003)
    read, wanted = inputs[is_learned], targets[is_learned]
    assert (read == MASK).mean() == pytest.approx(0.8, abs=0.01)
    exchanged = read[(read != MASK) & (read != wanted)]
    assert len(exchanged) / len(read) == pytest.approx(0.1, abs=0.01)
    assert set(exchanged.tolist()) == set(range(VOCABULARY)), "from all tokens of the tokenizer, and no others"
    assert is_learned.mean(axis=0).min() > 0.1, "in every place of a sequence"


def test_of_no_sequence_nothing_is_hidden() -> None:
    """Privacy draws none now and then."""
    assert MASKING.draw(sequences(0, 8), np.empty(0, np.int64), 3).shape == (0, 2, 8)


def test_a_draw_depends_on_the_seed_the_round_and_the_place_in_the_data_and_on_nothing_else() -> None:
    given, places = sequences(6), np.array([5, 9, 2**40, 0, 3, 9])
    whole = MASKING.draw(given, places, 3)
    for number in range(6):
        assert np.array_equal(
            MASKING.draw(given[number : number + 1], places[number : number + 1], 3)[0], whole[number]
        )
    drawn = [np.flatnonzero(each[1] >= 0).tolist() for each in whole]
    assert drawn[1] == drawn[5], "the same place"
    assert len({tuple(each) for each in drawn}) == 5
    others = (MASKING.draw(given, places, 4), Masking(8, MASK, VOCABULARY, END).draw(given, places, 3))
    for other in others:
        assert not np.array_equal(other[:, 1] >= 0, whole[:, 1] >= 0)


def test_held_out_masks_are_the_same_in_every_round_and_every_run() -> None:
    given, places = sequences(4), np.arange(4)
    first = MASKING.draw(given, places, None)
    assert np.array_equal(Masking(8, MASK, VOCABULARY, END).draw(given, places, None), first)
    assert not np.array_equal(MASKING.draw(given, places, 0), first)


def test_the_draw_is_the_one_that_every_machine_makes() -> None:
    given = np.arange(1, 42)[None]
    inputs, targets = MASKING.draw(given, np.array([36]), 3)[0]
    found = {int(place): (int(inputs[place]), int(targets[place])) for place in np.flatnonzero(targets >= 0)}
    assert found == GOLDEN
    assert len(inputs) == len(targets) == 40, "the last token begins the next sequence"


def test_an_end_and_what_is_only_read_are_never_learned() -> None:
    given = sequences(50)
    given[:, ::2], given[:, 1::4] = END, ~given[:, 1::4]
    inputs, targets = (MASKING.draw(given, np.arange(50), 1)[:, row] for row in (0, 1))
    kept = given[:, :-1]
    assert (targets[(kept == END) | (kept < 0)] == -1).all()
    assert (inputs[kept < 0] == ~kept[kept < 0]).all()
    assert (targets >= 0).any()


def test_a_batch_counts_what_is_read_and_what_is_learned() -> None:
    packing, given = Packing(masking=MASKING), sequences(3)
    batch = packing.batch(given, np.arange(3), 1)
    inputs, targets, positions = packing.split(batch)
    assert (batch.shape, inputs.shape, positions) == ((3, 2, 128), (3, 128), None)
    assert packing.tokens(batch) == 3 * 128 == Packing().tokens(torch.from_numpy(given))
    assert packing.learned(batch) == int((targets >= 0).sum()) > 30
    assert not packing.is_plain


# ---------------------------------------------------------------------------------------------------
# Runs


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        RunConfig(name="x", **({"model": BERT} | changes))
    return str(config_error(caught.value.errors(include_url=False)[0], RunConfig, NodeConfig))


def test_what_does_not_go_with_masked_tokens_is_refused_with_the_reason() -> None:
    assert "because the model reads a whole sequence at once" in refusal(data={"documents": "apart"})
    assert "because adapters are for causal models" in refusal(adapt={"kind": "lora"})
    assert "a model of 256 tokens: the mask is token 256" in refusal(model=hf_model("bert"))
    text = json.dumps(raw_config("llama"))
    assert "sees only what comes before" in refusal(
        model={"kind": "transformers", "objective": "masked", "config": text, "sequence_length": 32}
    )
    assert "sees only what comes before" in refusal(model={"objective": "masked"})
    assert "reads a text from both sides" in refusal(
        model={"kind": "transformers", "config": json.dumps(raw_config("bert")), "sequence_length": 32}
    )


def test_a_decoder_does_not_pass_as_an_encoder() -> None:
    with pytest.raises(ValidationError, match=r"is_decoder in config.json has a value that p2ptrain does not accept"):
        hf_model("bert", is_decoder=True)


def test_the_ids_of_runs_without_masks_stay_and_those_with_them_say_so() -> None:
    assert b'"objective"' not in RunConfig(name="x").canonical()
    run = RunConfig(name="x", model=BERT)
    assert b'"objective":"masked"' in run.canonical()
    assert RunConfig.from_canonical(run.canonical()) == run


def test_bytes_have_a_mask_beyond_them_and_a_file_has_its_own() -> None:
    assert BytesTokenizer().mask == BytesTokenizer().vocab_size
    assert JsonTokenizer(tokenizer_json()).mask is None
    assert JsonTokenizer(with_mask()).mask == 259


def with_mask() -> bytes:
    raw = json.loads(tokenizer_json())
    raw["added_tokens"].append(raw["added_tokens"][0] | {"id": 259, "content": "[MASK]"})
    return json.dumps(raw).encode()


def test_a_tokenizer_without_a_mask_is_refused_with_the_reason(tmp_path: Path) -> None:
    text = written(tmp_path / "a.txt", "Hello there, all of you. " * 100)
    for content in (with_mask(), tokenizer_json()):
        tokenizer = JsonTokenizer(content)
        made = prepared(tmp_path / str(len(content)), text, tokenizer=tokenizer)
        data = TokenDataset.open(made.path, made.digest)
        run = RunConfig(
            name="x",
            model=hf_model("bert", vocab_size=tokenizer.vocab_size),
            tokenizer=TokenizerConfig(kind="json", digest=tokenizer.digest),
        )
        if tokenizer.mask is not None:
            check_data(run, data)
            assert packing_of(run, data).masking == Masking(0, 259, 260, 0)
            continue
        with pytest.raises(ConfigError, match=r"model.objective: the run's tokenizer has no token that stands for a m"):
            check_data(run, data)
