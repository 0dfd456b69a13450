"""The simulator: the same seed gives the same run, and links, messages and connections are as scenarios say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.messages import NOTHING, Announcement, Ballot, Call, Vote, encode, signed_bytes
from p2ptrain.core.node import Node
from p2ptrain.sim.checkers import OneHistory, standard
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.keys import FakeSigner, node_key
from p2ptrain.sim.ledger import Ledger, Violation
from p2ptrain.sim.network import FANOUT, LinkModel, bits
from p2ptrain.sim.outcome import simulate, summary
from p2ptrain.sim.scenario import Links
from tests.helpers.sim import MessageLog, ScriptedCore, begin_faults, do, of_kind, said, scenario, scripted, vote

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------------------------------------------
# Determinism


TRACE = """
import sys
from pathlib import Path
from blake3 import blake3
from msgspec import msgpack
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import load_scenario
for name in sys.argv[2:]:
    trace = blake3()
    def prepare(cluster):
        def note(node, event, effects, local):
            trace.update(msgpack.encode((cluster.calendar.now, node.index, local, event, len(effects or ()))))
        cluster.watch.observers.append(note)
    simulate(load_scenario(Path(name)), int(sys.argv[1]), (), prepare)
    print(trace.hexdigest())
"""
TRACED = [str(ROOT / "scenarios" / f"{name}.toml") for name in ("liar-collude", "partition-regroup")]


def traces(seed: int, hash_seed: int, names: list[str]) -> list[str]:
    command = [sys.executable, "-c", TRACE, str(seed), *names]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()


def test_the_same_seed_gives_the_same_trace_whatever_the_hash_seed() -> None:
    found = traces(7, 1, TRACED)
    assert len(set(found)) == len(TRACED)
    assert traces(7, 2, TRACED) == found
    assert traces(8, 1, TRACED[:1]) != found[:1]


# ---------------------------------------------------------------------------------------------------
# Keys


def test_a_signature_is_its_authors_for_its_message_and_its_run() -> None:
    one, other = FakeSigner(b"r" * 32, node_key(1, 0)), FakeSigner(b"r" * 32, node_key(1, 1))
    elsewhere = FakeSigner(b"s" * 32, node_key(1, 0))
    signature = one.sign(b"this")
    assert len(signature) == 64
    assert other(one.key, b"this", signature)
    assert not other(other.key, b"this", signature)
    assert not other(one.key, b"that", signature)
    assert not other(one.key, b"this", elsewhere.sign(b"this"))


def test_keys_differ_by_seed_and_node() -> None:
    assert len({node_key(seed, index) for seed in (-1, 0, 1) for index in range(50)}) == 150


# ---------------------------------------------------------------------------------------------------
# The network


def network(**links: Any) -> LinkModel:
    return LinkModel(Links(**{"latency_seconds": 0.1, "jitter_seconds": 0.0, **links}), Random(1))


def test_a_message_reaches_everyone_but_its_publisher() -> None:
    assert network().spread(1, [0, 1, 2, 3], 5.0, 100) == [(5.1, 3), (5.1, 2), (5.1, 0)]


def test_arrivals_are_sorted_with_the_last_first() -> None:
    arrivals = network(jitter_seconds=1.0).spread(0, range(50), 0.0, 100)
    assert sorted(arrivals, reverse=True) == arrivals
    assert min(arrivals)[0] >= 0.1
    assert 0.5 < sum(at - 0.1 for at, _ in arrivals) / 49 < 2.0


def test_a_cut_link_carries_nothing_one_way() -> None:
    net = network()
    net.cut(7, [(bits([0, 1]), bits([2]))])
    assert [target for _, target in net.spread(0, [0, 1, 2, 3], 0.0, 1)] == [3, 1]
    assert [target for _, target in net.spread(2, [0, 1, 2, 3], 0.0, 1)] == [3, 1, 0]
    assert (net.stream(0, 2, 0.0, 1), net.stream(2, 0, 0.0, 1)) == (None, 0.1)
    net.cut(7, [])
    assert (len(net.spread(0, [0, 1, 2, 3], 0.0, 1)), net.stream(0, 2, 0.0, 1)) == (3, 0.1)


def test_cuts_of_two_faults_add_up_and_heal_one_by_one() -> None:
    net = network()
    net.cut(0, [(bits([0]), bits([1]))])
    net.cut(1, [(bits([0]), bits([1, 2]))])
    net.cut(1, [])
    assert (net.is_open(0, 1), net.is_open(0, 2)) == (False, True)


def test_a_share_of_the_messages_is_lost_doubled_and_held_up() -> None:
    net = network(loss=0.25, duplicate=0.5, reorder=0.5, reorder_seconds=10.0)
    arrivals = net.spread(0, range(4_001), 0.0, 1)
    heard = {target for _, target in arrivals}
    assert 0.72 < len(heard) / 4_000 < 0.78
    assert 1.45 < len(arrivals) / len(heard) < 1.55
    assert 0.4 < sum(at > 1.0 for at, _ in arrivals) / len(arrivals) < 0.75


def test_a_stream_is_not_lost_but_takes_longer() -> None:
    net = network(loss=0.5)
    times = [net.stream(0, 1, 0.0, 1) for _ in range(500)]
    assert all(at is not None and at >= 0.1 for at in times)
    assert 200 < sum(at > 0.2 for at in times if at is not None) < 300


def test_what_is_clogged_comes_when_the_clog_is_gone() -> None:
    net = network()
    net.clog(0, bits([1]), 9.0)
    assert all(9.0 <= at < 9.1 for at, _ in net.spread(1, [0, 1, 2], 1.0, 1))
    assert net.spread(0, [0, 1, 2], 1.0, 1) == [(1.1, 2), (1.1, 1)]
    assert net.spread(1, [0, 1], 20.0, 1) == [(20.1, 0)]
    net.unclog(0)
    assert net.spread(1, [0, 1], 1.0, 1) == [(1.1, 0)]


def test_an_uplink_sends_one_thing_after_the_other() -> None:
    net = network(bytes_per_second=1_000.0)
    assert net.stream(0, 1, 0.0, 500) == pytest.approx(0.6)
    assert net.stream(0, 2, 0.0, 500) == pytest.approx(1.1)
    assert net.stream(1, 2, 0.0, 500) == pytest.approx(0.6)
    copies = min(FANOUT, 3)
    assert net.spread(0, [0, 1, 2], 0.0, 100)[0][0] == pytest.approx(1.1 + copies * 0.1)


def test_chosen_kinds_of_chosen_authors_are_lost() -> None:
    cluster, _ = scripted()
    net = cluster.network
    net.losing[0] = bits([1]), frozenset({"prevote"})
    prevote, precommit = (Vote(bytes(32), 1, 0, ballot, NOTHING, bytes(32)) for ballot in Ballot)
    assert [net.loses(1, prevote), net.loses(1, precommit), net.loses(0, prevote)] == [True, False, False]


# ---------------------------------------------------------------------------------------------------
# Messages


def test_a_published_message_is_one_event_for_all() -> None:
    cluster, scripts = scripted()
    envelope = vote(cluster, 0)
    do(cluster, 0, ev.Publish(envelope))
    cluster.run()
    assert scripts[0].heard == []
    assert [[at for at, _ in script.heard] for script in scripts[1:]] == [[0.01], [0.01]]
    one, other = scripts[1].heard[0][1], scripts[2].heard[0][1]
    assert one is other
    assert isinstance(one, ev.MessageReceived)
    assert (one.sender, one.received.envelope, one.payload_good) == (cluster.nodes[0].key, envelope, None)
    assert (cluster.calendar.deliveries, cluster.metrics.heard_messages, cluster.metrics.heard_bytes) == (
        2,
        2,
        2 * len(envelope),
    )


def test_an_honest_node_that_says_what_nobody_can_decode_is_caught() -> None:
    cluster, _ = scripted()
    forged = vote(cluster, 0)[:-1]
    with pytest.raises(Violation, match="node 1 is honest and said what nobody can decode"):
        do(cluster, 1, ev.Publish(forged))


def test_a_liars_garbage_arrives_as_malformed() -> None:
    cluster, scripts = scripted()
    cluster.nodes[0].honest = False
    do(cluster, 0, ev.Publish(b"garbage"))
    cluster.run()
    assert scripts[1].heard == [(0.01, ev.MalformedReceived(cluster.nodes[0].key, "not a message"))]


def test_what_is_sent_to_one_arrives_in_order_at_that_one() -> None:
    cluster, scripts = scripted()
    envelopes = (vote(cluster, 1, 0), vote(cluster, 1, 1))
    do(cluster, 0, ev.Send(cluster.nodes[1].key, envelopes))
    cluster.run()
    events = [event for _, event in scripts[1].heard]
    assert [event.received.envelope for event in events if isinstance(event, ev.MessageReceived)] == list(envelopes)
    assert scripts[2].heard == []


def test_questions_arrive_as_events() -> None:
    cluster, scripts = scripted()
    keys = [node.key for node in cluster.nodes]
    do(cluster, 0, ev.Ask(keys[1], (b"n" * 16,)))
    cluster.run()
    assert scripts[1].heard == [(0.01, ev.Asked(keys[0], (b"n" * 16,)))]


def test_an_attachment_is_held_by_whoever_receives_it() -> None:
    cluster, scripts = scripted()
    name, payload = cluster.payloads.make(cluster.nodes[0], 1, 0)
    bad, bad_payload = cluster.payloads.make(cluster.nodes[0], 1, 0, good=False)
    for each, content in ((name, payload), (bad, bad_payload)):
        message = Announcement(
            cluster.setup.run_id, 1, 0, bytes(32), each, 40, content.content, 1, 2, 0, cluster.nodes[0].key
        )
        signature = cluster.nodes[0].signer.sign(signed_bytes(cluster.setup.run_id, message))
        do(cluster, 0, ev.Publish(encode(message, signature, content.attachment)))
    cluster.run()
    assert [event.payload_good for _, event in scripts[1].heard if isinstance(event, ev.MessageReceived)] == [
        True,
        False,
    ]
    assert name in cluster.nodes[1].held_payloads
    assert name in cluster.nodes[2].held_payloads


# ---------------------------------------------------------------------------------------------------
# Connections


def peers_of(script: ScriptedCore) -> list[tuple[str, int]]:
    index = script.cluster.key_index
    return [
        (type(event).__name__, index[event.peer])
        for _, event in script.heard
        if isinstance(event, ev.PeerSeen | ev.PeerLost)
    ]


def test_a_cut_is_noticed_after_a_while_and_so_is_its_end() -> None:
    fault = {"kind": "partition", "at": 10.0, "until": 50.0, "groups": [[0], [1, 2]]}
    cluster, scripts = scripted(fault=[fault])
    begin_faults(cluster)
    cluster.topology.refresh(*cluster.nodes)
    cluster.run()
    assert sorted(peers_of(scripts[0])[:2]) == [("PeerSeen", 1), ("PeerSeen", 2)]
    assert sorted(peers_of(scripts[0])[2:4]) == [("PeerLost", 1), ("PeerLost", 2)]
    assert sorted(peers_of(scripts[0])[4:]) == [("PeerSeen", 1), ("PeerSeen", 2)]
    lost = [at for at, event in scripts[0].heard if isinstance(event, ev.PeerLost)]
    assert all(11.0 <= at <= 14.0 for at in lost)
    assert peers_of(scripts[1]).count(("PeerSeen", 2)) == 1


def test_a_link_that_is_cut_one_way_stays_a_connection() -> None:
    fault = {"kind": "partition", "at": 10.0, "until": 50.0, "groups": [[0], [1, 2]], "one_way": True}
    cluster, scripts = scripted(fault=[fault])
    begin_faults(cluster)
    cluster.topology.refresh(*cluster.nodes)
    cluster.calendar.at(20.0, do, cluster, 0, ev.Publish(vote(cluster, 0)))
    cluster.calendar.at(20.0, do, cluster, 1, ev.Publish(vote(cluster, 1)))
    cluster.run()
    assert ("PeerLost", 1) not in peers_of(scripts[0])
    assert of_kind(scripts[0], ev.MessageReceived) == []
    assert len(of_kind(scripts[1], ev.MessageReceived)) == 1


def test_a_disconnected_peer_is_lost_and_comes_back() -> None:
    cluster, scripts = scripted()
    cluster.topology.refresh(*cluster.nodes)
    cluster.calendar.at(5.0, do, cluster, 0, ev.Disconnect(cluster.nodes[1].key, "useless"))
    cluster.run()
    assert peers_of(scripts[0])[2:] == [("PeerLost", 1), ("PeerSeen", 1)]
    assert peers_of(scripts[1])[2:] == [("PeerLost", 0), ("PeerSeen", 0)]
    assert cluster.metrics.disconnects == {0: 1}


def test_large_swarms_are_not_fully_connected() -> None:
    cluster = Cluster(1, scenario(100))
    connected = cluster.topology.possible
    degrees = [len(peers) for peers in connected]
    assert min(degrees) >= 16
    assert max(degrees) < 60
    assert all(index in connected[other] for index in range(100) for other in connected[index])


def test_above_the_seats_nodes_contribute_without_a_vote() -> None:
    cluster = Cluster(1, scenario(10, admission={"seats_max": 4}))
    assert len(cluster.setup.genesis.members) == 4
    assert [entry.key for entry in cluster.setup.genesis.admitted] == sorted(node.key for node in cluster.nodes)


# ---------------------------------------------------------------------------------------------------
# The real core


def test_a_killed_node_starts_again_with_what_its_disk_holds() -> None:
    outcome = simulate(scenario(4, rounds=12, fault=[{"kind": "crash", "at": 5.0, "until": 8.0, "nodes": [2]}]), 1)
    node = outcome.cluster.nodes[2]
    assert outcome.failures == []
    assert node.life == 3  # started, killed, started
    assert outcome.cluster.metrics.last_applied[2][1] >= 12


def test_messages_are_logged_as_they_were_said() -> None:
    log = MessageLog()
    outcome = simulate(scenario(4, rounds=4), 1, [log])
    cluster = outcome.cluster
    assert outcome.failures == []
    assert len(log.messages) >= sum(cluster.metrics.kinds[kind] for kind in ("announcement", "prevote", "precommit"))
    times = [at for at, _, _ in log.messages]
    assert times == sorted(times)
    assert all(cluster.decode(envelope) is not None for _, _, envelope in log.messages)


def test_a_goal_that_is_not_reached_is_a_failure() -> None:
    cut = {"kind": "partition", "at": 2.0, "until": 90.0, "groups": [[0, 1], [2, 3]]}
    outcome = simulate(scenario(4, rounds=50, seconds=80.0, fault=[cut], agreement={"on_quorum_loss": "halt"}), 1)
    assert len(outcome.failures) == 1
    assert outcome.failures[0].startswith("round 50 was not reached by everyone within 80 s: node ")


@pytest.mark.parametrize("kind", ["crash", "leave"])
def test_a_swarm_in_which_nobody_is_left_is_a_failure(kind: str) -> None:
    outcome = simulate(scenario(4, fault=[{"kind": kind, "at": 2.0, "nodes": "all"}]), 1)
    assert not outcome.cluster.calendar.is_over
    assert outcome.failures == ["round 5 was not reached by everyone within 100 s: nobody honest is left"]


@pytest.mark.parametrize("error", [RuntimeError, RecursionError, ZeroDivisionError, OverflowError, KeyError])
def test_a_core_that_stumbles_is_a_failure_of_the_simulation(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Node.handle

    def fatal(self: Node, event: ev.Event, now: float) -> list[ev.Effect]:
        if isinstance(event, ev.TrainingFinished):
            raise error("too much")
        return handle(self, event, now)

    monkeypatch.setattr(Node, "handle", fatal)
    outcome = simulate(scenario(1), 1)
    assert len(outcome.failures) == 1
    assert f", {error.__name__}: " in outcome.failures[0]


def test_while_quorums_share_a_member_without_fault_one_history_is_still_looked_for() -> None:
    lie = {"kind": "liar", "at": 0.0, "nodes": [4], "how": "silent announce"}
    forgets = {"kind": "crash", "at": 5.0, "until": 6.0, "nodes": [3], "forgetful": True}
    outcome = simulate(scenario(5, rounds=12, fault=[lie, forgets]), 1, standard())
    cluster = outcome.cluster
    assert (cluster.watch.is_beyond, cluster.calendar.is_over, outcome.failures) == (True, True, [])
    assert cluster.rounds >= 12
    assert [type(checker) for checker in cluster.watch.checkers] == [Ledger, OneHistory]
    assert "\nbeyond      more than f of a roster were faulty" in summary(outcome, 1)


def test_a_roster_in_which_more_than_f_lie_ends_the_run_without_a_verdict() -> None:
    lie = {"kind": "liar", "at": 0.0, "nodes": [3], "how": "silent announce"}
    outcome = simulate(scenario(4, rounds=30, fault=[lie, {"kind": "leave", "at": 5.0, "nodes": [0]}]), 1)
    assert outcome.cluster.watch.is_beyond
    assert outcome.cluster.rounds < 30


def test_nodes_that_call_themselves_are_no_message_kind_of_their_own() -> None:
    cluster, scripts = scripted()
    do(
        cluster,
        0,
        ev.Publish(said(cluster, 0, Call(cluster.setup.run_id, cluster.setup.run_id, 0, cluster.nodes[0].key))),
    )
    cluster.run()
    assert cluster.metrics.kinds == {"call": 1}
    assert len(scripts[1].heard) == 1


def test_who_has_lost_its_memory_counts_as_faulty() -> None:
    forgets = {"kind": "crash", "at": 5.0, "until": 6.0, "nodes": [2, 3], "forgetful": True}
    outcome = simulate(scenario(4, rounds=30, fault=[forgets]), 1)
    assert outcome.cluster.watch.is_beyond
    assert not simulate(scenario(7, rounds=12, fault=[forgets]), 1).cluster.watch.is_beyond


def test_who_is_killed_before_it_has_noted_its_lost_memory_is_silent_at_the_next_start_too() -> None:
    """As the real log knows it: it stays forgetful until something is written."""
    faults = [
        {"kind": "slow disk", "at": 4.0, "until": 20.0, "nodes": [3], "fsync_seconds": 3.0},
        {"kind": "crash", "at": 5.0, "until": 6.0, "nodes": [3], "forgetful": True},
        {"kind": "crash", "at": 7.0, "until": 8.0, "nodes": [3]},
    ]
    for seed in range(10):
        outcome = simulate(scenario(7, rounds=12, seconds=1e3, disk={"kept": 0.0}, fault=faults), seed, standard())
        assert outcome.failures == []


def test_nothing_but_the_history_grows_with_the_rounds() -> None:
    """Bounds are generous, and a leak that takes four thousand rounds to reach one is a leak all the same."""

    def sizes(rounds: int) -> dict[str, int]:
        core = simulate(scenario(nodes=4, rounds=rounds, seconds=1e6), 1).cluster.nodes[0].core
        assert core is not None
        return {name: size for name, (size, _) in core.limits().items()}

    few, many = sizes(150), sizes(300)
    assert {name for name in few if many[name] > few[name] + 8} == {"history"}


# ---------------------------------------------------------------------------------------------------
# Data


@pytest.mark.parametrize("assignment", ["drawn", "window", "capability"])
def test_a_slow_member_gets_less_data_by_capability_alone(assignment: str) -> None:
    shares: dict[bytes, int] = {}

    def prepare(cluster: Cluster) -> None:
        def note(node: Any, event: object, effects: Any, local: object) -> None:
            for effect in effects or ():
                if isinstance(effect, ev.Train) and effect.slots is not None:
                    shares[node.key] = effect.slots.size

        cluster.watch.observers.append(note)

    training = {"seconds": 10.0, "spread": 0.0, "slow": [{"nodes": [3], "times": 5.0}]}
    recipe = {"local_steps": 10, "sequences_per_pass": 2}
    slow = scenario(4, rounds=20, seconds=900.0, training=training, recipe=recipe, data={"assignment": assignment})
    outcome = simulate(slow, 1, standard(), prepare)
    assert outcome.failures == []
    found = [shares.get(node.key) for node in outcome.cluster.nodes]
    assert found == ([20, 20, 20, 4] if assignment == "capability" else [None] * 4)
