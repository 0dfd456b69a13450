"""Real daemons find a member whose contributions nobody trained, and lose nobody else."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.daemons import AGREEMENT, TEST_SECONDS, TINY_MODEL, DaemonSwarm, StartableDaemon, p2ptrain

RUN = f"""\
name = "audits"

{TINY_MODEL}
[recipe]
name = "local"
local_steps = 5
k = 64
sequences_per_pass = 16
inner_learning_rate = 0.01

{AGREEMENT}"""
# Python runs this before anything else in that process.
DOES_NOT_WORK = """\
from dataclasses import replace

import numpy as np

from p2ptrain.train.learner import Learner

honest, draw = Learner.contribute, np.random.default_rng(7)


def contribute(self, round_number, k=0):
    contribution = self.outer.unpack(honest(self, round_number, k))
    signs = draw.choice(np.array([-1, 1], contribution.values.dtype), contribution.values.shape)
    made = replace(contribution, values=np.abs(contribution.values) * signs)
    return self.outer.pack(made, self.outer.fragment_of(round_number))


Learner.contribute = contribute
"""
AUDITS = {"P2PTRAIN_AUDIT__SHARE": "1"}  # all that they can, so that it does not take an hour

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def standings(node: StartableDaemon) -> dict[str, str]:
    """Returns what a node shows of each peer."""
    return {each["peer_id"]: each["standing"] for each in node.ask("peers")["peers"]}


def measured(node: StartableDaemon, number: int, peer: str, *options: str) -> tuple[int, str, str]:
    return p2ptrain("audit", node.directory, "--contribution", str(number), peer, *options)


def test_a_member_that_contributes_noise_is_suspended_by_all_and_the_others_stay(
    swarm: DaemonSwarm, tmp_path: Path
) -> None:
    run, patch = swarm.directory / "audits.toml", tmp_path / "patch"
    run.write_text(RUN)
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(DOES_NOT_WORK)
    first = swarm.add("first", "start", run, **AUDITS).start().until_up()
    honest = [first, *(swarm.joiner(name, first.address, **AUDITS).start() for name in ("second", "third"))]
    lazy = swarm.joiner("lazy", first.address, PYTHONPATH=str(patch), **AUDITS).start()
    for node in (*honest, lazy):
        node.until(lambda node=node: len(node.status().get("roster", ())) == 4)
    liar = lazy.status()["peer_id"]
    for node in honest:
        node.until(lambda node=node: standings(node).get(liar) == "suspended", TEST_SECONDS / 2)
    shown = [standings(node) for node in honest]
    assert all(each == "counted" for found in shown for peer, each in found.items() if peer != liar)
    assert liar in first.status()["roster"], "it still votes"
    lazy.until(lambda: any(each["code"] == "suspended" for each in lazy.status().get("complaints", ())))
    status = first.status()
    assert (status["suspended"], status["is_audited"]) == (1, True)
    assert status["audits"] > 2
    assert swarm.compared() > 10
    for peer in (liar, honest[1].status()["peer_id"]):
        numbers = (first.applied - turn % 4 for turn in range(24))  # not every round took one of it
        tries = ((number, measured(first, number, peer, "--json")) for number in numbers)
        number, found = next((number, json.loads(out)) for number, (status, out, _) in tries if status == 0)
        assert set(found) == {"z", "strength", "sequences", "typical_z"}
        assert (abs(found["z"]) <= 2, found["sequences"]) == (True, 80)
    with suppress(shutil.Error):  # of files that the node has removed meanwhile
        shutil.copytree(
            first.directory, tmp_path / "copied", ignore=shutil.ignore_patterns("daemon.json", "control.sock")
        )
    status, again, error = p2ptrain("audit", tmp_path / "copied", "--contribution", str(number), peer, "--json")
    assert status == 0, error
    alone = json.loads(again)
    assert (alone["z"], alone["strength"]) == pytest.approx((found["z"], found["strength"]), abs=0.02)
    status, _, error = measured(first, 10**6, liar)
    assert (status, "round 1000000 is not kept here" in error) == (1, True), error
    status, _, error = measured(first, first.applied, "nobody")
    assert (status, "nobody is not the id of" in error) == (2, True), error
