"""Several documents in a sequence, and words that are not learned."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.config import DataConfig, ModelConfig, RecipeConfig, RunConfig
from p2ptrain.data.chats import ChatTemplate
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.packing import Packing
from p2ptrain.data.prepare import prepare
from p2ptrain.data.run_data import check_data
from p2ptrain.errors import ConfigError
from p2ptrain.models.built_in import Model
from p2ptrain.models.kinds import first_model
from p2ptrain.train.live import LiveModel
from p2ptrain.train.memory import PassSettings, need_of
from tests.helpers.hf_models import CAUSAL, hf_model
from tests.helpers.tokenizers import written
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer, make, swarm_round

END = 0
KINDS = ["builtin", *(pytest.param(kind, marks=pytest.mark.hf) for kind in CAUSAL)]
FIRST, SECOND = [5, 9, 7, 7, 3], [8, 2, 9, 4, 6, 1]
PACKED = torch.tensor([[END, *FIRST, END, *SECOND, END]])
APART, MASKED = Packing(document_end=END), Packing(is_masked=True)


def model_of(kind: str) -> Model:
    if kind != "builtin":
        pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")
    model = first_model(ModelConfig(**TINY) if kind == "builtin" else hf_model(kind), 3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)  # first weights are so small that attention hardly matters
    return model


def alone(model: Model, document: list[int]) -> float:
    """Returns a document's summed loss, read by itself."""
    return float(model.loss(torch.tensor([[END, *document, END]]))) * (len(document) + 1)


