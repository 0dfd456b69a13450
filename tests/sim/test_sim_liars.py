"""Liars lie in their various ways, with only their own keys, and the swarm tolerates it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from random import Random
from typing import Any

import pytest

from p2ptrain.core.events import Effect, Publish, Send, SendHistory
from p2ptrain.core.messages import Evidence, Message, Proposal, Received, Vote
from p2ptrain.core.node import Node
from p2ptrain.sim import checkers as ck
from p2ptrain.sim import faults
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.keys import FakeSigner, node_key
from p2ptrain.sim.ledger import Checker
from p2ptrain.sim.liars import KINDS, MOOD_SECONDS, Schedule
from p2ptrain.sim.machine import ToSome
from p2ptrain.sim.rewriting import Liar, Said
from p2ptrain.sim.scenario import scenario_of
from tests.helpers.sim import MessageLog

Watch = Callable[[Liar, Sequence[Effect], Sequence[Said]], None]
OFTEN_BANNED = {"equivocate announcements", "bad payloads", "flood"}


def swarm(how: str, seed: int = 1, checkers: Sequence[Checker] = (), **changes: Any) -> Cluster:
    """Seven nodes of which two lie; others crash and come back, so that histories are asked for, and a cut makes
    members call for a branch."""
    scenario = {
        "sentence": "Two of seven lie.",
        "nodes": 7,
        "rounds": 12,
        "agreement": {"stall_seconds": 6, "settle_seconds": 2},
        "fault": [
            {"kind": "liar", "nodes": "f", "how": how, "at": 0.0},
            {"kind": "crash", "nodes": [0], "at": 4.0, "until": 9.0},
            {"kind": "partition", "groups": [[1, 2], [0, 3, 4, 5, 6]], "at": 12.0, "until": 30.0},
        ],
    }
    table = scenario | changes
    return Cluster(seed, scenario_of(table), [*ck.standard(), *checkers])


def watched(cluster: Cluster, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Runs the cluster and records the effects of liars."""
    for kind in {type(make(Random(0), FakeSigner(b"", b""), cluster)) for make in KINDS.values()}:
        if "rewrite" in vars(kind):
            monkeypatch.setattr(kind, "rewrite", _watching(kind.rewrite, watch))
    monkeypatch.setattr(Liar, "rewrite", _watching(Liar.rewrite, watch))
    faults.begin(cluster)
    cluster.run()
    return cluster


def _watching(rewrite: Callable[..., list[Said]], watch: Watch) -> Callable[..., list[Said]]:
    def watched_rewrite(self: Liar, core: Node, effects: Sequence[Effect]) -> list[Said]:
        said = rewrite(self, core, effects)
        watch(self, effects, said)
        return said

    return watched_rewrite


OCCASIONS: dict[str, list[dict[str, Any]]] = {  # what it takes to make them lie
    "false histories": [
        {"kind": "liar", "nodes": "f", "how": "false histories", "at": 0.0},
        {"kind": "crash", "nodes": [0], "at": 3.0, "until": 9.0},
        {"kind": "crash", "nodes": [1], "at": 5.0, "until": 10.0},
        {"kind": "join", "at": 6.0, "count": 24},
    ],
    "keep the dead": [
        {"kind": "liar", "nodes": "f", "how": "keep the dead", "at": 0.0},
        {"kind": "crash", "nodes": [0], "at": 4.0},
    ],
    **{
        how: [
            {"kind": "liar", "nodes": "f", "how": how, "at": 0.0},
            {"kind": "crash", "nodes": [0], "at": 4.0, "until": 9.0},
        ]
        for how in ("claim to be ahead", "endless histories", "false jumps")
    },
    "votes for all": [
        {"kind": "liar", "nodes": [5], "how": "votes for all", "at": 0.0},
        {"kind": "liar", "nodes": [6], "how": "false manifests", "at": 0.0},
    ],
    "double calls": [
        {"kind": "liar", "nodes": "f", "how": "double calls", "at": 0.0},
        {"kind": "partition", "groups": [[0, 1, 2], [3, 4, 5, 6]], "at": 5.0, "until": 12.9},
    ],
}


@pytest.mark.parametrize("how", KINDS)
def test_each_kind_lies_and_the_swarm_bears_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lies = refused = 0
    kind = type(KINDS[how](Random(0), FakeSigner(b"", b""), swarm(how)))
    serves = kind.serves

    def watch(liar: Liar, effects: Sequence[Effect], said: Sequence[Said]) -> None:
        nonlocal lies
        lies += type(liar) is kind and list(effects) != list(said)

    def refusing(self: Liar, *arguments: Any) -> bool:
        nonlocal refused
        is_served = serves(self, *arguments)
        refused += not is_served
        return is_served

    monkeypatch.setattr(kind, "serves", refusing)
    changes = {"fault": OCCASIONS[how]} if how in OCCASIONS else {}
    cluster = watched(swarm(how, **changes), watch, monkeypatch)
    assert (cluster.calendar.is_over, lies > 0) == (True, how != "no work")  # it says what others say
    assert refused > 0 or how != "withhold"
    banned = sorted(cluster.key_index[key] for key in cluster.metrics.banned)
    assert set(banned) <= {5, 6}
    assert banned == [5, 6] or how not in OFTEN_BANNED


