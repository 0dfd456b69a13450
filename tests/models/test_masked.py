"""BERT fills in masked tokens: as transformers computes it, on masks that everybody draws, until an export."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from p2ptrain.config import RecipeConfig, RunConfig
from p2ptrain.config.hf import parameters_most
from p2ptrain.config.load import load_run_config
from p2ptrain.data.assignment import shard
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.packing import Masking, Packing
from p2ptrain.data.run_data import packing_of
from p2ptrain.data.tokenizer import BytesTokenizer
from p2ptrain.errors import DataError
from p2ptrain.models.export import export, load_model
from p2ptrain.models.given_weights import read_weights
from p2ptrain.models.kinds import build, exported_shapes, first_model, parameter_count
from p2ptrain.models.sample import SampleRequest
from p2ptrain.share import Share
from p2ptrain.train.begin import begin
from p2ptrain.train.live import LiveModel
from p2ptrain.train.memory import PassSettings, activations
from tests.helpers.export import NodeDirectory, weights_of
from tests.helpers.hf_models import hf_model
from tests.helpers.live_memory import peak_of_pass
from tests.helpers.trainer import ONE_THREAD, RECIPES, Trainer, swarm_round

ME = "ab" * 32
TOLERANCE = 2e-5  # by which fp32 differs from fp64 here, as for the built-in model
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
WITHOUT = dict.fromkeys(DROPOUT, 0.0)
MODEL = hf_model("bert", vocab_size=257, **WITHOUT)
EXAMPLE = Path(__file__).parents[2] / "examples" / "masked.toml"

pytestmark = [
    pytest.mark.hf,
    pytest.mark.usefixtures("transformers"),
    pytest.mark.filterwarnings("default"),  # what another package deprecates is not ours
]


class AllFilledIn(Packing):
    """Learns every token: tensors without data cannot say how many are drawn."""

    def loss(self, model: Any, sequences: torch.Tensor) -> torch.Tensor:
        logits = model(sequences[:, 1:]).flatten(0, 1)
        return functional.cross_entropy(logits.float(), sequences[:, 1:].flatten())


def run_of(seed: int = 1, **model: Any) -> RunConfig:
    recipe = RecipeConfig(name="local", sequences_per_pass=8, **(RECIPES["local"] | {"local_steps": 8}))
    config = hf_model("bert", vocab_size=257, **(WITHOUT | model))
    return RunConfig(name="test", seed=seed, model=config, recipe=recipe)


def batch_of(dataset: TokenDataset, count: int = 4) -> tuple[Packing, torch.Tensor]:
    packing, places = packing_of(run_of(), dataset), np.arange(count)
    return packing, packing.batch(dataset.batch(places, MODEL.sequence_length), places, 1)


# ---------------------------------------------------------------------------------------------------
# The model


def test_loss_and_gradients_are_those_of_transformers(dataset: TokenDataset, transformers: Any) -> None:
    model = first_model(MODEL, 3)
    packing, batch = batch_of(dataset)
    inputs, targets, _ = packing.split(batch)
    loss = packing.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    keys = transformers.AutoConfig.for_model(**json.loads(MODEL.config), pad_token_id=None)
    theirs = transformers.BertForMaskedLM(keys)
    assert theirs.load_state_dict(dict(model.named_parameters()), strict=False).unexpected_keys == []
    expected = theirs(input_ids=inputs, labels=torch.where(targets < 0, -100, targets)).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=TOLERANCE)
    expected.backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.pop(name), parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert ours == {}


def test_every_token_is_seen_from_both_sides() -> None:
    model = first_model(MODEL, 3).eval()
    tokens = torch.randint(1, 256, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 256
    with torch.no_grad():
        assert not torch.equal(model(tokens)[0, 0], model(changed)[0, 0]), "what comes after counts"


def test_a_pass_without_a_learned_token_is_nothing() -> None:
    model = build(MODEL)
    loss = model.packed_loss(torch.ones(1, 8, dtype=torch.int64), torch.full((1, 8), -1), None)
    assert loss.item() == 0


def test_parameters_and_memory_are_bounded_before_anything_is_built() -> None:
    for changes in ({}, {"tie_word_embeddings": False}, {"type_vocab_size": 16, "intermediate_size": 8}):
        config = hf_model("bert", vocab_size=257, **changes)
        assert config.hf is not None
        assert parameter_count(config) == sum(parameter.numel() for parameter in build(config).parameters())
        assert parameter_count(config) <= parameters_most(config.hf)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 1_024}
    for dropout in (WITHOUT, DROPOUT):
        config = hf_model("bert", sequence_length=64, **sizes, **dropout)
        for passes in (PassSettings(), PassSettings(autocast=True), PassSettings(checkpointing=True)):
            real, told = peak_of_pass(config, 4, passes, AllFilledIn()), activations(config, 4, passes)
            assert real <= told < 4 * real, f"{told / real:.2f} times the real use"


def test_tables_of_tokens_and_places_and_the_head_are_no_hidden_matrices() -> None:
    live = LiveModel(build(hf_model("bert", vocab_size=257, tie_word_embeddings=False)), autocast=False)
    outer = {name for name, hidden in zip(live.names, live.is_hidden_matrix, strict=True) if not hidden and "." in name}
    matrices = {name for name, shape in zip(live.names, live.shapes, strict=True) if len(shape) == 2}
    assert matrices & outer == {
        "cls.predictions.decoder.weight",
        *(f"bert.embeddings.{what}_embeddings.weight" for what in ("word", "position", "token_type")),
    }


# ---------------------------------------------------------------------------------------------------
# Training


def test_two_nodes_learn_to_fill_in_and_stay_the_same_bits(dataset: TokenDataset) -> None:
    trainers = [Trainer(run_of(), ONE_THREAD, dataset) for _ in range(2)]
    before = trainers[0].evaluate(16)
    for number in range(8):
        swarm_round(trainers, number)
        assert trainers[0].root() == trainers[1].root()
    assert trainers[0].evaluate(16) < before - 1
    assert trainers[0].evaluate(16) == trainers[1].evaluate(16), "the same masks"


@pytest.mark.parametrize("dropout", [WITHOUT, DROPOUT])
def test_a_training_that_is_repeated_draws_the_same_masks(dropout: dict[str, float], dataset: TokenDataset) -> None:
    def payload() -> bytes:
        trainer = Trainer(run_of(**dropout), ONE_THREAD, dataset)
        trainer.train(Share(4, 0, 1))
        return trainer.contribute(4)

    first = payload()
    torch.rand(7), np.random.rand(7)  # whatever else has drawn numbers since
    assert payload() == first


def test_what_a_node_has_learned_can_be_drawn_from_seed_round_and_places(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = run_of(5), []
    trainer = Trainer(run, ONE_THREAD, dataset)
    step = trainer.live.gradient_step

    def noted(number: int, batch: torch.Tensor, *rest: Any) -> Any:
        seen.append(batch.clone())
        return step(number, batch, *rest)

    monkeypatch.setattr(trainer.live, "gradient_step", noted)
    trainer.train(Share(6, 1, 3))
    places = shard(5, 6, 1, 3, run.recipe.round_sequences, dataset.sequences(MODEL.sequence_length))
    drawn = Masking(5, 256, 256, 0).draw(dataset.batch(places, MODEL.sequence_length), places, 6)
    assert torch.equal(torch.cat(seen), torch.from_numpy(drawn))


def test_a_step_learns_a_seventh_of_its_tokens(dataset: TokenDataset) -> None:
    run = run_of()
    results = Trainer(run, ONE_THREAD, dataset).train(Share(1, 0, 1))
    assert {result.tokens for result in results} == {8 * MODEL.sequence_length}
    assert 0.1 < sum(result.learned for result in results) / sum(result.tokens for result in results) < 0.2


def test_it_writes_no_text(dataset: TokenDataset) -> None:
    with pytest.raises(DataError, match="the run's model continues no text: only one that learned the next token"):
        Trainer(run_of(), ONE_THREAD, dataset).sample(SampleRequest("The ", 5, 0), lambda: None)


# ---------------------------------------------------------------------------------------------------
# Beginning and exporting


def test_an_export_is_loaded_and_gives_the_same_logits(
    tmp_path: Path, transformers: Any, dataset: TokenDataset
) -> None:
    run = begin(run_of(), dataset.directory, [ME]).run
    trainer = Trainer(run, ONE_THREAD, dataset)
    assert trainer.root().hex() == run.state.initial_root
    swarm_round([trainer], 0)
    weights = weights_of(NodeDirectory(tmp_path / "node", run).save(1, trainer.replica.weights), run)
    out = tmp_path / "out"
    export(out, weights, BytesTokenizer(), (3, 3))
    theirs, told = transformers.BertForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert {name: sorted(found) for name, found in told.items() if found} == {}, "nothing missing, nothing left over"
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    assert not (out / "generation_config.json").exists()
    ours = load_model(weights, torch.device("cpu"))
    packing, batch = batch_of(dataset)
    inputs, _, _ = packing.split(batch)
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=inputs).logits, ours(inputs), rtol=0, atol=TOLERANCE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode("a[MASK]ü") == [97, 256, *"ü".encode()]
    again = run.model.model_copy(update={"shapes": ""})
    assert torch.equal(read_weights(out, again), trainer.replica.weights), "a run can go on from it"
    [code] = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=out, capture_output=True, check=True,
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.stdout.startswith(b"The ")


def test_weights_of_a_first_bert_are_read_with_their_old_names_and_other_parts(tmp_path: Path) -> None:
    config = hf_model("bert")
    model = first_model(config, 7)
    named = {name: each.detach().clone() for name, each in model.named_parameters()}
    flat = torch.cat([named[name].flatten() for name, _ in exported_shapes(config)])
    old = {re.sub(r"weight$", "gamma", n) if "LayerNorm" in n else n: each for n, each in named.items()}
    old = {re.sub(r"bias$", "beta", n) if "LayerNorm" in n else n: each for n, each in old.items()}
    old |= {"bert.pooler.dense.weight": torch.ones(32, 32), "bert.pooler.dense.bias": torch.ones(32)}
    old |= {"cls.seq_relationship.weight": torch.ones(2, 32), "cls.seq_relationship.bias": torch.ones(2)}
    old["cls.predictions.decoder.weight"] = named["bert.embeddings.word_embeddings.weight"].clone()
    assert "bert.embeddings.LayerNorm.gamma" in old
    save_file(old, tmp_path / "model.safetensors")
    assert torch.equal(read_weights(tmp_path, config), flat)


def test_the_example_is_a_run_that_learns(dataset: TokenDataset) -> None:
    run = load_run_config(EXAMPLE)
    trainer = Trainer(run, ONE_THREAD, dataset)
    before = trainer.evaluate(32)
    assert before == pytest.approx(np.log(257), abs=0.3)
    for number in range(3):
        swarm_round([trainer], number)
    assert trainer.evaluate(32) < before - 1
