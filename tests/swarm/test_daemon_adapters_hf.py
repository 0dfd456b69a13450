"""Real daemons adapt a real model to a folder of chats."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.config import NodeConfig, RunConfig, StorageConfig
from p2ptrain.data.dataset import TokenDataset, manifest_digest, read_manifest
from p2ptrain.data.run_data import packing_of
from p2ptrain.models.built_in import Model
from p2ptrain.models.export import load_model
from p2ptrain.models.kinds import first_model, without_adapters
from p2ptrain.models.sample import SampleRequest, sample
from p2ptrain.node.home import Home
from p2ptrain.node.saved import SavedModel, find_model
from p2ptrain.train.memory import need_of
from tests.helpers.daemons import AGREEMENT, DaemonSwarm, p2ptrain
from tests.helpers.hf_models import (
    HELD_OUT_SEQUENCES,
    REAL_RUN,
    REAL_SECONDS,
    SMOLLM2,
    SOURCES,
    save_smollm2,
)

ROUNDS = 6
ADAPTED = f"""\
documents = "apart"

[adapt]
kind = "lora"

{AGREEMENT}"""
MODULES = (
    *SOURCES, "asyncio", "builtins", "codecs", "collections", "concurrent.futures", "ctypes", "email.message", "enum",
    "functools", "gzip", "http.client", "http.cookiejar", "io", "itertools", "json", "logging", "mailbox", "math",
    "multiprocessing", "operator", "optparse", "os", "pickletools", "plistlib", "queue", "re", "selectors", "smtplib",
    "socket", "socketserver", "sqlite3", "ssl", "stat", "string", "subprocess", "tempfile", "textwrap", "threading",
    "time", "tokenize", "trace", "tracemalloc", "unittest", "urllib.parse", "urllib.request", "uuid", "warnings",
    "weakref", "xml.dom.minidom", "xml.etree.ElementTree", "xmlrpc.client", "zipfile", "zoneinfo",
)  # fmt: skip
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION = "<|im_start|>user\nWhat is shutil.copytree?<|im_end|>\n<|im_start|>assistant\n"

pytestmark = [
    pytest.mark.hf,
    pytest.mark.slow,
    pytest.mark.timeout(2 * REAL_SECONDS),
    pytest.mark.filterwarnings("default"),
]


def chats() -> list[dict[str, Any]]:
    """Makes chats of Python's own documentation: a function's or method's name, and the first paragraph about it."""
    found: dict[str, str] = {}  # by what is said, because much is inherited
    for module in MODULES:
        places = {module: importlib.import_module(module)}
        places |= {f"{module}.{name}": each for name, each in vars(places[module]).items() if inspect.isclass(each)}
        for place, owner in sorted(places.items()):
            for name, each in sorted(vars(owner).items()):
                if name[0] != "_" and inspect.isroutine(each) and (text := inspect.getdoc(each)):
                    found.setdefault(" ".join(text.split("\n\n")[0].split()), f"What is {place}.{name}?")
    turns = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for said, asked in found.items()
    ]
    return [{"messages": each} for each in turns]


def test_four_nodes_adapt_a_real_model_to_chats(swarm: DaemonSwarm) -> None:
    pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")
    place = swarm.directory
    given, template, data = (place / name for name in ("given", "template.jinja", "data"))
    save_smollm2(given)
    template.write_text(TEMPLATE)
    folder = place / "chats"
    folder.mkdir()
    (folder / "python.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats()))
    options = ("--chat", "--chat-template", template, "--tokenizer", given / "tokenizer.json", "--held-out", "20")
    status, _, err = p2ptrain("data", "prepare", data, folder, *options)
    assert status == 0, err
    manifest = manifest_digest(read_manifest(data))
    dataset = TokenDataset.open(data, manifest)
    file = place / "smollm2-lora.toml"
    run = REAL_RUN.format(tokenizer=dataset.tokenizer.digest, manifest=manifest, local_steps=4, rate=0.001)
    file.write_text(run + ADAPTED)

    first = swarm.add("first", "start", file, "--data", data, "--weights", given).start()
    nodes = swarm.train(first, ("second", "third", "fourth"), ROUNDS, REAL_SECONDS)

    found = find_model(Home(NodeConfig(storage=StorageConfig(directory=str(nodes[1].directory)))))
    before, after = _before(found), load_model(found.weights, torch.device("cpu"))
    losses = [_held_out(model, found.run, dataset) for model in (before, after)]
    plain = RunConfig(name="whole", model=without_adapters(found.run.model), recipe=found.run.recipe)
    lora, whole = need_of(found.run), need_of(plain)
    swarm.notes.append(f"{SMOLLM2}, {found.checkpoint.round} rounds: held-out loss {losses[0]:.3f} -> {losses[1]:.3f}")
    swarm.notes.append(f"a contribution has {lora.payload:,} bytes, of all weights {whole.payload:,}")
    for model in (before, after):
        swarm.notes.append(repr(sample(model, found.tokenizer, SampleRequest(QUESTION, 40, 0, 0.0))))
    assert losses[1] < losses[0]


def _before(found: SavedModel) -> Model:
    """Makes the model that the run began with."""
    return first_model(found.run.model, 0, adapt=found.run.adapt, base=found.base).eval()


@torch.no_grad()
def _held_out(model: Model, run: RunConfig, dataset: TokenDataset) -> float:
    """Returns the loss of the assistant's words in the first held-out sequences."""
    packing, length = packing_of(run, dataset), run.model.sequence_length
    count = min(HELD_OUT_SEQUENCES, dataset.held_out_sequences(length))
    total = learned = 0.0
    for place in range(count):
        batch = torch.from_numpy(dataset.held_out_batch(np.array([place]), length))
        total += float(packing.loss(model, batch)) * packing.learned(batch)
        learned += packing.learned(batch)
    return total / learned
