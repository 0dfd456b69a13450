"""A real daemon: text is sampled while it trains, and its model is exported then and after it has ended."""

from __future__ import annotations

import pytest

from tests.helpers.daemons import RUN, TEST_SECONDS, DaemonSwarm, StartableDaemon, p2ptrain

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_a_daemon_writes_what_its_checkpoint_writes_and_is_exported_while_it_runs(swarm: DaemonSwarm) -> None:
    file = swarm.directory / "still.toml"
    text = RUN.format(name="still")
    assert "learning_rate = 0.002\n" in text
    file.write_text(text.replace("learning_rate = 0.002\n", "learning_rate = 0\n"))  # every round has the same weights
    first = swarm.add("first", "start", file).start().until_up()
    first.until_applied(9)  # a checkpoint is made of the eighth
    drawn = ("generate", "The ", "--tokens", "30", "--data-dir", first.directory)
    status, written, err = p2ptrain(*drawn)
    assert (status, err, written[:4]) == (0, "", "The ")
    assert p2ptrain(*drawn, "--seed", "1")[1] != written
    number, live = _exported(swarm, first, "live")
    first.until_applied(number + 9)  # another checkpoint, and the round that certifies it
    first.leave()
    status, from_checkpoint, err = p2ptrain(*drawn)
    assert (status, from_checkpoint) == (0, written)
    assert err.endswith(", certified by this node's log\n")
    last, left = _exported(swarm, first, "left")
    assert 8 <= number < last
    assert live == left


def _exported(swarm: DaemonSwarm, node: StartableDaemon, name: str) -> tuple[int, bytes]:
    """Returns the round and the weights of an export."""
    out = swarm.directory / name
    status, told, err = p2ptrain("export", out, "--data-dir", node.directory)
    assert status == 0
    assert all(
        "not certified: the newest certified root in the log is of round" in line for line in err.splitlines()
    ), err
    assert ", certified by this node's log: " in told
    assert "; after this round 1 with a vote, 1 admitted |" in (out / "README.md").read_text()
    content = (out / "model.safetensors").read_bytes()
    return int(told.split()[1]), content[8 + int.from_bytes(content[:8], "little") :]
