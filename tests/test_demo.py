"""`p2ptrain demo`: real daemons from start to end, one killed on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.daemon.demo import Demo, DemoNode


@pytest.mark.timeout(240)
def test_a_swarm_trains_loses_a_node_gets_it_back_and_agrees_on_every_root(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "p2ptrain", "demo", "--nodes", "3", "--rounds", "40", "--keep", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "all 3 are members" in done.stdout
    assert "node 3 killed (SIGKILL)" in done.stdout
    assert "node 3 is back" in done.stdout
    assert "rounds compared between 3 nodes, 0 differ" in done.stdout
    assert done.stdout.endswith("all replicas are the same bits\n")
    first, last = map(float, re.findall(r"loss +([\d.]+) in round \d+, ([\d.]+) at the end", done.stdout)[0])
    assert (first > 5.0, last < 3.8) == (True, True), "it learns"
    for node in (1, 2, 3):
        log = (tmp_path / "demo" / f"node{node}.log").read_text()
        assert "Traceback" not in log
        assert log.rstrip().endswith("left: ended"), f"node {node} left properly"


def test_replicas_that_differ_are_not_called_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Demo(tmp_path, 2, 4)
    status = {"bytes": {}, "state_bytes": 4, "applied_round": 3, "payload_bytes": 1}
    for node in demo.nodes:
        node.status = dict(status)
    monkeypatch.setattr(Demo, "_sample", lambda demo: "")
    demo.roots[3] = {"aa"}
    assert demo._sum_up()
    demo.roots[2] = {"aa", "bb"}
    assert not demo._sum_up()


def test_a_node_that_ended_is_told_with_its_last_lines(tmp_path: Path) -> None:
    node = DemoNode("node 1", tmp_path / "node1", ["nonsense"])
    node.start()
    assert node.process is not None
    node.process.wait(30)
    with pytest.raises(Exception, match=r"node 1 has ended with status 2:\n.*nonsense"):
        node.assert_alive()
