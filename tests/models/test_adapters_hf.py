"""Adapters beside models of transformers: what is exported computes the same there, merged and by the peft library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.config import AdaptConfig, RunConfig
from p2ptrain.data.tokenizer import BytesTokenizer
from p2ptrain.models.adapters import make_base
from p2ptrain.models.export import export, load_model, model_config
from p2ptrain.models.kinds import first_model, named_shapes, parameter_count, shapes_digest
from tests.helpers.export import NodeDirectory, weights_of
from tests.helpers.hf_models import CAUSAL, hf_model

TOLERANCE = 2e-5  # by which fp32 differs from fp64 here, as for the model without adapters
LORA = AdaptConfig(kind="lora", rank=4, alpha=8)

pytestmark = [
    pytest.mark.hf,
    pytest.mark.usefixtures("transformers"),
    pytest.mark.filterwarnings("default"),  # what another package deprecates is not ours
]


def sealed(model: Any, base: tuple[str, int]) -> RunConfig:
    run = RunConfig(name="test", model=model, adapt=LORA)
    shapes = shapes_digest(named_shapes(model, LORA))
    return run.sealed(manifest="1" * 64, initial_root="2" * 64, founders=["ab" * 32], shapes=shapes, base=base)


@pytest.mark.parametrize("kind", CAUSAL)
def test_an_export_computes_what_was_trained(kind: str, tmp_path: Path, transformers: Any) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: make test-hf installs it")
    model = hf_model(kind)
    whole = first_model(model, 3).eval()
    base = make_base(tmp_path / "bases", {name: each.detach() for name, each in whole.named_parameters()})
    run = sealed(model, (base.digest, base.size))
    state = torch.randn(parameter_count(model, LORA), generator=torch.Generator().manual_seed(2)) * 0.2
    weights = weights_of(NodeDirectory(tmp_path / "node", run).save(8, state), run, base=base.path)
    tokens = torch.randint(0, model.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    adapted = load_model(weights, torch.device("cpu"))
    with torch.no_grad():
        expected = adapted(tokens)
        assert not torch.allclose(whole(tokens), expected, atol=1e-2), "the adapters do something"

        export(tmp_path / "merged", weights, BytesTokenizer(), None)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=0, atol=TOLERANCE)

        (tmp_path / "base").mkdir()
        shutil.copy(base.path, tmp_path / "base" / "model.safetensors")
        (tmp_path / "base" / "config.json").write_text(json.dumps(model_config(model, 0)))
        export(tmp_path / "adapters", weights, BytesTokenizer(), None, only_adapters=True)
        before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(before, str(tmp_path / "adapters")).eval()
        torch.testing.assert_close(theirs(input_ids=tokens).logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_frozen_weights_stay_while_adapters_learn(kind: str) -> None:
    model = hf_model(kind)
    adapted = first_model(model, 3, adapt=LORA)
    frozen = {name: each.clone() for name, each in adapted.base().items()}
    tokens = torch.randint(0, model.vocab_size, (8, 33), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = adapted.loss(tokens)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.02
    assert all(torch.equal(each, frozen[name]) for name, each in adapted.base().items())