@pytest.mark.parametrize("how", KINDS)
def test_a_liar_signs_with_its_own_key_only(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message in another's name is one that the other has sent, or nobody takes it."""
    log = MessageLog()
    fault = [{"kind": "liar", "nodes": "f", "how": how, "at": 0.0}]
    cluster = swarm(how, seed=2, checkers=[log], rounds=6, fault=fault)
    said: list[tuple[bytes, bytes]] = []

    def watch(liar: Liar, effects: Sequence[Effect], rewritten: Sequence[Said]) -> None:
        for effect in rewritten:
            if isinstance(effect, Publish | ToSome):
                said.append((liar.me, effect.envelope))
            elif isinstance(effect, Send):
                said.extend((liar.me, envelope) for envelope in effect.envelopes)

    watched(cluster, watch, monkeypatch)
    honest = {_core_of(cluster, envelope) for _, _, envelope in log.messages}
    for _, envelope in said:
        received = cluster.decode(envelope)
        author = getattr(received and received.message, "author", None)
        if received is not None and author is not None and cluster.key_index[author] not in (5, 6):
            assert _core_of(cluster, envelope) in honest
    assert said or how == "silent"


def _core_of(cluster: Cluster, envelope: bytes) -> tuple[bytes, bytes] | None:
    """Returns the signed part of a message, without its attachment."""
    received = cluster.decode(envelope)
    return (received.digest, getattr(received.message, "author", b"")) if received else None


def messages_of(cluster: Cluster, said: Sequence[Said]) -> list[Message]:
    decoded = [cluster.decode(each.envelope) for each in said if isinstance(each, Publish | ToSome)]
    return [received.message for received in decoded if isinstance(received, Received)]


def test_forkers_propose_two_manifests_and_vote_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    proposals: dict[tuple[Any, ...], set[bytes]] = {}
    votes: dict[tuple[Any, ...], set[bytes]] = {}

    def watch(liar: Liar, effects: Sequence[Effect], said: Sequence[Said]) -> None:
        for message in messages_of(cluster, said):
            match message:
                case Proposal(branch=branch, round=number, view=view, manifest=manifest):
                    proposals.setdefault((branch, number, view), set()).add(manifest)
                case Vote(branch=branch, round=number, view=view, manifest=manifest, author=author):
                    votes.setdefault((branch, number, view, author), set()).add(manifest)
                case _:
                    pass

    fault = [{"kind": "liar", "nodes": "f", "how": "fork", "at": 0.0}]
    for seed in range(1, 9):  # two votes convict them, mostly before it is their turn to propose
        cluster = swarm("fork", seed, links={"loss": 0.1}, fault=fault)
        with monkeypatch.context() as patched:
            watched(cluster, watch, patched)
    forked = {place: manifests for place, manifests in proposals.items() if len(manifests) == 2}
    assert forked, "some proposal was doubled"
    both = [place for place, choices in votes.items() if choices == forked.get(place[:3])]
    assert both, "and voted for before each half"


def test_colluders_change_their_lie_at_the_same_time() -> None:
    cluster = swarm("collude")
    liars = [
        KINDS["collude"](Random(seed), FakeSigner(cluster.setup.run_id, node_key(1, seed)), cluster) for seed in (5, 6)
    ]
    moods: list[list[str]] = []
    for cluster.calendar.now in (0.0, MOOD_SECONDS - 0.1, MOOD_SECONDS, 5.5 * MOOD_SECONDS):
        chosen = [liar._mood() for liar in liars if isinstance(liar, Schedule)]
        moods.append([type(mood).__name__ for mood in chosen])
    assert moods == [["Forks"] * 2, ["Forks"] * 2, ["EquivocatesVotes"] * 2, ["TwoFacedAvailabilities"] * 2]


def test_halves_are_the_whole_swarm_and_change_with_the_round() -> None:
    cluster = swarm("fork")
    liar = KINDS["fork"](Random(3), cluster.nodes[5].signer, cluster)
    others = {node.key for node in cluster.nodes if node.index != 5}
    halves = [liar.sides(number) for number in range(8)]
    assert all(set(left) | set(right) == others and not set(left) & set(right) for left, right in halves)
    assert any(one != other for one, other in combinations(halves, 2))
    assert halves == [liar.sides(number) for number in range(8)]


def test_a_liar_without_a_lie_is_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base class passes effects on unchanged."""
    monkeypatch.setitem(KINDS, "flood", Liar)
    cluster = swarm("flood", fault=[{"kind": "liar", "nodes": "f", "how": "flood", "at": 0.0}])
    changed: list[Sequence[Said]] = []

    def watch(liar: Liar, effects: Sequence[Effect], said: Sequence[Said]) -> None:
        changed.extend([said] if list(said) != list(effects) else [])

    assert (watched(cluster, watch, monkeypatch).calendar.is_over, changed) == (True, [])


def test_evidence_that_a_forger_makes_up_convicts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = swarm("forge")
    framed: list[Evidence] = []

    def watch(liar: Liar, effects: Sequence[Effect], said: Sequence[Said]) -> None:
        framed.extend(message for message in messages_of(cluster, said) if isinstance(message, Evidence))

    watched(cluster, watch, monkeypatch)
    assert (len(framed) > 0, cluster.metrics.banned) == (True, {})


def test_false_histories_are_told_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = swarm("false histories", fault=OCCASIONS["false histories"])
    told = 0

    def watch(liar: Liar, effects: Sequence[Effect], said: Sequence[Said]) -> None:
        nonlocal told
        told += sum(isinstance(effect, SendHistory) for effect in said)

    assert (watched(cluster, watch, monkeypatch).calendar.is_over, told > 0) == (True, True)
    cores = [node.core for node in cluster.nodes if node.honest and node.core is not None]
    assert sum(core.context.counters["histories refused"] for core in cores) > 0
