"""An export: the bytes of its files, and that damaged weights are never exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer as LibraryTokenizer

from p2ptrain.config import ModelConfig, RunConfig
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer
from p2ptrain.digest import digest, leaf_digests
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.exact.root import covered_pieces, octets, root_of_leaves, state_root
from p2ptrain.models.export import Weights, bytes_tokenizer, export, load_model, model_card, model_config
from p2ptrain.models.kinds import named_shapes, shapes_digest
from tests.helpers.export import BRANCH, HEAD, NodeDirectory, model_of, run_of, shapes_of, state_of, weights_of
from tests.helpers.tokenizers import END, tokenizer_json

FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "run.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
BYTES = BytesTokenizer()


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    run = run_of()
    return weights_of(NodeDirectory(tmp_path / "node", run).save(8, state_of(run)), run)


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


# ---------------------------------------------------------------------------------------------------
# Files


def test_the_weights_are_the_agreed_ones_under_llamas_names(weights: Weights, tmp_path: Path) -> None:
    export(tmp_path / "out", weights, BYTES, None)
    state, at = state_of(weights.run), 0
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        for name, shape in shapes_of(weights.run).items():
            tensor = file.get_tensor(f"model.{name}")
            assert (tensor.shape, tensor.dtype) == (shape, torch.float32)
            assert torch.equal(tensor.flatten(), state[at : at + tensor.numel()])
            at += tensor.numel()
        run_id, root = weights.run.run_id, weights.root.hex()
        assert file.metadata() == {"format": "pt", "run": run_id, "round": "8", "state_root": root}
    assert at == state.numel()
    assert names == {f"model.{name}" for name in shapes_of(weights.run)}, "the tied output matrix is not there twice"
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert begin % 8 == 0
    assert content[begin:] == weights.path.read_bytes()


def test_the_config_has_every_size_of_the_model(weights: Weights, tmp_path: Path) -> None:
    export(tmp_path / "out", weights, BYTES, None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == model_config(weights.run.model, 0)
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 24,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 4, "max_position_embeddings": 33, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": None, "dtype": "float32", "torch_dtype": "float32",
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    drawn = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    assert drawn == special | {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
    read = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert read == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 33,
        "split_special_tokens": True,
    }


def test_the_runs_tokenizer_file_is_copied_and_the_token_that_ends_a_document_named(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(tokenizer_json(fill=40, end="</s>"))
    run = run_of(
        model={**run_of().model.model_dump(), "vocab_size": 301},
        tokenizer={"kind": "json", "digest": tokenizer.digest},
    )
    weights = weights_of(NodeDirectory(tmp_path / "node", run).save(8, state_of(run)), run)
    export(tmp_path / "out", weights, tokenizer, None)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.file_bytes
    read = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (read["bos_token"], read["eos_token"]) == ("</s>", "</s>")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (301, tokenizer.end_of_document)
    assert tokenizer.digest in (tmp_path / "out" / "README.md").read_text()


def test_the_settings_beside_the_model_are_those_that_its_run_is_named_by(weights: Weights, tmp_path: Path) -> None:
    export(tmp_path / "out", weights, BYTES, None)
    assert digest("run id", (tmp_path / "out" / "run.json").read_bytes()).hex() == weights.run.run_id


def test_two_exports_of_a_round_are_the_same_bytes_and_others_may_read_them(weights: Weights, tmp_path: Path) -> None:
    export(tmp_path / "one", weights, BYTES, (3, 5))
    export(tmp_path / "deep" / "two", weights, BYTES, (3, 5))
    assert content_of(tmp_path / "one") == content_of(tmp_path / "deep" / "two")
    assert list(content_of(tmp_path / "one")) == FILES
    (tmp_path / "plain").write_text("")
    modes = {path.stat().st_mode for path in (tmp_path / "one").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_the_card_says_where_the_model_comes_from(weights: Weights) -> None:
    card = model_card(weights, (3, 5))
    run = weights.run
    for fact in (
        "# x, after 8 rounds",
        f"| run | x, `{run.run_id}` |",
        "| rounds applied | 8 |",
        f"| state root | `{weights.root.hex()}`, over all weights |",
        f"| branch | `{BRANCH.hex()}` |",
        f"| last manifest | `{HEAD.hex()}` |",
        "| members | 3 when it began; after this round 3 with a vote, 5 admitted |",
        f"| data manifest | `{run.data.manifest}` |",
        "| tokenizer | bytes: a token is a byte of UTF-8 |",
        "| recipe | local: mean update, 256 coefficients of 64 x 64, 10 steps a round, learning rate constant,",
        "AutoModelForCausalLM.from_pretrained(place)",
        "seen up to 33 tokens at once",
    ):
        assert fact in card
    adopted = model_card(Weights(weights.path, 1, "", run, 8, b"", b"", weights.root), None)
    assert "| branch | not known here |\n| last manifest | not known here |\n| members | 3 when it began |" in adopted
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_a_model_of_scripts_is_described_as_no_other_and_loads_as_its_card_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(kind="own", parameters=("one.bias 40", "one.weight 40 30"))
    names = {"manifest": "1" * 64, "initial_root": "2" * 64, "shapes": shapes_digest(named_shapes(config))}
    run = RunConfig(name="x", model=config).sealed(founders=["ab" * 32], **names)
    state = torch.arange(1_240.0)
    export(tmp_path / "out", weights_of(NodeDirectory(tmp_path / "node", run).save(8, state), run), BYTES, None)
    assert list(content_of(tmp_path / "out")) == ["README.md", "model.safetensors", "run.json", "tokenizer.json"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("# x, after 8 rounds")
    assert "| model | a model of scripts, 1,240 parameters, 256 tokens, sequences of 256 |" in card
    assert "transformers" not in card
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(30, 40)})
    monkeypatch.chdir(tmp_path / "out")
    exec(card.partition("```python\n")[2].partition("```")[0], {"model": model})
    assert torch.equal(model["one"].weight, state[40:].view(40, 30))


# ---------------------------------------------------------------------------------------------------
# Bytes as tokens

LIBRARY = LibraryTokenizer.from_buffer(bytes_tokenizer())


@given(st.text())
def test_any_text_gives_its_bytes_and_comes_back(text: str) -> None:
    encoded = LIBRARY.encode(text).ids
    assert encoded == list(text.encode())
    assert LIBRARY.decode(encoded) == LIBRARY.decode(encoded, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["", "\0", "Ā", "Ġ", " a  b ", "\r\n", "\ufeff", "\ud7ff\ue000\U0010ffff", END, "<0x00>"]
)
def test_odd_texts_give_their_bytes(text: str) -> None:
    assert LIBRARY.encode(text).ids == BYTES.encode(text).tolist()
    assert LIBRARY.decode(LIBRARY.encode(text).ids) == text


@given(st.binary())
def test_bytes_that_are_no_text_are_shown_as_the_node_shows_them(drawn: bytes) -> None:
    assert LIBRARY.decode(list(drawn)) == BYTES.decode(list(drawn))


def test_the_tokens_are_all_bytes_and_nothing_else() -> None:
    assert sorted(LIBRARY.get_vocab(with_added_tokens=True).values()) == list(range(256))
    assert LIBRARY.get_added_tokens_decoder() == {}
    assert bytes_tokenizer() == bytes_tokenizer()


# ---------------------------------------------------------------------------------------------------
# Damage


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: flipped(path, 0), r"state\.bin: damaged: its digest is not the checkpoint's"),
        (lambda path: flipped(path, -1), r"state\.bin: damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), r"state\.bin: damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), r"state\.bin: damaged"),
        (lambda path: path.unlink(), r"state\.bin: cannot be read"),
    ],
)
def test_weights_that_are_not_what_was_saved_leave_nothing_behind(
    damage: Any, why: str, weights: Weights, tmp_path: Path
) -> None:
    damage(weights.path)
    with pytest.raises(DataError, match=why):
        export(tmp_path / "out", weights, BYTES, None)
    with pytest.raises(DataError, match=why):
        load_model(weights, torch.device("cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["node"]


def test_weights_with_another_root_than_they_claim_are_refused(tmp_path: Path) -> None:
    run = run_of()
    weights = weights_of(NodeDirectory(tmp_path / "node", run).save(8, state_of(run), root=b"r" * 32), run)
    for use in (
        lambda: export(tmp_path / "out", weights, BYTES, None),
        lambda: load_model(weights, torch.device("cpu")),
    ):
        with pytest.raises(DataError, match=f"not the weights of round 8: their root is not {'72' * 32}"):
            use()
    assert [path.name for path in tmp_path.iterdir()] == ["node"]


def test_weights_of_another_size_than_the_runs_model_are_refused(tmp_path: Path) -> None:
    run = run_of()
    weights = weights_of(NodeDirectory(tmp_path / "node", run).save(8, state_of(run)[:-1]), run)
    why = r"state\.bin: [\d,]+ bytes, but the run's state has [\d,]+"
    with pytest.raises(DataError, match=why):
        export(tmp_path / "out", weights, BYTES, None)
    with pytest.raises(DataError, match=why), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", None)  # no room is made for what is not there
        load_model(weights, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_nothing_is_overwritten(kind: str, weights: Weights, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "link":
        out.symlink_to(tmp_path / "nowhere")
    elif kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
    with pytest.raises(ConfigError, match=r"out: it exists already\. Name a directory that does not exist yet"):
        export(out, weights, BYTES, None)


def test_an_export_removes_nothing_that_it_has_not_made(weights: Weights, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("somebody's own")
    export(tmp_path / "out", weights, BYTES, None)
    assert list(content_of(tmp_path / "out")) == FILES
    assert sorted(each.name for each in tmp_path.iterdir() if "out" in each.name) == ["out", "out.partial"]
    assert (tmp_path / "out.partial" / "thesis.txt").exists()


# ---------------------------------------------------------------------------------------------------
# Large states, whose root covers a sample

LARGE = {"dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 768, "sequence_length": 64}
SAMPLED = {"full_root_bytes_max": 2**20, "partial_root_leaves": 1, "full_root_rounds": 50}


def test_a_sampled_root_vouches_for_its_pieces_and_the_digest_for_the_rest(tmp_path: Path) -> None:
    run = run_of(model=LARGE, state=SAMPLED)
    node = NodeDirectory(tmp_path / "node", run)
    checkpoint = node.save(8, state_of(run))
    weights = weights_of(checkpoint, run)
    assert weights.covered is not None
    assert "over a sample of 1 MiB of the weights" in model_card(weights, None)
    export(tmp_path / "out", weights, BYTES, None)
    assert torch.equal(load_model(weights, torch.device("cpu")).norm.weight, model_of(run, state_of(run)).norm.weight)

    [covered] = weights.covered
    flipped(weights.path, 2**20 * (covered + 1) if covered == 0 else 0)
    with pytest.raises(DataError, match="damaged"):
        export(tmp_path / "two", weights, BYTES, None)
    assert export(tmp_path / "three", weights_of(checkpoint, run), BYTES, None) is None, "the root does not see it"
    flipped(weights.path, 2**20 * covered)
    with pytest.raises(DataError, match="not the weights of round 8"):
        export(tmp_path / "four", weights_of(checkpoint, run), BYTES, None)


@pytest.mark.parametrize("number", [8, 50])
def test_the_root_of_leaves_is_that_of_the_state(number: int) -> None:
    run = run_of(model=LARGE, state=SAMPLED)
    state = state_of(run)
    size = state.numel() * 4
    pieces = covered_pieces(size, run.state, number, HEAD)
    assert (pieces is None) == (number == 50)
    assert root_of_leaves(leaf_digests(octets(state)), size, pieces) == state_root(state, pieces)


def test_a_loaded_model_has_the_weights_and_trains_nothing(weights: Weights) -> None:
    model = load_model(weights, torch.device("cpu"))
    expected = model_of(weights.run, state_of(weights.run))
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(model(tokens), expected(tokens))
    assert [parameter for parameter in model.parameters() if parameter.requires_grad] == []
