"""Regions with real daemons: each agrees by itself, contributes to the world as one, and outlives its speaker."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2ptrain.errors import P2ptrainError
from p2ptrain.node.control import ask
from tests.helpers.daemons import LISTEN, TEST_SECONDS, TINY_MODEL, DaemonSwarm, StartableDaemon, p2ptrain

EXAMPLES = Path(__file__).parents[2] / "examples" / "recipes"
ROUNDS = 3  # of a region to one of the world
THERE = {"P2PTRAIN_REGION__LISTEN": LISTEN}

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture
def world(swarm: DaemonSwarm) -> Iterator[StartableDaemon]:
    """A node that has begun the world's run, and leaves training to the regions."""
    file = swarm.directory / "world.toml"
    file.write_text(tiny(EXAMPLES / "halos_world.toml", local_steps=3 * ROUNDS))
    node = swarm.add("world", "start", file).start().until_up()
    node.ask("pause")
    yield node
    swarm.look_at_logs()


def tiny(path: Path, local_steps: int, **admission: int) -> str:
    """Returns the file's run with a tiny model, few sequences and few steps, and quick seats."""
    text = re.sub(r"(?s)\[model\].*?\n\n", TINY_MODEL + "\n", path.read_text())
    text = re.sub(r"(?m)^local_steps = .*$", f"local_steps = {local_steps}", text)
    text = re.sub(r"(?m)^idle_round_seconds = .*$", "idle_round_seconds = 2", text)
    seats = "".join(f"{key} = {value}\n" for key, value in admission.items())
    return text + (f"\n[admission]\n{seats}" if seats else "")


def begun(swarm: DaemonSwarm, world: StartableDaemon, name: str) -> StartableDaemon:
    """Begins a region."""
    file = swarm.directory / f"{name}.toml"
    text = tiny(EXAMPLES / "halos.toml", local_steps=3, probation_rounds=1)
    told = {'name = "halos"': f'name = "{name}"', "rounds = 10": f"rounds = {ROUNDS}"}
    told['run = ""  # empty: this is no region'] = f'run = "{world.status()["run_id"]}"'
    for before, after in told.items():
        assert before in text
        text = text.replace(before, after)
    file.write_text(text)
    own = THERE | {"P2PTRAIN_REGION__BOOTSTRAP": world.address}
    return swarm.add(name, "start", file, **own).start().until_up()


def world_of(node: StartableDaemon) -> tuple[int, int]:
    """Returns the world's round that the node goes on from, and how often it has contributed for its region."""
    status = node.status()
    return status.get("world_round") or 0, status.get("counters", {}).get("contributions for the region", 0)


def other_node(node: StartableDaemon) -> dict[str, Any]:
    """Returns the status of a node's world node, empty if it does not answer."""
    with suppress(P2ptrainError):
        return ask(node.directory / "world", {"do": "status"}, seconds=20.0)
    return {}


def kill_both(node: StartableDaemon) -> None:
    """Kills a node and its world node, as a power cut does."""
    (other,) = (each for each in psutil.Process(node.pid).children() if "p2ptrain.daemon.script" in each.cmdline())
    node.signal(signal.SIGSTOP)  # so that it does not see the other end, and start another
    other.kill()
    node.kill()
    psutil.wait_procs([other])


def test_two_regions_train_as_one_and_outlive_a_speaker(swarm: DaemonSwarm, world: StartableDaemon) -> None:
    first = begun(swarm, world, "region")
    first.until(lambda: world_of(first)[0] >= 2)
    region = [first, *(swarm.joiner(name, first.address, **THERE).start() for name in ("second", "third"))]
    alone = begun(swarm, world, "alone")
    for node in region:  # the others were told in the region where the world is, and fetched its state
        node.until(lambda node=node: len(node.status().get("roster", ())) == 3)
    alone.until(lambda: world_of(alone)[1] >= 3)
    world.until(lambda: len(world.status()["roster"]) == 5)

    before = {node.name: world_of(node)[1] for node in region}
    world.until_applied(world.applied + 6)
    spoken = {node.name: world_of(node)[1] - before[node.name] for node in region}
    speaker = max(region, key=lambda node: spoken[node.name])
    assert spoken[speaker.name] >= 2, spoken
    kill_both(speaker)
    others = [node for node in region if node is not speaker]
    number, silent = world.applied, sum(world_of(node)[1] for node in others)
    world.until_applied(number + 4)
    others[0].until(lambda: sum(world_of(node)[1] for node in others) >= silent + 2)

    speaker.start().until_up()
    for node in (*region, alone):
        node.until(lambda node=node: other_node(node).get("applied_round", 0) >= number + 4)
        node.until(lambda node=node: world_of(node)[0] >= number + 4)
        told = other_node(node)
        swarm.compare(f"the world node of {node.name}", told)
        assert told["run_id"] == world.status()["run_id"]
    assert swarm.compared() > 10

    for node in (*region, alone, world):
        node.leave()
    for directory in (first.directory, alone.directory, first.directory / "world", world.directory):
        (kept,) = (directory / "runs").iterdir()
        status, out, err = p2ptrain("audit", kept)
        assert status == 0, out + err
        assert re.search(r"rounds \d+ to \d+ give the certified roots", out), out


def test_a_region_goes_on_without_the_world_and_comes_back_to_it(swarm: DaemonSwarm, world: StartableDaemon) -> None:
    node = begun(swarm, world, "region")
    node.until(lambda: world_of(node)[0] >= 2)
    world.stop()
    for other in psutil.Process(node.pid).children():
        if "p2ptrain.daemon.script" in other.cmdline():
            other.kill()
    node.until_says("not in the world's run; trying again in 5 s: the world node has ended")
    node.until_applied(node.applied + 3)
    world.cont()
    reached = world_of(node)
    node.until(lambda: world_of(node)[0] > reached[0] + 1)
    node.until(lambda: world_of(node)[1] > reached[1])
    assert other_node(node)["run_id"] == world.status()["run_id"]
    children = psutil.Process(node.pid).children()
    assert len(children) >= 2  # its world node, and a p2pd
    node.leave()
    _, alive = psutil.wait_procs(children, 20.0)
    assert alive == []
    world.leave()
