"""Nodes that are reachable over QUIC alone, or not at all, and nodes that look for one another where they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.net import questions
from tests.helpers.daemons import TEST_SECONDS, DaemonSwarm
from tests.helpers.p2pd import nodes_in

ROUNDS = 3
QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"
ANSWERS = 50  # of which two thirds were once lost

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.mark.parametrize("listen", [(QUIC,), ("/ip4/127.0.0.1/tcp/0",), ()])
async def test_the_last_frame_of_a_stream_arrives_over_quic_too(listen: tuple[str, ...], tmp_path: Path) -> None:
    """p2pd drops a stream once one end has closed it, and over QUIC the data in flight is lost with it."""
    async with nodes_in(tmp_path) as make:
        server, client = await make((QUIC,)), await make(listen)
        run = questions.RunInfo(bytes(32), "answers", 1, 1)
        await questions.serve(server, lambda peer, question: questions.Runs((run,) * questions.RUNS_MAX))
        await client.connect(server.addresses()[0])
        for _ in range(ANSWERS):
            assert await questions.ask_runs(client, server.me) == (run,) * questions.RUNS_MAX


def test_nodes_that_speak_quic_and_one_that_is_reached_nowhere_train_together(swarm: DaemonSwarm) -> None:
    first = swarm.first(listen=QUIC).start().until_up()
    assert "/quic-v1/p2p/" in first.address
    config = swarm.directory / "nowhere.toml"
    config.write_text("[network]\nlisten = []\n")
    second = swarm.joiner("second", first.address, listen=QUIC).start()
    nowhere = swarm.joiner("nowhere", first.address, listen="")
    nowhere.arguments += ["--config", str(config)]
    nowhere.start()
    nodes = [first, second, nowhere]
    for node in nodes:
        node.until(lambda node=node: (node.peers, len(node.status().get("roster", ()))) == (2, 3))
    assert nowhere.status()["addresses"] == []
    assert "no address that others could use" in nowhere.text
    number = max(node.applied for node in nodes) + ROUNDS
    for node in nodes:
        node.until_applied(number)
    assert swarm.compared() > ROUNDS


def test_nodes_that_were_all_killed_find_one_another_on_the_ports_that_they_had(swarm: DaemonSwarm) -> None:
    first = swarm.first().start().until_up()
    nodes = [first, *(swarm.joiner(f"node{number}", first.address).start() for number in (2, 3))]
    for node in nodes:
        node.until(lambda node=node: (node.peers, len(node.status().get("roster", ()))) == (2, 3))
    before = [node.address for node in nodes]
    for node in nodes:
        node.kill()
    for node in reversed(nodes):
        node.start()
    for node in nodes:
        node.until(lambda node=node: node.peers == 2)
    assert [node.address for node in nodes] == before
    number = max(node.applied for node in nodes) + ROUNDS
    for node in nodes:
        node.until_applied(number)
