"""Real daemons in a run that lists several k: each sends as much as gets there in time, and as its owner lets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.daemons import AGREEMENT, TEST_SECONDS, TINY_MODEL, DaemonSwarm, p2ptrain

RUN = f"""\
name = "sizes"

{TINY_MODEL}
[recipe]
k = [8, 32, 128]
local_steps = 3

{AGREEMENT}
"""

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_contributions_grow_to_what_the_line_carries_and_the_owner_lets(swarm: DaemonSwarm) -> None:
    file: Path = swarm.directory / "run.toml"
    file.write_text(RUN)
    first = swarm.add("first", "start", file).start().until_up()
    sparing = swarm.joiner("sparing", first.address, P2PTRAIN_LIMITS__K_MAX="100").start()
    first.until(lambda: first.status().get("k") == 128)
    sparing.until(lambda: sparing.status().get("k") == 32)
    assert first.status()["payload_bytes"] > 2 * sparing.status()["payload_bytes"]
    swarm.kill_while_it_trains(first, sparing)
    assert p2ptrain("limit", "--data-dir", sparing.directory, "--k", "10")[0] == 0
    sparing.until(lambda: sparing.status().get("k") == 8)
    sparing.until_applied(sparing.applied + 2)
    for node in (sparing, first):
        node.leave()
    (kept,) = (first.directory / "runs").iterdir()
    status, out, err = p2ptrain("audit", kept)
    assert status == 0, out + err
    swarm.look_at_logs()
