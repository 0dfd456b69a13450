"""Checkers pass sound cores, and each catches the bug that it was written for.

First each checker by itself, shown one thing that must never happen after a clean run. Then the core with one of its
safeguards switched off, in a scenario made for that: some seed must make it fail, and with the safeguard the same seed
must pass. A change of the core shuffles what a seed leads to; then the search goes on from the seed that was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.core import events, history, manifest, regroup, roster
from p2ptrain.core.agreement import Agreement
from p2ptrain.core.events import Applied, Apply, CaughtUp, Certified, Effect, Event, Persist, Started, Tick
from p2ptrain.core.history import Beginning, Entry
from p2ptrain.core.messages import NOTHING, Announcement, Availability, Ballot, Received, Vote, encode, signed_bytes
from p2ptrain.core.node import Node
from p2ptrain.core.voice import Voice
from p2ptrain.sim import checkers as ck
from p2ptrain.sim import faults
from p2ptrain.sim.cluster import FAILURES, Cluster
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.ledger import Checker, Guarantee, Ledger, Violation, may_lie, quorum
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.outcome import CHECK_ROUNDS_FROM, simulate
from p2ptrain.sim.scenario import scenario_of
from p2ptrain.sim.watch import SWALLOWED_BETWEEN
from tests.helpers.sim import MessageLog, judged_simulation

# ---------------------------------------------------------------------------------------------------
# Each by itself


class Ran:
    """A clean run of four nodes, and the checkers that watched it."""

    def __init__(self, nodes: int = 4) -> None:
        self.checkers = ck.standard()
        scenario = scenario_of({"sentence": "Nothing happens.", "nodes": nodes, "rounds": 4})
        self.cluster = Cluster(1, scenario, self.checkers)
        faults.begin(self.cluster)
        self.cluster.run()
        self.node = self.cluster.nodes[0]
        assert self.node.core is not None
        self.history = list(self.node.core.participant.chain.steps)  # its disk may be behind
        self.last = self.history[-1]
        assert isinstance(self.last.step, Entry)
        self.entry = self.last.step
        self.manifest = self.entry.manifest

    def checker(self, kind: type[Checker]) -> Any:
        return next(checker for checker in self.checkers if type(checker) is kind)

    def show(self, kind: type[Checker], *effects: Effect, event: Event | None = None) -> str:
        """Returns a checker's complaint about this effect of node 0; empty if it has none."""
        try:
            self.checker(kind).after(self.cluster, 0, event or Tick(), effects)
        except Violation as violation:
            return str(violation)
        return ""

    def decide(self, **changes: Any) -> Persist:
        """Decides the last round again, with another manifest."""
        other = replace(self.manifest, **changes)
        certificate = replace(self.entry.certificate, manifest=other.digest)
        state = replace(self.last.state, head=other.digest)
        return Persist(Certified(Entry(other, certificate), state))


@pytest.fixture
def ran() -> Ran:
    return Ran()


def test_a_clean_run_shows_nothing(ran: Ran) -> None:
    again = Persist(ran.last)
    kinds = [ck.OneHistory, ck.RealQuorums, ck.EqualRoots, ck.NobodyHonestBanned, ck.NothingCensored]
    assert [ran.show(kind, again, Apply(ran.manifest)) for kind in kinds] == [""] * 5


def test_two_manifests_for_a_round_are_seen(ran: Ran) -> None:
    other = replace(ran.manifest, taken=())
    number = ran.manifest.round
    found = f"nodes {ran.checker(Ledger).decided[ran.manifest.branch, number][1]} and 0 have different manifests"
    assert ran.show(ck.OneHistory, Apply(other)).startswith(found)
    assert ran.show(ck.OneHistory, ran.decide(taken=())).startswith(found)
    undecided = Apply(replace(ran.manifest, round=99))
    assert ran.show(ck.OneHistory, undecided) == "node 0 applies round 99, which no honest node has decided"


def test_a_round_that_follows_nothing_is_seen(ran: Ran) -> None:
    found = ran.show(Ledger, ran.decide(parent=bytes(32), round=99))
    assert found == "node 0 decided round 99, which follows something that no honest node has decided"


