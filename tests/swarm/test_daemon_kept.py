"""What earlier releases have left on a disk is opened, joined and audited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.config import RunConfig
from tests.helpers.daemons import TEST_SECONDS, DaemonSwarm, p2ptrain
from tests.helpers.kept import KEPT, ROUNDS, unpack

ARCHIVES = sorted(KEPT.glob("*.tar.xz"))
pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.split(".")[0])
def test_a_kept_directory_is_opened_joined_and_audited(archive: Path, swarm: DaemonSwarm) -> None:
    unpack(archive, swarm)
    (directory,) = (swarm.directory / "node" / "runs").iterdir()
    kept = RunConfig.from_canonical((directory / "run.json").read_bytes())
    assert kept.run_id[:16] == directory.name
    status, out, err = p2ptrain("audit", directory)
    assert (status, err) == (0, ""), out
    run = swarm.directory / "kept.toml"
    node = swarm.add("node", "start", run, "--data", swarm.directory / "data").start().until_up()
    assert node.ask()["run_id"] == kept.run_id
    second = swarm.joiner("second", node.address).start()
    second.until_applied(ROUNDS + 3)
    second.until_member()
    node.until(lambda: node.status() and second.status() and swarm.compared() >= 3)
    assert p2ptrain("audit", directory)[0] == 0


def test_a_start_goes_on_with_the_run_of_its_file_though_defaults_have_changed(swarm: DaemonSwarm) -> None:
    """The file says less than the run has, as after a release with other defaults. Another value is another run, and so
    is a key less."""
    run = swarm.run_file("run")
    text = run.read_text()
    before = swarm.directory / "before.toml"
    before.write_text(text.replace("[recipe]", "[recipe]\ndecay = 0.5\nchunk = 16"))
    node = swarm.add("node", "start", before).start().until_up()
    run_id = node.ask()["run_id"]
    node.until_applied(3)
    node.kill()
    (note,) = node.directory.glob("runs/*/said.json")
    said = json.loads(note.read_text())
    del said["recipe"]["decay"], said["recipe"]["chunk"]
    note.write_text(json.dumps(said, sort_keys=True) + "\n")
    again = swarm.add("node", "start", run).start().until_up()
    assert again.ask()["run_id"] == run_id
    again.until_applied(5)
    again.kill()
    run.write_text(text.replace("[recipe]", "[recipe]\nchunk = 32"))
    other = swarm.add("node", "start", run).start().until_up()
    other_id = other.ask()["run_id"]
    assert other_id != run_id
    other.kill()
    run.write_text(text)
    assert swarm.add("node", "start", run).start().until_up().ask()["run_id"] != other_id
