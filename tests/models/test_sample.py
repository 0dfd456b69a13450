"""Samples: the same text for the same seed, from the agreed weights, with any tokenizer."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig, TokenizerConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.models.sample import SampleRequest, sample
from p2ptrain.share import Share
from tests.helpers.tokenizers import END, json_lines, prepared, tokenizer_json, written
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer, make

BYTES = BytesTokenizer()


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(ModelConfig(**TINY))
    initialise(model, 1)
    return model


def test_a_sample_begins_with_the_prompt_and_depends_on_the_seed_alone(model: Transformer) -> None:
    texts = [sample(model, BYTES, SampleRequest("hello", 30, seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("hello") for text in texts)
    torch.manual_seed(3)
    assert sample(model, BYTES, SampleRequest("hello", 30, 1)) == texts[0]


def test_at_temperature_0_each_token_is_the_likeliest(model: Transformer) -> None:
    tokens = [0, *b"abc"]
    for _ in range(5):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    expected = bytes(tokens[1:]).partition(b"\0")[0].decode(errors="replace")
    for seed in (1, 9):
        assert sample(model, BYTES, SampleRequest("abc", 5, seed, temperature=0)) == expected


@pytest.mark.parametrize("prompt", ["", "long " * 100, "日本"])
def test_any_prompt_will_do(model: Transformer, prompt: str) -> None:
    assert sample(model, BYTES, SampleRequest(prompt, 5, 1)).startswith(prompt)


def test_a_prompt_that_is_no_text_is_the_users_mistake(model: Transformer) -> None:
    for tokenizer in (BYTES, JsonTokenizer(tokenizer_json())):  # each would fail in its own way
        with pytest.raises(ConfigError, match=r"prompt: not text\. Write it in UTF-8"):
            sample(model, tokenizer, SampleRequest("a\udcff", 5, 1))


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"tokens": 0}, r"tokens: 0 is not valid\. Choose 1 to 4,096"),
        ({"tokens": 4_097}, r"tokens: 4097 is not valid"),
        ({"seed": -1}, r"seed: -1 is not valid\. Choose a number from 0 to 2\*\*63 - 1"),
        ({"seed": 2**63}, r"seed: \d+ is not valid"),
        ({"temperature": -1.0}, r"temperature: -1\.0 is not valid\. Choose 0, or 0\.01 to 100"),
        ({"temperature": 1e-40}, r"temperature: 1e-40 is not valid"),
        ({"temperature": float("nan")}, r"temperature: nan is not valid"),
        ({"temperature": float("inf")}, r"temperature: inf is not valid"),
    ],
)
def test_what_cannot_be_drawn_is_the_users_mistake(model: Transformer, wanted: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        sample(model, BYTES, SampleRequest("a", **({"tokens": 5, "seed": 1} | wanted)))


def test_the_extremes_can_be_drawn(model: Transformer) -> None:
    for temperature in (0.01, 100.0):
        assert sample(model, BYTES, SampleRequest("a", 3, 2**63 - 1, temperature)).startswith("a")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("weight", [math.nan, math.inf, 3e38])
def test_weights_that_diverged_write_nothing_and_it_is_said(weight: float, temperature: float) -> None:
    model = Transformer(ModelConfig(**TINY))
    initialise(model, 1)
    model.norm.weight.data.fill_(weight)
    with pytest.raises(DataError, match=r"a score of a next token is not finite: the run has diverged\. Begin another"):
        sample(model, BYTES, SampleRequest("a", 3, 1, temperature))


def test_a_model_may_rule_tokens_out(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    ruled = torch.full((256,), -math.inf)
    ruled[[*b"xy"]] = 0.0
    monkeypatch.setattr(model, "forward", lambda tokens: ruled.expand(*tokens.shape, 256))
    assert set(sample(model, BYTES, SampleRequest("", 20, 1))) == {"x", "y"}


def test_a_sample_ends_with_its_document(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.tensor([[*b"de\0fg"]])
    monkeypatch.setattr(model, "generate", lambda tokens, *_: torch.cat((tokens, drawn), dim=1))
    assert sample(model, BYTES, SampleRequest("abc", 5, 1)) == "abcde"


def test_a_trainer_samples_from_the_agreed_weights_and_not_from_its_own(tmp_path: Path) -> None:
    made = prepared(tmp_path / "data", written(tmp_path / "a.txt", "some text\n" * 5_000), held_out=Fraction(0))
    trainer = make(TokenDataset.open(made.path, made.digest), "local")
    before = trainer.sample(SampleRequest("some", 20, 1))
    trainer.train(Share(0, 0, 1))
    trainer.contribute(0)
    assert trainer.sample(SampleRequest("some", 20, 1)) == before
    assert trainer.sample(SampleRequest("some", 20, 1, temperature=0)) != before


def test_a_trainer_samples_what_it_has_learned(tmp_path: Path) -> None:
    made = prepared(tmp_path / "data", written(tmp_path / "a.txt", "abcdefgh" * 5_000), held_out=Fraction(0))
    trainer = make(TokenDataset.open(made.path, made.digest))
    for round_number in range(120):
        trainer.train(Share(round_number, 0, 1))
        payload = trainer.contribute(round_number)
        trainer.apply(round_number, [payload], {round_number: payload})
    assert trainer.sample(SampleRequest("abcdefghabcdefgh", 16, 1, temperature=0)) == "abcdefgh" * 4


def test_a_run_with_a_tokenizer_samples_through_it(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(tokenizer_json())
    file = json_lines(tmp_path / "a.jsonl", ["hello all of you " * 50] * 2)
    made = prepared(tmp_path / "data", file, tokenizer=tokenizer, held_out=Fraction(0))
    model = ModelConfig(**TINY, vocab_size=300)  # more than the tokenizer has: such tokens are drawn and have no text
    named = TokenizerConfig(kind="json", digest=tokenizer.digest)
    recipe = RecipeConfig(sequences_per_pass=2)
    run = RunConfig(name="test", model=model, tokenizer=named, recipe=recipe)
    trainer = Trainer(run, ONE_THREAD, TokenDataset.open(made.path, made.digest))
    text = trainer.sample(SampleRequest("hello", 50, 1))
    assert text.startswith("hello")
    assert END not in text
