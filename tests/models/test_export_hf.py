"""An export as transformers loads it: the same logits, the same integers for the same text.

Where this was written the logits are the same bits. Nobody promises that: Llama's norm is computed in other steps, and
the order in which sums are rounded depends on the processor and on torch's kernels. The tolerance is 2e-5, by which
fp32 differs from fp64 here; a wrong epsilon (1e-6 for 1e-5) or theta (9,999 for 10,000) gives ten times as much.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.config import RunConfig
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer, Tokenizer
from p2ptrain.models.export import export
from tests.helpers.export import NodeDirectory, model_of, run_of, state_of, weights_of
from tests.helpers.tokenizers import END, tokenizer_json

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")

TOLERANCE = 2e-5
SHAPES: dict[str, dict[str, Any]] = {
    "fewer kv heads": {"dim": 48, "layers": 3, "heads": 6, "kv_heads": 2, "ffn_dim": 80, "sequence_length": 32},
    "all kv heads": {"dim": 32, "layers": 1, "heads": 4, "kv_heads": 4, "ffn_dim": 24, "sequence_length": 16},
    "one kv head, odd vocabulary, other theta": {
        "dim": 40, "layers": 2, "heads": 5, "kv_heads": 1, "ffn_dim": 56, "sequence_length": 48, "vocab_size": 311,
        "rope_theta": 500,
    },
}  # fmt: skip
ODD = [
    "",
    "\0",
    "Ā",
    " a  b ",
    "\r\n\t",
    "\ufeff\ud7ff\ue000\U0010ffff",
    f"hello{END}",
    "<0x00> <s> </s>",
    "he'll n't .",
]

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]  # what another package deprecates is not ours


def exported(directory: Path, model: dict[str, Any], tokenizer: Tokenizer) -> tuple[RunConfig, Path]:
    run = run_of(model=model, tokenizer={"kind": tokenizer.kind, "digest": tokenizer.digest})
    weights = weights_of(NodeDirectory(directory / "node", run).save(8, state_of(run)), run)
    export(directory / "out", weights, tokenizer, (3, 3))
    return run, directory / "out"


def tokenizer_of(shape: dict[str, Any]) -> Tokenizer:
    return JsonTokenizer(tokenizer_json(fill=50)) if "vocab_size" in shape else BytesTokenizer()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_logits_are_the_same(shape: dict[str, Any], tmp_path: Path) -> None:
    run, out = exported(tmp_path, shape, tokenizer_of(shape))
    llama, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {name: sorted(found) for name, found in told.items() if found} == {}, "nothing missing, nothing left over"
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.float32}
    assert llama.lm_head.weight is llama.model.embed_tokens.weight
    model = model_of(run, state_of(run))
    size = (2, run.model.sequence_length)
    tokens = torch.randint(0, run.model.vocab_size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = model(tokens), llama(tokens).logits
    assert 2 < ours.abs().max() < 50, "weights that say something"
    torch.testing.assert_close(theirs, ours, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_likeliest_text_is_the_same(shape: dict[str, Any], tmp_path: Path) -> None:
    run, out = exported(tmp_path, shape, tokenizer_of(shape))
    llama = transformers.AutoModelForCausalLM.from_pretrained(out)
    start = torch.tensor([[llama.config.bos_token_id, 50, 60]])
    ours = model_of(run, state_of(run)).generate(start, 12, 0.0, torch.Generator())
    theirs = llama.generate(start, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert ours[0].tolist() == theirs[0].tolist()


def test_it_draws_from_all_tokens_as_the_node_does(tmp_path: Path) -> None:
    _, out = exported(tmp_path, SHAPES["fewer kv heads"], BytesTokenizer())
    drawn = transformers.AutoModelForCausalLM.from_pretrained(out).generation_config
    assert (drawn.do_sample, drawn.temperature, drawn.top_k, drawn.top_p) == (True, 0.8, 0, 1.0)
    assert (drawn.bos_token_id, drawn.eos_token_id, drawn.pad_token_id) == (0, 0, 0)


# ---------------------------------------------------------------------------------------------------
# Tokens


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Returns our model and transformers', by kind of tokenizer."""
    found: dict[str, tuple[Tokenizer, Any]] = {}
    for shape in (SHAPES["fewer kv heads"], SHAPES["one kv head, odd vocabulary, other theta"]):
        tokenizer = tokenizer_of(shape)
        _, out = exported(tmp_path_factory.mktemp(tokenizer.kind), shape, tokenizer)
        found[tokenizer.kind] = tokenizer, transformers.AutoTokenizer.from_pretrained(out)
    return found


def look_at(text: str, ours: Tokenizer, theirs: Any) -> None:
    tokens = ours.encode(text).tolist()
    assert theirs(text).input_ids == theirs.encode(text, add_special_tokens=False) == tokens
    assert theirs.decode(tokens) == ours.decode(tokens) == text


@pytest.mark.parametrize("kind", ["bytes", "json"])
@pytest.mark.parametrize("text", ODD)
def test_odd_texts_give_the_same_tokens_and_come_back(text: str, kind: str, loaded: dict[str, Any]) -> None:
    look_at(text, *loaded[kind])


@pytest.mark.parametrize("kind", ["bytes", "json"])
@settings(max_examples=50)
@given(text=st.text())
def test_any_text_gives_the_same_tokens_and_comes_back(text: str, kind: str, loaded: dict[str, Any]) -> None:
    look_at(text, *loaded[kind])


def test_what_a_tokenizer_is_asked_for_the_model_takes(loaded: dict[str, Any]) -> None:
    for kind, end in (("bytes", None), ("json", END)):
        ours, theirs = loaded[kind]
        assert set(theirs("hello")) == {"input_ids", "attention_mask"}
        assert (theirs.eos_token, theirs.bos_token) == (end, end)
        assert len(theirs) == ours.vocab_size


# ---------------------------------------------------------------------------------------------------
# The card


def test_what_the_card_says_to_do_works_offline(tmp_path: Path) -> None:
    _, out = exported(tmp_path, SHAPES["fewer kv heads"], BytesTokenizer())
    [code] = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", f"import torch\ntorch.manual_seed(1)\n{code}"], cwd=out, capture_output=True, check=True,
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.stdout.startswith(b"The ")
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 0
    assert b"Error" not in done.stderr
