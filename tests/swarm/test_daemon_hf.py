"""Real daemons train models of transformers, from weights that exist to an export that transformers loads."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.config import NodeConfig, StorageConfig
from p2ptrain.data.dataset import TokenDataset, manifest_digest, read_manifest
from p2ptrain.models.export import load_model
from p2ptrain.models.given_weights import read_weights
from p2ptrain.node.home import Home
from p2ptrain.node.saved import find_model
from tests.helpers.daemons import AGREEMENT, TEST_SECONDS, DaemonSwarm, StartableDaemon, p2ptrain
from tests.helpers.hf_models import (
    HELD_OUT_SEQUENCES,
    REAL_RUN,
    REAL_SECONDS,
    SMOLLM2,
    SOURCES,
    raw_config,
    save_smollm2,
    source_of,
)
from tests.helpers.scripts import script, until_both_contributed
from tests.helpers.tokenizers import tokenizer_json

RUN = f"""\
name = "mine"

[model]
kind = "transformers"
sequence_length = 64

[recipe]
local_steps = 2
sequences_per_pass = 4
inner_learning_rate = 0.01

{AGREEMENT}"""
# The same model in a script, from weights of its own.
SCRIPT = """\
import json, sys
import torch
import p2ptrain
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(sys.argv[3])))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with p2ptrain.join(sys.argv[2], model, optimizer, directory=sys.argv[1]) as swarm:
    for batch in swarm.batches():
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        swarm.step(loss)
"""
# A program on the same machine, whose Python has everything but transformers.
WITHOUT = """\
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else found(name, *rest)
"""

EXAMPLE = Path(__file__).parents[2] / "examples" / "masked.toml"

pytestmark = [pytest.mark.hf, pytest.mark.timeout(TEST_SECONDS), pytest.mark.filterwarnings("default")]


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")


def test_a_model_goes_on_from_its_weights_and_comes_back_as_a_model(swarm: DaemonSwarm, transformers: Any) -> None:
    weights, out = swarm.directory / "my-model", swarm.directory / "out"
    raw = raw_config("llama", max_position_embeddings=128, attention_dropout=0.1)
    before = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    before.save_pretrained(weights)
    (weights / "config.json").write_text(json.dumps(raw))  # as a user writes it: what is refused is left out
    file = swarm.directory / "mine.toml"
    file.write_text(RUN)
    first = swarm.add("first", "start", file, "--weights", weights).start().until_up()
    second = swarm.joiner("second", first.address).start()
    swarm.kill_while_it_trains(first, second)  # the same dropout
    _refuses_without_transformers(swarm, first.address)
    for node in (first, second):
        node.leave()
    status, _, err = p2ptrain("export", out, "--data-dir", second.directory)
    assert status == 0, err
    status, text, err = p2ptrain("generate", "The ", "--tokens", "5", "--data-dir", second.directory)
    assert (status, text.startswith("The ")) == (0, True), err
    after = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(after) is type(before)
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)
    first.start()  # the same command goes on
    first.until_says("run mine, id ")


def _refuses_without_transformers(swarm: DaemonSwarm, address: str) -> None:
    place = swarm.directory / "without"
    place.mkdir()
    (place / "sitecustomize.py").write_text(WITHOUT)
    path = ":".join([str(place), *sys.path])
    poor = swarm.joiner("poor", address, PYTHONPATH=path).start()
    assert poor.until_ended() == 1  # a bootstrap chose the run: the next start asks again
    assert "model.kind: this run trains a transformers model: pip install 'p2ptrain[hf]'" in poor.text
    assert not list(poor.directory.glob("**/manifest*")), "nothing was fetched"
    assert not list(poor.directory.glob("runs/*/checkpoints"))


def test_nodes_learn_to_fill_in_masked_words_and_an_audit_repeats_it(swarm: DaemonSwarm, transformers: Any) -> None:
    file, out = swarm.directory / "masked.toml", swarm.directory / "out"
    head, config = EXAMPLE.read_text().split("config = ")
    config = config.split("[recipe]")[0].replace(": 128,", ": 32,").replace('_layers": 4', '_layers": 1')
    recipe = (
        "[recipe]\nlocal_steps = 4\nsequences_per_pass = 16\ninner_learning_rate = 0.01\n\n[eval]\nevery_rounds = 1\n"
    )
    file.write_text(f"{head}config = {config}{recipe}\n{AGREEMENT}")
    first = swarm.add("first", "start", file).start().until_up()
    assert "first weights of the bert: drawn from seed 0, because no --weights are given" in first.text
    second = swarm.joiner("second", first.address).start()
    swarm.kill_while_it_trains(first, second)  # the same masks
    for node in (first, second):
        node.leave()
    (directory,) = (first.directory / "runs").iterdir()
    status, text, err = p2ptrain("audit", directory)
    assert status == 0, text + err
    status, text, err = p2ptrain("evaluate", "--sequences", "64", "--data-dir", second.directory)
    assert status == 0, err
    assert float(text.split()[2]) < math.log(257) - 0.5, text
    status, _, err = p2ptrain("generate", "The ", "--data-dir", second.directory)
    assert status != 0
    assert "the run's model continues no text" in err
    status, _, err = p2ptrain("export", out, "--data-dir", second.directory)
    assert status == 0, err
    assert transformers.BertForMaskedLM.from_pretrained(out).config.vocab_size == 257


def test_a_script_with_the_same_model_joins(swarm: DaemonSwarm, transformers: Any) -> None:
    weights, file, code = (swarm.directory / name for name in ("my-model", "mine.toml", "script.py"))
    raw = raw_config("llama", max_position_embeddings=128)
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw)).save_pretrained(weights)
    (weights / "config.json").write_text(json.dumps(raw))
    file.write_text(RUN)
    code.write_text(SCRIPT)
    first = swarm.add("first", "start", file, "--weights", weights).start().until_up()
    second = script(swarm, "second", first.address, json.dumps(raw), example=str(code))
    second.start()
    until_both_contributed(swarm, first, second)
    second.signal(signal.SIGINT)
    second.until_left()


def test_what_a_start_cannot_use_is_told_in_a_line(swarm: DaemonSwarm, transformers: Any) -> None:
    del transformers
    file = swarm.directory / "mine.toml"
    file.write_text(RUN)

    def refused(*arguments: str | Path) -> str:
        status, _, err = p2ptrain("start", file, *arguments, "--data-dir", swarm.directory / "a")
        assert status == 2, err
        return err.strip().splitlines()[-1]

    assert 'model: kind = "transformers" needs the config.json of a model. Write its text' in refused()
    assert "Leave it or --from out" in refused("--weights", "a", "--from", "b")
    place = swarm.directory / "hf"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(raw_config("llama", auto_map={"AutoModel": "evil.py"})))
    assert "config.json has auto_map, which p2ptrain does not accept. Remove it" in refused("--weights", place)
    (place / "config.json").write_text(json.dumps(raw_config("llama")))
    (place / "pytorch_model.bin").write_bytes(b"a pickle")
    assert "its weights are a pickle (pytorch_model.bin)" in refused("--weights", place)


def test_the_example_adapts_a_model_to_chats(swarm: DaemonSwarm, transformers: Any) -> None:
    model, chats = swarm.directory / "model", swarm.directory / "chats"
    raw = raw_config("llama", vocab_size=512, max_position_embeddings=512)
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw)).save_pretrained(model)
    (model / "config.json").write_text(json.dumps(raw))
    (model / "tokenizer.json").write_bytes(tokenizer_json())
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    chats.mkdir()
    turns = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four, as ever. " * 30}]
    (chats / "a.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 200)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}
    first = script(swarm, "first", str(model), str(chats), example="lora_chat.py", **own).start().until_up()
    second = swarm.joiner("second", first.address).start()
    until_both_contributed(swarm, first, second)
    assert second.status()["loss"] is not None
    first.leave()


# ---------------------------------------------------------------------------------------------------
# A real model

ROUNDS = 4


@pytest.mark.slow
@pytest.mark.timeout(2 * REAL_SECONDS)
def test_a_real_model_goes_on_learning_on_three_nodes(swarm: DaemonSwarm, transformers: Any) -> None:
    del transformers
    place = swarm.directory
    model, data = place / "model", place / "data"
    save_smollm2(model)
    options = ("--tokenizer", model / "tokenizer.json", "--held-out", "20")
    status, _, err = p2ptrain("data", "prepare", data, *map(source_of, SOURCES), *options)
    assert status == 0, err
    manifest = manifest_digest(read_manifest(data))
    dataset = TokenDataset.open(data, manifest)
    file = place / "smollm2.toml"
    run = REAL_RUN.format(tokenizer=dataset.tokenizer.digest, manifest=manifest, local_steps=2, rate=0.0005)
    file.write_text(run + "\n" + AGREEMENT)
    first = swarm.add("first", "start", file, "--data", data, "--weights", model).start()
    nodes = swarm.train(first, ("second", "third"), ROUNDS, REAL_SECONDS)
    before, after = (_held_out(dataset, weights, nodes[1]) for weights in (model, None))
    swarm.notes.append(f"held-out loss of {SMOLLM2} in {ROUNDS} rounds: {before:.3f} -> {after:.3f}")
    assert after < before


def _held_out(dataset: TokenDataset, given: Path | None, node: StartableDaemon) -> float:
    """Returns the loss of the given weights, or of those that the node has saved, on the same held-out sequences."""
    found = find_model(Home(NodeConfig(storage=StorageConfig(directory=str(node.directory)))))
    model = load_model(found.weights, torch.device("cpu"))
    if given is not None:
        flat, at = read_weights(given, found.run.model), 0
        for parameter in model.parameters():
            parameter.copy_(flat[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()
    length = found.run.model.sequence_length
    count = min(HELD_OUT_SEQUENCES, dataset.held_out_sequences(length))
    losses = [
        float(model.loss(torch.from_numpy(dataset.held_out_batch(np.array([place]), length)))) for place in range(count)
    ]
    return sum(losses) / len(losses)
