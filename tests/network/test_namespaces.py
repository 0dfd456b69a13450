"""Real daemons on hosts of their own: over thin and lossy lines, and over a partition that heals.

Each has its own address, and none knows that the others are on the same machine. The tests share one swarm, in this
order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from time import monotonic

import pytest
from namespaces import Host, Lan, lan_of, why_impossible

from tests.daemon_known import OWN, RUN, Daemon, Swarm, swarm_in

SIZE = 3
ROUNDS = 4  # that they go on before something else happens
SECONDS = 240.0  # within which everything happens: a dead TCP connection takes a minute to be noticed
AWAY_SECONDS = 20.0
pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("network")]


class HostedDaemon(Daemon):
    """A daemon on a host."""

    host: Host

    def start(self) -> Daemon:
        command = [*self.host.prefix, sys.executable, "-m", "p2ptrain", *self.arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--data-dir", str(self.directory), "--listen", self.listen, "--log-format", "text"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **OWN, **self.own},
                start_new_session=True,
            )  # fmt: skip
        self.started_at = monotonic()
        return self


def daemon_on(host: Host, swarm: Swarm, *arguments: str) -> HostedDaemon:
    made = HostedDaemon(swarm, host.name, *arguments, listen=f"/ip4/{host.address}/tcp/4001")
    made.host = host
    swarm.daemons.append(made)
    return made


class Hosted:
    """A swarm with a host for each."""

    def __init__(self, lan: Lan, swarm: Swarm) -> None:
        self.lan, self.swarm = lan, swarm
        # Who is cut off waits: that it should rather begin a branch of its own is another test's matter.
        run = swarm.directory / "run.toml"
        run.write_text(RUN.format(name="hosts").replace("stall_seconds = 10", "stall_seconds = 600"))
        first = daemon_on(lan.hosts[0], swarm, "start", str(run))
        first.start()
        first.until(lambda: first.status().get("addresses"), SECONDS)
        self.nodes = [first]
        for host in lan.hosts[1:]:
            self.nodes.append(daemon_on(host, swarm, "join", "--bootstrap", first.address))
            self.nodes[-1].start()
        for node in self.nodes:
            node.until(lambda node=node: len(node.status().get("roster", ())) == SIZE, SECONDS)

    def go_on(self, *nodes: Daemon) -> float:
        """All of them apply some more rounds; the seconds that it took."""
        began = monotonic()
        wanted = max(node.applied for node in nodes) + ROUNDS
        for node in nodes:
            node.until(lambda node=node: node.applied >= wanted, SECONDS)
        return monotonic() - began


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    if why := why_impossible():
        pytest.skip(f"no network namespaces: {why}")
    with lan_of(SIZE) as lan, swarm_in(tmp_path_factory.mktemp("hosts")) as swarm:
        yield Hosted(lan, swarm)


def test_hosts_find_each_other_at_their_own_addresses(hosted: Hosted) -> None:
    for node in hosted.nodes:
        [address] = node.ask()["addresses"]
        assert address.startswith(f"/ip4/{node.host.address}/tcp/4001/p2p/")
        node.until(lambda node=node: node.peers == SIZE - 1, SECONDS)
    hosted.swarm.note("rounds over an open network", hosted.go_on(*hosted.nodes))
    assert hosted.swarm.compared() >= ROUNDS


def test_where_there_is_no_route_it_is_said_so(hosted: Hosted) -> None:
    address = f"/ip4/203.0.113.7/tcp/4001/p2p/{hosted.nodes[0].ask()['peer_id']}"
    stranded = HostedDaemon(hosted.swarm, "stranded", "join", "--bootstrap", address, listen="/ip4/127.0.0.1/tcp/0")
    stranded.host = hosted.lan.hosts[1]
    hosted.swarm.daemons.append(stranded)
    stranded.start()
    stranded.until_says(f"cannot connect to {address}: no way there (network is unreachable", SECONDS)
    stranded.signal(signal.SIGINT)
    assert stranded.until_ended() == 130


def test_rounds_go_on_over_thin_and_lossy_lines(hosted: Hosted) -> None:
    for host in hosted.lan.hosts:
        host.limit(megabits=4)
        host.lose(percent=5)
    before = hosted.swarm.compared()
    hosted.swarm.note("rounds at 4 Mbit/s and 5 % loss", hosted.go_on(*hosted.nodes))
    assert hosted.swarm.compared() >= before + ROUNDS
    for host in hosted.lan.hosts:
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
    for host in hosted.lan.hosts:
        host.cut()
    stood = max(node.applied for node in hosted.nodes)
    hosted.nodes[0].pause(AWAY_SECONDS)
    assert max(node.applied for node in hosted.nodes) <= stood + 1
    for host in hosted.lan.hosts:
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
