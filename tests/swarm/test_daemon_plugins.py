"""Real daemons train the model, and use the recipe, of the example packages, which their owners have allowed."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.data.dataset import TokenDataset, manifest_digest, read_manifest
from p2ptrain.models import plugins
from tests.helpers.cli import p2ptrain
from tests.helpers.daemons import AGREEMENT, RUN, TEST_SECONDS, DaemonSwarm
from tests.helpers.plugins import EXAMPLES, MODEL, RECIPE, install_example

Command = Callable[..., tuple[int, str, str]]
ROUNDS, ACCURACY = 12, 0.85  # at chance it is 0.1; these many rounds gave 0.92 to 0.94
LENGTH, LABEL = 66, 64

pytestmark = [pytest.mark.timeout(TEST_SECONDS), pytest.mark.filterwarnings("default")]


def installed(swarm: DaemonSwarm, folder: str) -> str:
    """Installs an example, and returns the path of a Python that has it."""
    place = swarm.directory / "site"
    place.mkdir()
    install_example(place, folder)
    return os.pathsep.join([str(place), *filter(None, sys.path)])


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs commands in this process, which has imported everything already; what it may use is forgotten afterwards."""
    yield partial(p2ptrain, capsys)
    plugins.allow(())
    plugins.loaded.cache_clear()
    sys.modules.pop("p2ptrain_digits", None)


def test_a_model_of_ones_own_learns_to_read_digits(
    swarm: DaemonSwarm, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn, which has the images")
    own = {"PYTHONPATH": installed(swarm, "plugin-model"), "P2PTRAIN_PLUGINS__ALLOW": MODEL}
    monkeypatch.syspath_prepend(str(swarm.directory / "site"))
    runpy.run_module("p2ptrain_digits", run_name="__main__")
    (swarm.directory / "digits.jsonl").write_text(capsys.readouterr().out)
    dataset = _prepared(swarm.directory, command)
    file = swarm.directory / "digits.toml"
    example = (EXAMPLES / "plugin-model" / "digits.toml").read_text()
    file.write_text(example.replace("0" * 64, manifest_digest(read_manifest(dataset.directory))) + f"\n{AGREEMENT}")
    first = swarm.add("first", "start", file, "--data", dataset.directory, **own).start().until_up()
    nodes = [first, *(swarm.joiner(name, first.address, **own).start() for name in ("second", "third"))]
    _refuses_what_nobody_allowed(swarm, first.address, own["PYTHONPATH"])
    for node in nodes:
        node.until(lambda node=node: len(node.status().get("roster", ())) == 3)
    number = first.applied + ROUNDS
    for node in nodes:
        node.until_applied(number)
    assert swarm.compared() >= ROUNDS / 2
    for node in nodes:
        node.leave()
    monkeypatch.setenv("P2PTRAIN_PLUGINS__ALLOW", MODEL)
    _looks_at_what_it_has(nodes[1].directory, swarm.directory / "out", command)
    found = _accuracy(dataset, swarm.directory / "out")
    swarm.notes.append(f"{found:.0%} of the held-out digits are read right after {number} rounds and more")
    assert found > ACCURACY


def _prepared(directory: Path, command: Command) -> TokenDataset:
    """Makes the data set as the example says."""
    status, _, err = command("data", "prepare", directory / "data", directory / "digits.jsonl", "--held-out", "20")
    assert status == 0, err
    dataset = TokenDataset.open(directory / "data", manifest_digest(read_manifest(directory / "data")))
    assert dataset.sequences(LENGTH) + dataset.held_out_sequences(LENGTH) == 1_797 - 2, "the last of each lacks a token"
    return dataset


def _refuses_what_nobody_allowed(swarm: DaemonSwarm, address: str, path: str) -> None:
    careful = swarm.joiner("careful", address, PYTHONPATH=path, P2PTRAIN_PLUGINS__ALLOW="p2ptrain-digits 0.2.0").start()
    without = swarm.joiner("without", address, P2PTRAIN_PLUGINS__ALLOW=MODEL).start()
    assert (careful.until_ended(), without.until_ended()) == (1, 1)
    told = "model.plugin: this run takes its model from the package p2ptrain-digits 0.1.0, which is not allowed on this"
    assert told in careful.text
    assert "which is not installed. Install that one: pip install p2ptrain-digits==0.1.0" in without.text
    for node in (careful, without):
        assert not list(node.directory.glob("**/manifest*")), "nothing was fetched"


def _looks_at_what_it_has(directory: Path, out: Path, command: Command) -> None:
    """Uses the other commands that make the model."""
    status, _, err = command("export", out, "--data-dir", directory)
    assert status == 0, err
    assert {each.name for each in out.iterdir()} == {"README.md", "model.safetensors", "run.json", "tokenizer.json"}
    status, text, err = command("audit", directory)
    assert status == 0, text + err
    status, _, err = command("generate", "A", "--data-dir", directory)
    assert (status, "the run's model continues no text" in err) == (1, True), err


def _accuracy(dataset: TokenDataset, exported: Path) -> float:
    """Returns the share of the held-out images that the model reads right, loaded as its card says."""
    code = (exported / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    with chdir(exported):
        exec(code, names)
    images = torch.from_numpy(dataset.held_out_batch(np.arange(dataset.held_out_sequences(LENGTH)), LENGTH))
    return float((names["model"](images).argmax(1) == images[:, LABEL] - ord("0")).float().mean())


def _run_of_the_recipe(swarm: DaemonSwarm) -> Path:
    recipe = f'name = "local"\nplugin = "{RECIPE}"\nsettings = {{ noise = 0.1 }}\nlocal_steps = 4\nk = 64\n'
    head, _, rest = RUN.format(name="noisy").partition('name = "distro"\nk = 8\n')
    file = swarm.directory / "noisy.toml"
    file.write_text(head + recipe + rest.replace("passes_per_step = 8\nlearning_rate = 0.002\n", ""))
    return file


def test_a_recipe_of_ones_own_trains_and_a_node_that_was_killed_repeats_its_round(swarm: DaemonSwarm) -> None:
    own = {"PYTHONPATH": installed(swarm, "plugin-recipe"), "P2PTRAIN_PLUGINS__ALLOW": RECIPE}
    first = swarm.add("first", "start", _run_of_the_recipe(swarm), **own).start().until_up()
    second = swarm.joiner("second", first.address, **own).start()
    swarm.kill_while_it_trains(first, second)  # the same noise
    for node in (first, second):
        node.leave()


def test_a_plugin_that_fails_in_training_ends_its_node_with_a_line(swarm: DaemonSwarm) -> None:
    own = {"PYTHONPATH": installed(swarm, "plugin-recipe"), "P2PTRAIN_PLUGINS__ALLOW": RECIPE}
    module = swarm.directory / "site" / "p2ptrain_noise.py"
    module.write_text(module.read_text().replace("self.inner.step(self.rate)", "self.inner.step()"))
    node = swarm.add("failing", "start", _run_of_the_recipe(swarm), **own).start()
    assert node.until_ended() == 2
    told = "recipe.plugin: p2ptrain-noise 0.1.0 failed when it trained: TypeError: "
    assert told in node.text.strip().splitlines()[-1]
    assert "(p2ptrain_noise.py, line " in node.text
