"""Bootstrap addresses that do not work: down, another peer's, of another run, or of no p2ptrain node."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from time import monotonic

import pytest

import p2ptrain as p2ptrain_package
from p2ptrain.config import PROTOCOLS
from p2ptrain.config.node import NetworkConfig
from p2ptrain.identity import Identity
from p2ptrain.net.libp2p.p2pd import P2pd
from tests.helpers.daemons import LISTEN, TEST_SECONDS, DaemonSwarm

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_a_bootstrap_that_is_down_is_called_until_it_comes_up(swarm: DaemonSwarm) -> None:
    first = swarm.first().start().until_up()
    address = first.address
    route, _, peer_id = address.rpartition("/p2p/")
    wrong = f"{route}/p2p/{Identity(bytes(range(32))).peer_id}"
    first.kill()
    late = swarm.joiner("late", address, wrong).start()
    late.until_says(f"cannot connect to {address}: nobody listens there (connection refused); the node keeps trying")
    first.listen = route
    first.start().until_up()
    late.until_member()
    swarm.note("from the bootstrap's start to member", monotonic() - first.started_at)
    late.until_says(f"cannot connect to {wrong}: another peer answers there, {peer_id}; the node keeps trying")
    assert late.peers == 1
    number = late.applied + 2
    for node in (first, late):
        node.until_applied(number)
    assert swarm.compared() > 1


async def test_a_node_of_another_run_is_no_peer_and_nor_is_one_of_another_version(swarm: DaemonSwarm) -> None:
    first = swarm.first().start().until_up()
    with tempfile.TemporaryDirectory(prefix="p2p-") as runtime:
        key = swarm.directory / "alien.key"
        Identity.make(key)
        alien = await P2pd.start(key, NetworkConfig(listen=(LISTEN,), nat=False), Path(runtime))
        try:
            (place,) = alien.addresses()
            other = swarm.first("other", "other", P2PTRAIN_NETWORK__BOOTSTRAP=f"{first.address},{place}").start()
            lost = swarm.joiner("lost", place).start()
            is_alien = f"{place} is reachable, but is not a p2ptrain node, or runs an incompatible version"
            is_elsewhere = f"{first.address} is reachable, but takes part in another run: test ("
            other.until_says(is_alien)
            other.until_says(is_elsewhere)
            lost.until_says(f"{is_alien}; the node keeps trying")
            other.until_applied(2)
            assert (first.peers, other.peers) == (0, 0)
            assert other.text.count("is reachable, but") == 2
        finally:
            await alien.close()


def test_a_release_of_another_protocol_is_told_apart_and_what_to_do(swarm: DaemonSwarm) -> None:
    package = Path(p2ptrain_package.__file__).parent
    newer = shutil.copytree(package, swarm.directory / "newer release" / package.name)
    place = newer / "config/run.py"
    text = place.read_text()
    there, spoken = max(PROTOCOLS) + 1, ", ".join(map(str, PROTOCOLS))
    for what, said in (
        (r"^(PROTOCOL_VERSION: Final = )\d+", rf"\g<1>{there}"),
        (rf"^(PROTOCOLS = \(){spoken}", rf"\g<1>{spoken}, {there}"),
        (rf"^(    protocol: Literal\[){spoken}", rf"\g<1>{spoken}, {there}"),
    ):
        text, count = re.subn(what, said, text, flags=re.MULTILINE)
        assert count == 1
    place.write_text(text)
    first = swarm.first("newer", PYTHONPATH=str(newer.parent), PYTHONSAFEPATH="1").start().until_up()
    first.until_applied(1)
    lost = swarm.joiner("lost", first.address).start()
    assert lost.until_ended() == 1
    told = " and ".join(map(str, PROTOCOLS))
    assert f"uses protocol {there}, and this release speaks {told}. Install a release that speaks it" in lost.text
    first.until_applied(first.applied + 2)
    assert first.peers == 0


def test_a_run_must_be_named_where_there_are_two(swarm: DaemonSwarm) -> None:
    first, other = swarm.first().start(), swarm.first("other", "other").start()
    addresses = [first.until_up().address, other.until_up().address]
    unsure = swarm.joiner("unsure", *addresses).start()
    assert unsure.until_ended() == 1
    ids = {name: daemon.ask()["run_id"] for name, daemon in (("test", first), ("other", other))}
    for name, run_id in ids.items():
        assert f"  {run_id}  {name}" in unsure.text
    assert "Name one of them" in unsure.text
    sure = swarm.add("unsure", *unsure.arguments, "--run", ids["other"][:12]).start()
    sure.until_applied(1)
    assert sure.ask()["run_id"] == ids["other"]
    assert (sure.peers, first.peers) == (1, 0)
