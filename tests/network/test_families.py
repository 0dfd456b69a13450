"""Real daemons on hosts with only IPv6 addresses, and on hosts with only QUIC."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.daemons import swarm_in
from tests.helpers.hosts import ROUNDS, SECONDS, Hosted
from tests.helpers.namespaces import Lan, made, why_impossible

SIZE = 3
pytestmark = [
    pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("network"),
    pytest.mark.skipif(bool(why_impossible()), reason=f"no network namespaces: {why_impossible()}"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "kind"), [(6, "tcp/4001"), (6, "udp/4001/quic-v1"), (4, "udp/4001/quic-v1")])
def test_a_swarm_lives_on_one_kind_of_address_alone(family: int, kind: str, tmp_path: Path) -> None:
    with made(lambda: Lan(SIZE, family)) as lan, swarm_in(tmp_path) as swarm:
        hosted = Hosted(swarm, *lan.hosts, kind=kind)
        for node in hosted.nodes:
            [address] = node.ask()["addresses"]
            assert address.startswith(f"/ip{family}/{node.host.address}/{kind}/p2p/")
            node.until(lambda node=node: node.peers == SIZE - 1, SECONDS)
        swarm.note(f"rounds over /ip{family}/{kind}", hosted.go_on(*hosted.nodes))
        assert swarm.compared() >= ROUNDS

        *others, victim = hosted.nodes
        victim.kill()
        hosted.go_on(*others)
        victim.arguments = ["join"]  # it remembers where the others were
        victim.start()
        swarm.note("rounds of all after one was killed", hosted.go_on(*hosted.nodes))
        victim.until(lambda: victim.is_member and victim.peers == SIZE - 1, SECONDS)
