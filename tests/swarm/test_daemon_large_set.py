"""A joiner trains on a data set that is larger than the room that its owner gives it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.data.dataset import manifest_digest
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.files import PARTIAL_SUFFIX
from p2ptrain.node.home import Home
from p2ptrain.node.limits import disk_demand
from p2ptrain.train.memory import need_of
from tests.helpers.daemons import AGREEMENT, TEST_SECONDS, TINY_MODEL, DaemonSwarm
from tests.helpers.large_sets import set_of_pieces

PIECES, ROOM = 64, 10
LEAST = 6  # pieces: a round's four, one more in a round of 30,000, and one held out
CONTRIBUTIONS = 6
# Rounds of two seconds, because the first node rests; a joiner has four new pieces to fetch for each.
RUN = f"""\
name = "large"

{TINY_MODEL.replace("sequence_length = 64", "sequence_length = 1024")}
[recipe]
name = "distro"
k = 8
sequences_per_pass = 4
learning_rate = "0.002"

{AGREEMENT}"""

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_a_joiner_with_little_room_trains_on_a_large_set_and_keeps_within_it(swarm: DaemonSwarm) -> None:
    whole = set_of_pieces(swarm.directory / "whole", PIECES)
    encoded = whole.manifest_bytes()
    file = swarm.directory / "run.toml"
    file.write_text(f'{RUN}\n[data]\nmanifest = "{manifest_digest(encoded)}"\n')
    needed = needed_by(RunConfig.model_validate(tomllib.loads(file.read_text())), swarm.directory) + len(encoded)
    first = swarm.add("first", "start", file, "--data", whole.directory, P2PTRAIN_LIMITS__DEVICE_PERCENT="5")
    first.start().until_up()

    refused = swarm.joiner(
        "refused", first.address, P2PTRAIN_LIMITS__DISK_BYTES=str(needed + (LEAST - 1) * PIECE_BYTES)
    )
    assert refused.start().until_ended() == 1
    assert "limits.disk_bytes: run large needs about" in refused.text
    assert "of data for a round), and may have" in refused.text

    joiner = swarm.joiner("joiner", first.address, P2PTRAIN_LIMITS__DISK_BYTES=str(needed + ROOM * PIECE_BYTES))
    joiner.start().until_member()
    seen: set[str] = set()
    most = 0

    def has_contributed() -> bool:
        nonlocal most
        here = {path.name for path in joiner.directory.glob("data/*/fetched/*")}
        seen.update(name for name in here if not name.endswith(PARTIAL_SUFFIX))
        most = max(most, len(here))
        return joiner.status().get("counters", {}).get("contributions taken", 0) >= CONTRIBUTIONS

    joiner.until(has_contributed)
    assert most <= ROOM < len(seen)
    assert first.status() and swarm.compared()
    assert "no contribution to round" not in joiner.text
    assert list(joiner.directory.glob("data/*/pieces/*")) == []
    assert whole.missing_anywhere() == []


def needed_by(run: RunConfig, directory: Path) -> int:
    config = NodeConfig.model_validate({"storage": {"directory": str(directory)}})
    return disk_demand(run, Home(config), need_of(run)).needed
