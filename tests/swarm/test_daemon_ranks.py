"""Real daemons, of which one has two processes take its steps: to the others it is one node, whichever of them dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from random import Random
from time import monotonic

import psutil
import pytest

from tests.helpers.daemons import MANY_STEPS, TEST_SECONDS, DaemonSwarm, StartableDaemon, contributed, lending, p2ptrain

SETTINGS = Path(__file__).parents[2] / "examples" / "several_processes.toml"
LOST = "2 ranks are started again"
pytestmark = pytest.mark.timeout(TEST_SECONDS)


def ranks_of(node: StartableDaemon | subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Returns the processes that take a node's steps, or those that another machine lends it."""
    below = psutil.Process(node.pid).children(recursive=True)
    return [each for each in below if "p2ptrain.ranks.rank" in each.cmdline()]


@pytest.mark.parametrize("shard", ["false", "true"], ids=["whole", "parts"])
def test_the_end_of_a_rank_harms_neither_its_node_nor_the_run(swarm: DaemonSwarm, shard: str) -> None:
    run = swarm.directory / "run.toml"
    run.write_text(MANY_STEPS)
    first = swarm.add("first", "start", run).start().until_up()
    joins = "join", "--config", SETTINGS, "--bootstrap", first.address
    several = swarm.add("several", *joins, P2PTRAIN_DEVICE__THREADS="2", P2PTRAIN_DEVICE__SHARD=shard)
    several.start().until(lambda: len(several.status().get("roster", ())) == 2)
    several.until(lambda: contributed(several) >= 2)
    told = several.status()["ranks"]
    assert [(each["pid"], each["device"]) for each in told] == sorted((it.pid, "cpu") for it in ranks_of(several))
    several.until(lambda: min(each["tokens"] * each["seconds"] for each in several.status()["ranks"]) > 0)
    drawn = Random(1)
    for lost in range(1, 4):
        ranks = ranks_of(several)
        assert len(ranks) == 2
        several.pause(drawn.random())  # at any point of a round
        victim = drawn.choice(ranks)
        os.kill(victim.pid, signal.SIGKILL)
        killed, before, applied = monotonic(), contributed(several), several.applied
        several.until_applied(applied + 2)  # it votes and applies meanwhile
        several.until(lambda before=before: first.status() and contributed(several) > before + 1)
        sys.stderr.write(f"from SIGKILL of a rank to its node's next contribution: {monotonic() - killed:.1f} s\n")
        assert several.text.count(LOST) <= lost
    assert swarm.compared() > 6
    there, before = [*ranks_of(several), *psutil.Process(several.pid).children()], contributed(several)
    several.kill()
    _, alive = psutil.wait_procs(there, 30)
    assert alive == [], "a process without its daemon"
    several.start()  # and repeats what it has trained since its checkpoint
    several.until(lambda: contributed(several) > before + 1)
    assert first.status()["banned"] == {}, "nothing was said twice"
    for node in (several, first):
        node.leave()
    assert "came out differently" not in several.text
    (kept,) = (first.directory / "runs").iterdir()
    status, out, err = p2ptrain("audit", kept, seconds=TEST_SECONDS / 2)  # of hundreds of rounds
    assert status == 0, out + err
    swarm.look_at_logs()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
def test_the_end_of_another_machine_harms_neither_its_node_nor_the_run(swarm: DaemonSwarm) -> None:
    with socket.create_server(("127.0.0.2", 0)) as free:
        place = f"/ip4/127.0.0.2/tcp/{free.getsockname()[1]}"
    run = swarm.directory / "run.toml"
    run.write_text(MANY_STEPS)
    first = swarm.add("first", "start", run).start().until_up()
    spread = "join", "--nnodes", "2", "--rendezvous", place, "--bootstrap", first.address
    several = swarm.add("several", *spread)
    several.start().until_up()
    with lending(several, place) as lender:
        several.until(lambda: contributed(several) >= 2)
        assert [each["device"] for each in several.status()["ranks"]] == ["cpu", "cpu at 127.0.0.1"]
        lost = ranks_of(lender)
        assert [each["pid"] for each in several.status()["ranks"]] == [each.pid for each in (*ranks_of(several), *lost)]
        lender.kill()
    psutil.wait_procs(lost, 30)
    several.until_says("1 of 1 other machines are not there (127.0.0.1): waiting. On each run: p2ptrain lend " + place)
    applied = several.applied
    several.until_applied(applied + 2)  # it votes and applies, and waits for the machine
    before = contributed(several)
    with lending(several, place):
        several.until(lambda: first.status() and contributed(several) > before + 1)
        assert len(several.status()["ranks"]) == 2
    for node in (several, first):
        node.leave()
    assert swarm.compared() > 6
    swarm.look_at_logs()
