"""Real daemons train adapters: frozen weights are fetched once, and what comes out is a model, or its adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from p2ptrain.config import ModelConfig
from p2ptrain.models.kinds import exported_shapes, first_model
from tests.helpers.daemons import AGREEMENT, TEST_SECONDS, DaemonSwarm, p2ptrain
from tests.helpers.trainer import TINY

SIZES = "\n".join(f"{key} = {size}" for key, size in TINY.items())
RUN = f"""\
name = "adapted"

[model]
{SIZES}

[adapt]
kind = "lora"
rank = 4

[recipe]
local_steps = 2
sequences_per_pass = 4
chunk = 16
k = 64

{AGREEMENT}"""

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def weights_in(directory: Path) -> Path:
    """Saves the weights of a model, as a user has them."""
    directory.mkdir()
    model = ModelConfig(**TINY)
    named = zip(exported_shapes(model), first_model(model, 7).parameters(), strict=True)
    save_file({name: each.detach().bfloat16() for (name, _), each in named}, directory / "model.safetensors")
    return directory


def test_adapters_train_beside_weights_that_each_node_fetches_once(swarm: DaemonSwarm) -> None:
    place, file = swarm.directory, swarm.directory / "adapted.toml"
    file.write_text(RUN)
    weights = weights_in(place / "weights")
    first = swarm.add("first", "start", file, "--weights", weights).start().until_up()
    second = swarm.joiner("second", first.address).start()
    swarm.kill_while_it_trains(first, second)
    [mine], [theirs] = (list((node.directory / "bases").iterdir()) for node in (first, second))
    assert (mine.name, mine.read_bytes()) == (theirs.name, theirs.read_bytes())
    assert second.text.count("fetching the weights that the run adapts: ") == 1, "not again after the kill"
    assert mine.stat().st_size < 1.2 * (weights / "model.safetensors").stat().st_size, "two bytes a number there, too"

    second.leave()
    content = bytearray(theirs.read_bytes())
    content[-3] ^= 1
    theirs.write_bytes(content)
    status, _, err = p2ptrain("export", place / "out", "--data-dir", second.directory)
    assert (status, "damaged, or missing" in err) == (1, True), err
    second.start()
    second.until_says("damaged: fetching it again")
    second.until_member()
    assert theirs.read_bytes() == mine.read_bytes()
    second.leave()
    first.leave()

    for out, more in (("merged", []), ("adapters", ["--adapter"])):
        status, _, err = p2ptrain("export", place / out, *more, "--data-dir", second.directory)
        assert status == 0, err
    merged, before = (load_file(place / out / "model.safetensors") for out in ("merged", "weights"))
    changed = {name.rpartition(".")[0] for name in merged if not merged[name].equal(before[name].float())}
    learned = {
        name.removeprefix("base_model.model.") for name in load_file(place / "adapters/adapter_model.safetensors")
    }
    assert changed == {name.rpartition(".lora_")[0] for name in learned}, "nothing but what has adapters"
    status, text, err = p2ptrain("generate", "The ", "--tokens", "5", "--data-dir", second.directory)
    assert (status, text.startswith("The ")) == (0, True), err
    status, text, err = p2ptrain("evaluate", "--data-dir", first.directory)
    assert (status, "held-out loss" in text) == (0, True), err

    first.start()  # the same command goes on
    first.until_says("continuing from the checkpoint")


def test_what_an_adapter_run_cannot_use_is_told_in_a_line(swarm: DaemonSwarm) -> None:
    file = swarm.directory / "adapted.toml"
    weights = weights_in(swarm.directory / "weights")

    def refused(text: str) -> str:
        file.write_text(text)
        status, _, err = p2ptrain("start", file, "--weights", weights, "--data-dir", swarm.directory / "a")
        assert status == 2, err
        return err.strip().splitlines()[-1]

    assert "adapt.rank: 40 is more than layers.0." in refused(RUN.replace("rank = 4", "rank = 40"))
    assert "adapt.targets: the model has no matrix wq. Choose from " in refused(
        RUN.replace("rank = 4", 'targets = ["wq"]')
    )
    described = 'adapt: adapters are described, but kind is "none". Set kind = "lora", or remove the other keys'
    assert described in refused(RUN.replace('kind = "lora"', ""))
    other = f'base = "{"0" * 64}"\nbase_bytes = 5'
    assert "adapt.base_bytes: 5 bytes are not the size of" in refused(RUN.replace("rank = 4", f"rank = 4\n{other}"))
