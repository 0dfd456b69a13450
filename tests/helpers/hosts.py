"""Real daemons on separate hosts (network namespaces). None knows that the others are on the same machine."""

from __future__ import annotations

from time import monotonic

from tests.helpers.daemons import RUN, DaemonSwarm, StartableDaemon
from tests.helpers.namespaces import Host

ROUNDS = 4  # that they go on before something else happens
SECONDS = 240.0  # within which everything happens: a dead TCP connection takes a minute to be noticed


class HostedDaemon(StartableDaemon):
    """A daemon on a host."""

    host: Host


def daemon_on(
    host: Host, swarm: DaemonSwarm, *arguments: str, name: str = "", listen: str = "", **own: str
) -> HostedDaemon:
    node = HostedDaemon(swarm, name or host.name, *arguments, listen=listen or host.listen("tcp/4001"), **own)
    node.host, node.prefix = host, tuple(host.prefix)
    swarm.daemons.append(node)
    return node


class Hosted:
    """A swarm with a host per node. Each of the first nodes is a bootstrap of the later ones."""

    def __init__(
        self, swarm: DaemonSwarm, *hosts: Host, kind: str = "tcp/4001", bootstraps: int = 1, **own: str
    ) -> None:
        self.swarm = swarm
        # Who is cut off waits: that it should rather begin a branch of its own is another test's matter.
        run = swarm.directory / "run.toml"
        run.write_text(RUN.format(name="hosts").replace("stall_seconds = 10", "stall_seconds = 600"))
        first = daemon_on(hosts[0], swarm, "start", str(run), listen=hosts[0].listen(kind), **own)
        first.start()
        first.until(lambda: first.status().get("addresses"), SECONDS)
        self.nodes = [first]
        for host in hosts[1:]:
            known = [part for node in self.nodes[:bootstraps] for part in ("--bootstrap", node.address)]
            self.nodes.append(daemon_on(host, swarm, "join", *known, listen=host.listen(kind), **own))
            self.nodes[-1].start()
            if len(self.nodes) <= bootstraps:
                self.nodes[-1].until(lambda: self.nodes[-1].status().get("addresses"), SECONDS)
        for node in self.nodes:
            node.until(lambda node=node: len(node.status().get("roster", ())) == len(hosts), SECONDS)

    def go_on(self, *nodes: StartableDaemon) -> float:
        """Waits until all nodes have applied some more rounds; returns the seconds that took."""
        began = monotonic()
        wanted = max(node.applied for node in nodes) + ROUNDS
        for node in nodes:
            node.until(lambda node=node: node.applied >= wanted, SECONDS)
        return monotonic() - began
