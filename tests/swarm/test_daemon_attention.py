"""Real daemons: a node that is lost is named by the others, with what that means for the run and a next step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.daemons import TEST_SECONDS, DaemonSwarm, as_json, p2ptrain, swarm_in

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[DaemonSwarm]:
    with swarm_in(tmp_path) as swarm:
        yield swarm


def test_a_member_that_is_killed_is_what_to_look_at_first(swarm: DaemonSwarm) -> None:
    run = swarm.run_file("patient")
    run.write_text(f"{run.read_text()}absence_rounds_max = 10_000\n")  # rounds take less than a second
    first = swarm.add("first", "start", run).start().until_up()
    *_, lost = nodes = [swarm.joiner(name, first.address).start() for name in ("second", "lost")]
    for node in nodes:
        node.until_member()
    first.until_applied(nodes[-1].applied + 12)
    own = ("--data-dir", first.directory)
    status, said, _ = p2ptrain("swarm", *own)
    lines = said.splitlines()
    assert (status, lines[0], lines[-1]) == (0, "nothing to look at", "3 nodes, of which 3 have a seat")
    found = as_json("swarm", "--json", *own)
    assert all(each["taken_lately"] >= 5 for each in (*found["peers"], found["me"]))
    gone = lost.ask()["peer_id"]
    lost.kill()
    first.until(lambda: any(each["code"] == "quorum_near" for each in first.ask()["complaints"]))
    _, said, _ = p2ptrain("swarm", *own)
    assert said.startswith("look first at\n1. the quorum is nearly lost: 2 of 3 members are heard, and 2 have to be")
    assert f"1 node with a seat and not heard: …{gone[-8:]}" in said
    assert max(map(len, said.splitlines())) <= 80