def test_another_roster_than_the_manifests_make_is_seen(ran: Ran) -> None:
    fewer = replace(ran.last.state, members=ran.last.state.members[1:])
    found = ran.show(Ledger, Persist(Certified(ran.entry, fewer)))
    assert found == f"node 0 has a different roster after round {ran.manifest.round} than was agreed"


def test_certificates_without_a_real_quorum_are_seen(ran: Ran) -> None:
    certificate = ran.entry.certificate
    what = f"node 0's certificate for round {ran.manifest.round}"

    def shown(**changes: Any) -> str:
        entry = replace(ran.entry, certificate=replace(certificate, **changes))
        return ran.show(ck.RealQuorums, Persist(Certified(entry, ran.last.state)))

    assert shown() == ""
    few = {"seats": b"\x03", "signatures": certificate.signatures[:2]}
    assert shown(**few) == f"{what} has 2 of 4 members; the quorum is 3"
    beyond = {"seats": b"\x13", "signatures": certificate.signatures[:3]}
    assert shown(**beyond) == f"{what} has 3 of 4 members; the quorum is 3"
    twice = {"signatures": (*certificate.signatures[:2], certificate.signatures[0])}
    assert shown(**twice).startswith(f"{what} has a signature that node ")
    assert shown(view=certificate.view + 1).startswith(f"{what} has a signature that node ")
    assert shown(manifest=bytes(32)) == f"{what} is for something else"


def test_a_branch_that_its_members_did_not_sign_is_seen(ran: Ran) -> None:
    state = ran.last.state
    members = state.members[:3]
    begun = Beginning(state.branch, state.round, state.head, 0, members, members[:2], (bytes(64), bytes(64)))

    def shown(**changes: Any) -> str:
        return ran.show(ck.RealQuorums, Persist(Certified(replace(begun, **changes), state)))

    what = f"node 0's branch after round {state.round}"
    assert shown().startswith(f"{what} has a signature that node ")
    assert shown(signers=members[:1]) == f"{what} is signed by 1 of 3 members"
    assert shown(signers=(members[0], bytes(32))) == f"{what} is signed by 2 of 3 members"
    assert shown(members=(*members, bytes(32))).startswith(f"{what} is signed by 2 of 4 members")
    assert (
        shown(members=(bytes(32), *members[1:]), signers=members[1:])
        == f"{what} has members that were not members before"
    )


def test_roots_that_differ_or_come_from_nowhere_are_seen(ran: Ran) -> None:
    number, wrong = ran.manifest.round, bytes(32)
    found = ran.show(ck.EqualRoots, event=Applied(ran.manifest.branch, number, wrong))
    assert found.endswith(f"and 0 have different roots after round {number}")
    nowhere = ran.show(ck.EqualRoots, event=CaughtUp(2, b"\1" * 32))
    assert nowhere == "node 0 fetched a state of round 2 that no honest node has had"
    claimed = ran.show(ck.EqualRoots, ran.decide(root_round=2, root=b"\1" * 32))
    assert claimed == f"round {number} certifies a root that no honest node has computed"


def test_rounds_that_go_back_are_seen(ran: Ran) -> None:
    number = ran.manifest.round
    again = f"node 0 decided round {number} after round {number} of the same branch"
    assert ran.show(ck.OnlyForward, Persist(ran.last)) == again
    assert ran.show(ck.OnlyForward, Apply(ran.manifest)).startswith(f"node 0 applied round {number} after")
    older = ran.history[:-1]
    restart = Started(replace(ran.node.disk.saved(), history=tuple(older)))
    assert ran.show(ck.OnlyForward, event=restart) == ""
    assert ran.show(ck.OnlyForward, Persist(ran.last), Apply(ran.manifest)) == ""


def test_a_ban_of_an_honest_node_is_seen(ran: Ran) -> None:
    victim = ran.cluster.nodes[2]
    banned = ran.decide(banned=(victim.key,))
    found = f"round {ran.manifest.round} bans node 2, which is honest"
    assert ran.show(ck.NobodyHonestBanned, banned) == found
    victim.honest = False
    assert ran.show(ck.NobodyHonestBanned, banned) == ""


