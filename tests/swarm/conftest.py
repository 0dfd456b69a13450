"""What the tests of swarms of real daemons share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.daemons import DaemonSwarm, swarm_in


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[DaemonSwarm]:
    with swarm_in(tmp_path) as swarm:
        yield swarm