# ---------------------------------------------------------------------------------------------------
# Documents


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_learned_as_if_it_were_alone(kind: str) -> None:
    model = model_of(kind)
    with torch.no_grad():
        together = float(model.packed_loss(*APART.split(PACKED))) * (PACKED.shape[1] - 1)
        assert together == pytest.approx(alone(model, FIRST) + alone(model, SECOND), rel=1e-5)
        assert float(model.loss(PACKED)) * (PACKED.shape[1] - 1) != pytest.approx(together, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_comes_from_another_document(kind: str) -> None:
    model, gradients = model_of(kind), []
    for before in (FIRST, [1, 1, 1, 1, 1]):
        inputs, targets, positions = APART.split(torch.tensor([[END, *before, END, *SECOND, END]]))
        targets = targets.clone()
        targets[:, : len(FIRST) + 1] = -1  # only the second is learned
        model.zero_grad()
        model.packed_loss(inputs, targets, positions).backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def kept_by(loss: Callable[[], torch.Tensor]) -> int:
    """Returns the bytes that a pass keeps for the way back."""
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = loss()
    assert result.requires_grad
    return sum(found.values())


def test_one_mask_serves_all_layers_and_is_in_the_estimate_of_memory() -> None:
    config = ModelConfig(**(TINY | {"layers": 6, "sequence_length": 256}))
    model, batch = first_model(config, 3), torch.randint(0, 256, (2, 257), generator=torch.Generator().manual_seed(1))
    mask = 2 * 256 * 256 * 4
    more = kept_by(lambda: model.packed_loss(*APART.split(batch))) - kept_by(lambda: model.loss(batch))
    assert mask <= more < 1.5 * mask
    runs = [RunConfig(name="x", model=config, data=DataConfig(documents=how)) for how in ("together", "apart")]
    together, apart = (need_of(run, PassSettings(sequences_per_pass=2)).activations for run in runs)
    assert mask < apart - together < 2 * mask


def test_positions_restart_at_each_end() -> None:
    batch = torch.tensor([[4, 5, END, 6, 7, END, END, 8, 9], [END, 1, 2, 3, 4, 5, 6, 7, 8]])
    _, _, positions = APART.split(batch)
    assert positions is not None
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_an_end_that_is_not_learned_parts_documents_too() -> None:
    inputs, targets, positions = Packing(is_masked=True, document_end=END).split(torch.tensor([[~3, 4, ~END, 5, 6]]))
    assert positions is not None
    assert inputs.tolist() == [[3, 4, END, 5]]
    assert targets.tolist() == [[4, ~END, 5, 6]]
    assert positions.tolist() == [[0, 1, 0, 1]]


@pytest.mark.parametrize("kind", ["plugin", "own"])
def test_only_models_that_read_tokens_keep_documents_apart(kind: str) -> None:
    own: Any = {"plugin": "images 1"} if kind == "plugin" else {"parameters": ("a 2 2",)}
    with pytest.raises(
        ValueError, match=f'data.documents = "apart" does not work with a model of kind {kind}: set "together"'
    ):
        RunConfig(name="x", model=ModelConfig(kind=kind, **own), data=DataConfig(documents="apart"))


# ---------------------------------------------------------------------------------------------------
# Words that are not learned


@pytest.mark.parametrize("kind", KINDS)
def test_only_words_that_are_learned_count(kind: str) -> None:
    model = model_of(kind)
    masked = PACKED.clone()
    masked[0, 3:9] = ~masked[0, 3:9]
    with torch.no_grad():
        logits = model(PACKED[:, :-1])[0].float().log_softmax(-1)
        kept = [place for place in range(13) if masked[0, place + 1] >= 0]
        expected = [-float(logits[place, PACKED[0, place + 1]]) for place in kept]
        assert 5 < len(kept) < 10
        assert float(model.packed_loss(*MASKED.split(masked))) == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_which_nothing_is_learned_moves_nothing(kind: str) -> None:
    model = model_of(kind)
    loss = model.packed_loss(*MASKED.split(~PACKED))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_a_word_weighs_the_same_in_whichever_pass_it_is_read() -> None:
    rng = np.random.default_rng(1)
    batch = torch.from_numpy(rng.integers(1, 250, (4, 33)))
    batch[0, 3:] = ~batch[0, 3:]  # this sequence has two words to learn, the others up to 32
    batch[2, 20:] = ~batch[2, 20:]
    gradients = []
    for sequences in (1, 2, 4):
        live = LiveModel(first_model(ModelConfig(**TINY), 3), autocast=False, packing=MASKED)
        recipe = RecipeConfig(sequences_per_pass=sequences, clip=Fraction(0))
        result = live.gradient_step(0, batch, [0, 1, 2, 3], recipe)
        gradients.append((result.loss, live.gradient))
    for loss, gradient in gradients[1:]:
        assert loss == pytest.approx(gradients[0][0], rel=1e-5)
        torch.testing.assert_close(gradient, gradients[0][1], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------
# A data set of chats

PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def chats(tmp_path: Path) -> TokenDataset:
    lines = [
        f'{{"messages": [{{"role": "user", "content": "What is {number}?"}}, '
        f'{{"role": "assistant", "content": "It is {number * number}, I think"}}]}}'
        for number in range(80)
    ]
    source = written(tmp_path / "chats.jsonl", "\n".join(lines))
    how = Reading(column="messages", chats=ChatTemplate(PLAIN_TEMPLATE, {}, {}, "test"))
    made = prepare(
        tmp_path / "data", [source], embedded=False, how=how, held_out=Fraction(1, 8), progress=lambda *_: None
    )
    return TokenDataset.open(made.path, made.digest)


def test_what_is_learned_of_chats_is_the_assistants_words(chats: TokenDataset) -> None:
    assert chats.is_masked
    length = 64
    batch = chats.batch(np.arange(chats.sequences(length)), length)
    learned = bytes(batch[batch >= 0].tolist()).decode()
    assert learned.startswith("It is ")
    assert "What" not in learned
    assert "assistant" not in learned
    assert "I think\n\0It is" in learned, "the end of the turn and of the chat are learned"


def test_a_swarm_learns_chats_and_not_the_questions(chats: TokenDataset) -> None:
    trainer = make(chats)
    before = trainer.evaluate(4)
    for round_number in range(60):
        swarm_round([trainer], round_number)
    assert trainer.evaluate(4) < before - 1
    with torch.no_grad():
        batch = torch.from_numpy(chats.held_out_batch(np.arange(2), 64))
        questions = ~batch  # the other way round
        wrong = float(trainer.live.model.packed_loss(*MASKED.split(questions)))
        right = float(trainer.live.model.packed_loss(*MASKED.split(batch)))
    assert wrong > right + 1


def test_documents_are_apart_where_the_run_says_so(chats: TokenDataset) -> None:
    run = RunConfig(name="x", model=ModelConfig(**TINY), data=DataConfig(documents="apart"))
    assert Trainer(run, ONE_THREAD, chats).live.packing == Packing(is_masked=True, document_end=0)
    assert make(chats).live.packing == MASKED


def test_a_model_that_would_learn_all_of_it_is_refused(chats: TokenDataset) -> None:
    run = RunConfig(name="x", model=ModelConfig(kind="own", parameters=("a 2 2",)))
    with pytest.raises(ConfigError, match="the data has a loss mask, which a model of kind own would ignore"):
        check_data(run, chats)