def test_a_buffer_beyond_its_bound_is_seen(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "limits", lambda self: {"letters": (3, 3), "parcels": (5, 4)})
    seen = [ran.show(ck.BoundedBuffers) for _ in range(ck.EVENTS_BETWEEN)]
    assert [found for found in seen if found] == ["node 0 keeps 5 parcels; the bound is 4"]


def test_a_flood_that_is_only_taken_in_is_seen(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's own limits hold; this one grows with every message and says nothing."""
    heard: dict[int, int] = {}

    def swallow(self: Node, event: Event, now: float) -> list[Effect]:
        heard[id(self)] = heard.get(id(self), 0) + 1
        return []

    message = events.MessageReceived(
        ran.cluster.nodes[1].key,
        signed(ran.cluster.nodes[1], Vote(bytes(32), 1, 0, Ballot.PREVOTE, NOTHING, bytes(32))),
    )
    monkeypatch.setattr(Node, "handle", swallow)
    monkeypatch.setattr(Node, "limits", lambda self: {"letters": (heard[id(self)], 100)})
    for is_sparing in (False, True):
        ran.cluster.watch.is_sparing = is_sparing
        with pytest.raises(Violation, match=r"node 0 keeps \d+ letters; the bound is 100"):
            for _ in range(SWALLOWED_BETWEEN):
                ran.cluster.give(ran.node, message)


def signed(node: SimNode, message: Any) -> Received:
    return Received(
        message, bytes(32), encode(message, node.signer.sign(signed_bytes(node.signer.run_id, message))), b""
    )


def attested(ran: Ran, *held: Sequence[int], **changes: Any) -> str:
    """The verdict on a manifest for a new round, empty except for `changes`. Each node offers something, and `held`
    says by node whose offers it names in its availability."""
    nodes, branch, number = ran.cluster.nodes, ran.manifest.branch, ran.manifest.round + 1
    checker = ran.checker(ck.NothingCensored)
    offers = {}
    for node in nodes:
        message = Announcement(branch, number, number - 1, bytes(32), bytes(32), 40, bytes(16), 1, 2, 0, node.key)
        received = ran.cluster.decode(signed(node, message).envelope)
        assert received is not None
        offers[node.index] = received
        checker.said(ran.cluster, node.index, received.envelope)
    for node, known in zip(nodes, held, strict=False):
        names = tuple(sorted(offers[index].digest[:16] for index in known))
        message = Availability(branch, number, 0, bytes(32), names, (), (), b"", node.key)
        checker.said(ran.cluster, node.index, signed(node, message).envelope)
    next_one = replace(ran.manifest, round=number, parent=ran.manifest.digest, **{"taken": (), **changes})
    return ran.show(ck.NothingCensored, Persist(Certified(Entry(next_one, ran.entry.certificate), ran.last.state)))


def test_what_everyone_holds_and_nobody_takes_is_seen(ran: Ran) -> None:
    number = ran.manifest.round + 1
    found = f"round {number} leaves out node 2's contribution of round {number}, which every honest member holds"
    assert attested(ran, [0, 2], [1, 2], [2], [2, 3]) == found


def test_what_a_large_swarm_leaves_out_is_seen_though_checkers_look_at_decisions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = scenario_of({"sentence": "Nothing happens.", "nodes": CHECK_ROUNDS_FROM, "rounds": 2})
    assert simulate(scenario, 1, ck.standard()).is_good
    whole = manifest.attested
    monkeypatch.setattr(manifest, "attested", lambda fields, least: whole(fields, least)[1:])
    (failure,) = simulate(scenario, 1, ck.standard()).failures
    assert re.search(r"leaves out node \d+'s contribution of round 1, which every honest member holds$", failure)


def test_what_one_of_them_lacks_may_be_left_out(ran: Ran) -> None:
    assert attested(ran, [0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]) == ""


def test_what_was_held_too_late_does_not_count(ran: Ran) -> None:
    """Who has missed the decision may still say what it holds; by then it holds what came after."""
    number = ran.manifest.round + 1
    ran.checker(Ledger).decided[ran.manifest.branch, number] = (bytes(32), 1)
    assert attested(ran, [0, 1, 2, 3], [0, 1, 2, 3]) == ""


@pytest.mark.parametrize("changes", [{"banned": 2}, {"leaves": 2}])
def test_who_is_out_need_not_be_taken(ran: Ran, changes: dict[str, int]) -> None:
    out: dict[str, Any] = {name: (ran.cluster.nodes[index].key,) for name, index in changes.items()}
    assert attested(ran, [2], [2], [2], [2], **out) == ""


def test_an_older_contribution_of_the_same_author_goes_first(ran: Ran) -> None:
    key = ran.cluster.nodes[2].key
    older = tuple(replace(each, round=2) for each in ran.manifest.taken if each.author == key)
    newer = tuple(replace(each, round=99) for each in ran.manifest.taken if each.author == key)
    assert attested(ran, [2], [2], [2], [2], taken=older) == ""
    assert attested(ran, [2], [2], [2], [2], taken=newer) != ""


def test_a_root_of_a_device_in_which_a_bit_has_flipped_may_be_had_but_not_certified(ran: Ran) -> None:
    number, wrong, state = ran.manifest.round, b"\1" * 32, ran.node.state
    state.is_wrong = True
    assert ran.show(ck.EqualRoots, event=Applied(ran.manifest.branch, number, wrong)) == ""
    claimed = ran.show(ck.EqualRoots, ran.decide(root_round=number, root=wrong))
    assert claimed == f"round {number} certifies a root that no honest node has computed"


def test_two_votes_in_one_place_are_seen(ran: Ran) -> None:
    node = ran.node
    first = Vote(ran.manifest.branch, 9, 0, Ballot.PREVOTE, NOTHING, node.key)
    checker = ran.checker(ck.OneVoice)
    for message in (first, replace(first, view=1), first):
        checker.said(ran.cluster, 0, signed(node, message).envelope)
    other = replace(first, manifest=bytes([1]) * 32)
    checker.said(ran.cluster, 1, signed(node, other).envelope)  # node 1 hands over what node 0 is said to have said
    with pytest.raises(Violation, match="node 0, which is honest, has made two of the same place: vote of round 9"):
        checker.said(ran.cluster, 0, signed(node, other).envelope)


def test_too_many_views_after_the_faults_are_seen(ran: Ran) -> None:
    late = replace(ran.entry, certificate=replace(ran.entry.certificate, view=17))
    found = ran.show(ck.Recovered, Persist(Certified(late, ran.last.state)))
    assert found == f"round {ran.manifest.round} took 17 views after the faults were over"


def test_a_swarm_that_does_not_go_on_is_seen(ran: Ran) -> None:
    ran.checker(ck.Recovered).at_end(ran.cluster)
    ran.cluster.calendar.is_over, ran.cluster.goal.round = False, 99
    with pytest.raises(Violation, match=r"s, and nodes \[0, 1, 2, 3\] have not applied round 99"):
        ran.checker(ck.Recovered).at_end(ran.cluster)


def test_two_histories_in_the_end_are_seen(ran: Ran) -> None:
    ledger, node = ran.checker(Ledger), ran.cluster.nodes[3]
    other = ran.decide(taken=()).record
    assert isinstance(other, Certified)
    node.disk.history[-1] = other
    ledger.guarantees[other.state.head] = Guarantee.EVERYTHING
    with pytest.raises(Violation, match="of a different history from node"):
        ran.checker(ck.Recovered).at_end(ran.cluster)


@pytest.mark.parametrize(
    ("nodes", "liars", "guarantee"),
    [
        (1, 0, Guarantee.EVERYTHING),
        (3, 0, Guarantee.EVERYTHING),
        (3, 1, Guarantee.NOTHING),
        (4, 1, Guarantee.EVERYTHING),
        (4, 2, Guarantee.NOTHING),
        (6, 1, Guarantee.EVERYTHING),
        (6, 2, Guarantee.ONE_HISTORY),
        (6, 4, Guarantee.NOTHING),
        (7, 2, Guarantee.EVERYTHING),
        (7, 3, Guarantee.NOTHING),
    ],
)
def test_what_is_promised_depends_on_how_many_lie(nodes: int, liars: int, guarantee: Guarantee) -> None:
    ran = Ran(nodes)
    for node in ran.cluster.nodes[:liars]:
        node.honest = False
    ledger = Ledger()
    ledger.after(ran.cluster, nodes - 1, Tick(), [])
    assert ledger.promises(ran.cluster.setup.genesis.head) is guarantee


def test_a_roster_that_promised_nothing_taints_what_follows(ran: Ran) -> None:
    """Once too many have lied, it does not help that they have left."""
    ledger, head = Ledger(), ran.last.state.head
    for node in ran.cluster.nodes[:2]:
        node.honest = False
    ledger.after(ran.cluster, 3, Tick(), [Persist(certified) for certified in ran.history])
    honest = tuple(sorted(node.key for node in ran.cluster.nodes[2:]))
    begun = Beginning(ran.manifest.branch, ran.manifest.round, head, 0, honest, honest, (bytes(64), bytes(64)))
    state = ran.last.state.regrouped(begun.branch, honest)
    ledger.after(ran.cluster, 3, Tick(), [Persist(Certified(begun, state))])
    assert (ledger.rosters[begun.branch], ledger.promises(begun.branch)) == (honest, Guarantee.NOTHING)


def test_quorums_are_those_of_the_design() -> None:
    assert [quorum(size) for size in range(1, 11)] == [1, 2, 2, 3, 4, 5, 5, 6, 7, 7]
    assert [may_lie(size) for size in range(1, 11)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


# ---------------------------------------------------------------------------------------------------
# Cores without a safeguard

Table = dict[str, Any]


def base(nodes: int, **changes: Any) -> Table:
    agreement = {"on_quorum_loss": "halt"}
    return {
        "sentence": "A core is broken.",
        "nodes": nodes,
        "rounds": 15,
        "seconds": 90.0,
        "agreement": agreement,
        **changes,
    }


def without_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members forget their lock as soon as they precommit."""
    monkeypatch.setattr(Agreement, "locked", property(lambda self: NOTHING, lambda self, value: None), raising=False)
    monkeypatch.setattr(Agreement, "locked_view", property(lambda self: -1, lambda self, value: None), raising=False)


def cut_off_deciders(seed: int) -> Table:
    """Now and then two nodes hear everyone and are heard by nobody: they decide, the others may not, and two liars
    then propose something else."""
    draw = Random(seed)
    cuts, at = [], 0.0
    for _ in range(4):
        at += draw.uniform(0.5, 2.5)
        deciders = draw.sample(range(5), 2)
        rest = [node for node in range(7) if node not in deciders]
        cuts.append({"kind": "partition", "groups": [rest, deciders], "one_way": True, "at": at, "until": at + 15.0})
        at += 17.0
    liars = {"kind": "liar", "nodes": "f", "how": "propose anew", "at": 0.0}
    agreement = {"on_quorum_loss": "halt", "view_seconds": 1, "view_seconds_max": 1}
    training = {"seconds": 0.3, "spread": draw.choice([0.1, 1.0])}
    return base(7, rounds=99, seconds=at, agreement=agreement, training=training, fault=[liars, *cuts])


def without_intersection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the members are a quorum, so that two quorums may be disjoint."""
    for module in (roster, history, regroup):
        monkeypatch.setattr(module, "quorum_of", lambda size: max(1, size // 2))


def in_halves(seed: int) -> Table:
    draw = Random(seed)
    nodes = draw.choice([4, 6, 8])
    order = draw.sample(range(nodes), nodes)
    cut = {"kind": "partition", "groups": [order[: nodes // 2], order[nodes // 2 :]], "at": 3.0, "until": 20.0}
    return base(nodes, fault=[cut])


def without_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures are not verified."""
    monkeypatch.setattr(FakeSigner, "checks", False)


def among_forgers(seed: int) -> Table:
    nodes = Random(seed).choice([4, 5, 7])
    return base(nodes, fault=[{"kind": "liar", "nodes": "f", "how": "forge", "at": 0.0}])


def without_persistence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes are sent but never saved."""
    once = Voice.publish_once

    def publish(self: Voice, message: Received, *more: Any, **named: Any) -> None:
        if isinstance(message.message, Vote):
            self._publish(message)
        else:
            once(self, message, *more, **named)

    monkeypatch.setattr(Voice, "publish_once", publish)


def in_a_storm(seed: int) -> Table:
    draw = Random(seed)
    nodes = draw.choice([4, 5, 7])
    storm = {"kind": "storm", "nodes": "all", "at": 1.0, "until": 60.0, "at_once": nodes}
    storm |= {"every_seconds": draw.choice([0.5, 1.0, 3.0]), "down_seconds": draw.choice([0.05, 0.3])}
    return base(nodes, training={"seconds": 0.2}, links={"loss": draw.choice([0.0, 0.1, 0.3])}, fault=[storm])


SEARCH = 100  # seeds, should the one that was found lead nowhere any more

MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[int], Table], type[Checker], str, int]] = {
    "locking": (without_locking, cut_off_deciders, ck.OneHistory, "have different manifests for round", 14),
    "quorum intersection": (without_intersection, in_halves, ck.OneHistory, "have different manifests for round", 0),
    "real quorums": (without_intersection, in_halves, ck.RealQuorums, "the quorum is", 0),
    "signature checks": (without_signatures, among_forgers, ck.RealQuorums, "a signature that node", 12),
    "signatures under evidence": (without_signatures, among_forgers, ck.NobodyHonestBanned, "which is honest", 0),
    "persistence before voting": (without_persistence, in_a_storm, ck.OneVoice, "two of the same place: vote", 2),
}


@pytest.fixture
def fresh_rosters() -> Iterator[None]:
    """Rosters remember their quorums."""
    roster.roster_of.cache_clear()
    yield
    roster.roster_of.cache_clear()


def only(kind: type[Checker]) -> list[Checker]:
    """The ledger, and one checker that asks it: each has to find what it is there for without help."""
    checkers = ck.safety()
    return [checkers[0], *(checker for checker in checkers if type(checker) is kind)]


def run(table: Table, seed: int, checkers: Sequence[Checker]) -> tuple[Cluster, str]:
    """Runs a scenario until it ends, or until a checker or the core fails."""
    scenario = scenario_of(table)
    cluster = Cluster(seed, scenario, checkers)
    faults.begin(cluster)
    try:
        cluster.run()
    except (Violation, *FAILURES) as error:
        return cluster, str(error) or type(error).__name__
    return cluster, ""


@pytest.mark.usefixtures("fresh_rosters")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_core_without_it_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, table, kind, sentence, found_at = MUTATIONS[name]
    with monkeypatch.context() as patch:
        mutate(patch)
        seeds = (found_at, *range(SEARCH))
        caught = next((seed for seed in seeds if sentence in run(table(seed), seed, only(kind))[1]), None)
    assert caught is not None, f"no seed catches a core without {name}"
    roster.roster_of.cache_clear()
    assert run(table(caught), caught, ck.safety())[1] == ""


@pytest.mark.usefixtures("fresh_rosters")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("locking", "prevoted something else"),
        ("locking", "2 manifests could have a certificate"),
        ("quorum intersection", "in which no quorum prevoted it"),
        ("persistence before voting", "an honest node signed two votes for one place"),
    ],
)
def test_the_judge_of_histories_sees_it_too(name: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, table, _, _, found_at = MUTATIONS[name]
    mutate(monkeypatch)
    for seed in (found_at, *range(SEARCH)):
        ledger, log = Ledger(), MessageLog()
        cluster, _ = run(table(seed), seed, [ledger, log])
        if any(sentence in problem for problem in judged_simulation(cluster, ledger, log)):
            return
    pytest.fail(f"no seed shows the judge a core without {name}")
