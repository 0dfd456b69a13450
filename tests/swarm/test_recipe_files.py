"""Each run of examples/recipes with real daemons: one catches up and is killed, all agree, an audit repeats it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from p2ptrain.config.load import load_run_config
from tests.helpers.daemons import TEST_SECONDS, TINY_MODEL, DaemonSwarm, p2ptrain

FILES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.toml"))
pytestmark = pytest.mark.timeout(TEST_SECONDS)


def tiny(path: Path) -> str:
    """Returns the file's run with a tiny model, few sequences and few steps, and quick seats."""
    head, recipe = path.read_text().split("[recipe]")
    recipe, *agreement = recipe.split("[admission]")[0].split("[agreement]")
    recipe = re.sub(r"(?m)^sequences_per_pass = .*$", "sequences_per_pass = 4", recipe)
    recipe = re.sub(r"(?m)^local_steps = .*$", "local_steps = 4", recipe)
    name = next(line for line in head.splitlines() if line.startswith("name"))
    late = re.sub(r"(?m)^(stall|settle)_seconds = .*\n", "", agreement[0]) if agreement else "\n"
    return f"""{name}

{TINY_MODEL}
[recipe]{recipe}
[agreement]{late}stall_seconds = 10
settle_seconds = 2

[admission]
probation_rounds = 1
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nodes_with_each_recipe_agree_on_every_bit(path: Path, swarm: DaemonSwarm) -> None:
    file = swarm.directory / "run.toml"
    file.write_text(tiny(path))
    first = swarm.add("first", "start", file).start().until_up()
    first.until_applied(3)  # so that the second has a state to fetch
    second = swarm.joiner("second", first.address).start()
    swarm.kill_while_it_trains(first, second)
    for node in (second, first):
        node.leave()
    (directory,) = (swarm.directory / "first" / "runs").iterdir()
    status, out, err = p2ptrain("audit", directory)
    assert status == 0, out + err
    assert re.search(r"rounds \d+ to \d+ give the certified roots", out), out


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_names_its_paper_first_and_is_a_run(path: Path) -> None:
    assert re.search(r"arXiv \d{4}\.\d{5}", path.read_text().split("\nname")[0])
    assert load_run_config(path).recipe
