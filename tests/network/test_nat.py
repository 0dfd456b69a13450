"""Real daemons behind NAT routers that only let in replies, with others on the open network.

Gossip reaches them over the connections that they made themselves. To one another they talk through a relay, which is
any public node that they were told of; or directly, where both have made a hole at the same time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.identity import Identity
from p2ptrain.net.libp2p.autorelay import ASK_SECONDS, LOST_SECONDS
from tests.helpers.daemons import DaemonSwarm, swarm_in
from tests.helpers.hosts import SECONDS, Hosted, HostedDaemon
from tests.helpers.namespaces import INTERNET, Internet, made, why_impossible

HOMES = 2
OBSERVERS = 4  # public peers that see a node at one address, until libp2p believes that it is there
RELAYED_SECONDS = 90.0  # to notice that nobody can call, and to have a relay; it takes libp2p 15
AWAY_SECONDS = 30.0
NAT = {"P2PTRAIN_NETWORK__NAT": "true"}
pytestmark = [
    pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(1_200), pytest.mark.xdist_group("network"),
    pytest.mark.skipif(bool(why_impossible()), reason=f"no network namespaces: {why_impossible()}"),
]  # fmt: skip


class HomeNetwork:
    """Two nodes at home, and the public ones that they know."""

    def __init__(self, swarm: DaemonSwarm, net: Internet, **options: str) -> None:
        self.swarm = swarm
        hosts = (*net.public, *net.homes)
        self.hosted = Hosted(swarm, *hosts, bootstraps=len(net.public), **NAT, **options)
        self.public, self.at_home = self.hosted.nodes[: len(net.public)], self.hosted.nodes[len(net.public) :]

    def are_linked(self) -> bool:
        """True if both nodes at home are connected to all others."""
        return all(node.peers == len(self.hosted.nodes) - 1 for node in self.at_home)

    def path(self) -> str:
        """Says whether the homes exchange packets directly, or only with public nodes."""
        one, other = self.at_home
        return "direct" if one.host.talks_to(other.host) or other.host.talks_to(one.host) else "relayed"


def relays_of(node: HostedDaemon) -> list[str]:
    return [each for each in node.status().get("addresses", ()) if "/p2p-circuit/" in each]


def test_two_at_home_reach_each_other_through_a_public_node_and_wait_for_it_when_it_dies(tmp_path: Path) -> None:
    with made(lambda: Internet(1, HOMES)) as net, swarm_in(tmp_path) as swarm:
        home = HomeNetwork(swarm, net)
        relay, go_on = home.public[0], home.hosted.go_on
        swarm.note("rounds of all", go_on(*home.hosted.nodes))
        for node in home.at_home:
            swarm.note(f"{node.name} has a relay", node.until(lambda node=node: relays_of(node), RELAYED_SECONDS))
            assert all(f"/p2p/{relay.ask()['peer_id']}/p2p-circuit/" in each for each in relays_of(node))
        swarm.note("the homes linked", relay.until(home.are_linked, RELAYED_SECONDS))
        swarm.note("rounds of all", go_on(*home.hosted.nodes))
        assert home.path() == "relayed"  # fewer than four have seen them, and so libp2p makes no hole

        again = home.at_home[0]  # it remembers the public node, twice, and the other home, which is no relay
        again.kill()
        nobody = f"/ip4/{INTERNET.format(99).partition('/')[0]}/tcp/4001/p2p/{Identity(bytes(32)).peer_id}"
        again.arguments = ["join", "--bootstrap", nobody, "--bootstrap", relay.address]
        again.start()
        again.until(lambda: again.status().get("addresses"), SECONDS)
        swarm.note(
            "started again with a bootstrap that is down, it has a relay",
            again.until(lambda: relays_of(again), RELAYED_SECONDS),
        )
        swarm.note("rounds of all", go_on(*home.hosted.nodes))

        relay.kill()
        stood = max(node.applied for node in home.at_home)
        for node in home.at_home:
            node.until(lambda node=node: node.peers == 0, SECONDS)
        home.at_home[0].pause(AWAY_SECONDS)
        assert max(node.applied for node in home.at_home) <= stood + 1
        relay.start()
        swarm.note("rounds of all after the relay came back", go_on(*home.hosted.nodes))
        for node in home.hosted.nodes:
            node.until(lambda node=node: node.is_member, SECONDS)
        for node in home.at_home:  # libp2p alone would ask again after an hour
            had = node.until(lambda node=node: relays_of(node), LOST_SECONDS + ASK_SECONDS + RELAYED_SECONDS)
            swarm.note(f"{node.name} has a relay again", had)
        swarm.note("the homes linked", relay.until(home.are_linked, RELAYED_SECONDS))
        swarm.note("rounds of all", go_on(*home.hosted.nodes))


def test_two_at_home_make_a_hole_and_need_no_public_node_for_what_they_say_to_each_other(tmp_path: Path) -> None:
    with made(lambda: Internet(OBSERVERS, HOMES)) as net, swarm_in(tmp_path) as swarm:
        home = HomeNetwork(swarm, net, kind="udp/4001/quic-v1")
        swarm.note("homes linked", home.public[0].until(home.are_linked, RELAYED_SECONDS))
        swarm.note(f"rounds, {home.path()}", home.hosted.go_on(*home.hosted.nodes))
        assert home.path() == "direct"
        for node in home.public:
            node.kill()
        one, other = home.at_home
        for node in home.at_home:
            node.until(lambda node=node: node.peers == 1, SECONDS)
        one.pause(AWAY_SECONDS)
        assert (one.peers, other.peers) == (1, 1)
        for node in home.public:
            node.start()
        swarm.note("rounds of all after the public nodes came back", home.hosted.go_on(*home.hosted.nodes))
