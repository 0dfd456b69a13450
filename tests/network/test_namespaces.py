"""Real daemons on separate hosts: over slow and lossy links, and through a partition that heals.

Each has its own address, and none knows that the others are on the same machine. The tests share one swarm, in this
order.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.helpers.daemons import swarm_in
from tests.helpers.hosts import ROUNDS, SECONDS, Hosted, daemon_on
from tests.helpers.namespaces import Lan, made, why_impossible

SIZE = 3
AWAY_SECONDS = 20.0
pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("network")]


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    if why := why_impossible():
        pytest.skip(f"no network namespaces: {why}")
    with made(lambda: Lan(SIZE)) as lan, swarm_in(tmp_path_factory.mktemp("hosts")) as swarm:
        yield Hosted(swarm, *lan.hosts)


def test_hosts_find_each_other_at_their_own_addresses(hosted: Hosted) -> None:
    for node in hosted.nodes:
        [address] = node.ask()["addresses"]
        assert address.startswith(f"/ip4/{node.host.address}/tcp/4001/p2p/")
        node.until(lambda node=node: node.peers == SIZE - 1, SECONDS)
    hosted.swarm.note("rounds over an open network", hosted.go_on(*hosted.nodes))
    assert hosted.swarm.compared() >= ROUNDS


def test_where_there_is_no_route_it_is_said_so(hosted: Hosted) -> None:
    address = f"/ip4/203.0.113.7/tcp/4001/p2p/{hosted.nodes[0].ask()['peer_id']}"
    away = {"name": "stranded", "listen": "/ip4/127.0.0.1/tcp/0"}
    stranded = daemon_on(hosted.nodes[1].host, hosted.swarm, "join", "--bootstrap", address, **away)
    stranded.start()
    stranded.until_says(f"cannot connect to {address}: no way there (network is unreachable", SECONDS)
    stranded.signal(signal.SIGINT)
    assert stranded.until_ended() == 130


def test_rounds_go_on_over_thin_and_lossy_lines(hosted: Hosted) -> None:
    for host in [node.host for node in hosted.nodes]:
        host.limit(megabits=4)
        host.lose(percent=5)
    before = hosted.swarm.compared()
    hosted.swarm.note("rounds at 4 Mbit/s and 5 % loss", hosted.go_on(*hosted.nodes))
    assert hosted.swarm.compared() >= before + ROUNDS
    for host in [node.host for node in hosted.nodes]:
        assert host.lost > 0
        assert host.sent > 0


def test_two_go_on_without_the_third_which_follows_when_the_network_heals(hosted: Hosted) -> None:
    *others, lonely = hosted.nodes
    assert lonely.host.reaches(others[0].host)
    lonely.host.cut()
    assert not lonely.host.reaches(others[0].host)
    stood = lonely.applied
    hosted.swarm.note("rounds while one is cut off", hosted.go_on(*others))
    lonely.pause(AWAY_SECONDS)
    assert lonely.applied <= stood + 1
    lonely.host.heal()
    hosted.swarm.note("rounds of all after one came back", hosted.go_on(*hosted.nodes))
    lonely.until(lambda: lonely.is_member and lonely.peers == SIZE - 1, SECONDS)


def test_when_all_are_cut_off_nobody_goes_on_and_then_all_do(hosted: Hosted) -> None:
    for host in [node.host for node in hosted.nodes]:
        host.cut()
    stood = max(node.applied for node in hosted.nodes)
    hosted.nodes[0].pause(AWAY_SECONDS)
    assert max(node.applied for node in hosted.nodes) <= stood + 1
    for host in [node.host for node in hosted.nodes]:
        host.heal()
    hosted.swarm.note("rounds after an outage of all", hosted.go_on(*hosted.nodes))


def test_a_host_that_dies_and_comes_back_finds_the_others_without_a_bootstrap(hosted: Hosted) -> None:
    """It remembers where they were."""
    *others, victim = hosted.nodes
    victim.kill()
    hosted.go_on(*others)
    victim.arguments = ["join"]
    victim.start()
    hosted.swarm.note("rounds of all after one was killed", hosted.go_on(*hosted.nodes))
