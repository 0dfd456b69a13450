"""What goes wrong in a node's first week is told with the reason and a next step: disk, pace, router."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.net.addresses import Reach
from p2ptrain.observe import build
from p2ptrain.observe.build import SLOW_ROUNDS, complaints_of, peers_of
from tests.helpers.memory_swarm import swarm
from tests.helpers.net import skipping_time
from tests.helpers.records import lived

PUBLIC = "/ip4/8.8.8.8/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def codes(daemon: Any, **changes: Any) -> set[Code]:
    """Returns what a daemon complains of, if these parts of it are others."""
    parts = ("run", "driver", "edges", "records", "machine_limits", "clock", "http", "lag", "uptime")
    seen = SimpleNamespace(**{name: getattr(daemon, name) for name in parts} | changes)
    return {each.code for each in complaints_of(seen)}


def edges_of(daemon: Any, **changes: Any) -> SimpleNamespace:
    parts = ("persistence", "transport", "connections", "served_blobs")
    return SimpleNamespace(**{name: getattr(daemon.edges, name) for name in parts} | changes)


@skipping_time
async def test_a_node_tells_that_its_disk_fills_that_it_is_too_slow_and_that_nobody_can_connect(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        daemon = made.nodes[0].daemon
        told = codes(daemon)
        assert not told & {Code.DISK_LOW, Code.TOO_SLOW, Code.BEHIND_ROUTER, Code.QUORUM_NEAR}

        room = SimpleNamespace(free_bytes=10**6, disk_trouble="", checkpoint_trouble="", records_trouble="")
        assert codes(daemon, edges=edges_of(daemon, persistence=room)) - told == {Code.DISK_LOW}

        wrong = SimpleNamespace(complaint=complaint(Code.CLOCK_WRONG, seconds=9, way="behind", peers=3))
        assert codes(daemon, clock=wrong) - told == {Code.CLOCK_WRONG}

        last = [lived(number, mine_taken=(), tokens=10) for number in range(1, SLOW_ROUNDS + 1)]
        for records, says in [
            (last, {Code.TOO_SLOW}),
            (last[1:], set()),  # too few
            ([*last[:-1], lived(99, mine_taken=(98,), tokens=10)], set()),
            ([lived(each.round, mine_taken=(), tokens=0) for each in last], set()),  # it has trained nothing
        ]:
            lately = SimpleNamespace(last=lambda count, records=records: records[-count:])
            assert codes(daemon, records=lately) - told == says

        far = SimpleNamespace(linked=daemon.edges.connections.linked, met=dict.fromkeys(made_keys(made), Reach.PUBLIC))
        near = SimpleNamespace(linked=far.linked, met=dict.fromkeys(far.met, Reach.PRIVATE))
        long, shut = build.REACHED_SECONDS, SimpleNamespace(addresses=list, boundary=daemon.edges.transport.boundary)
        open_ = SimpleNamespace(addresses=lambda: [PUBLIC], boundary=shut.boundary)
        for uptime, connections, transport, says in [
            (long, far, shut, {Code.BEHIND_ROUTER}),
            (long - 1.0, far, shut, set()),
            (long, near, shut, set()),
            (long, far, open_, set()),
        ]:
            edges = edges_of(daemon, connections=connections, transport=transport)
            assert codes(daemon, uptime=uptime, edges=edges) - told == says


def made_keys(made: Any) -> list[bytes]:
    return [node.key for node in made.nodes]


@skipping_time
async def test_the_list_of_nodes_says_who_is_heard_and_whose_work_was_taken_lately(tmp_path: Path) -> None:
    async with swarm(tmp_path, stall_seconds=5, settle_seconds=1) as made:
        await made.reach(12)
        first, *_, lost = made.nodes
        found = peers_of(first.daemon)
        for each in (*found.peers, found.me):
            assert each.rounds_lately >= 10 and each.taken_lately >= each.rounds_lately - 2
            assert each.heard_seconds is not None and each.heard_seconds < 45.0 and not each.is_elsewhere
        assert found.me.heard_seconds == 0.0
        await lost.crash()
        await made.reach(made.newest + 60, *made.nodes[:-1])
        found = peers_of(first.daemon)
        peer = next(each for each in found.peers if each.peer_id == lost.identity.peer_id)
        assert peer.reasons and found.peers[0] == peer
        assert {Code.QUORUM_NEAR, Code.CRASH_ONLY} & {each.code for each in complaints_of(first.daemon)}


@pytest.mark.parametrize(
    "code",
    ["degraded", "disk_low", "clock_wrong", "behind_router", "no_peers", "over_memory", "too_slow", "suspended",
     "quarantined", "quorum_near", "checkpoints_not_saved"],
)  # fmt: skip
def test_the_ten_of_the_first_week_are_complaints_with_a_page_that_says_what_to_do(code: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "operate-a-swarm.md").read_text()
    assert f"`{Code(code).value}`" in page
