"""Lies that once worked: without the rule against it, the scenario of the lie fails.

The rule is broken in the running core; with it the same seed passes (test_sim_scenarios.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.core.catchup import CatchingUp, HistoryRequest
from p2ptrain.core.events import Certified, MessageReceived, Persist, Tick, Trunk
from p2ptrain.core.inbox import Inbox
from p2ptrain.core.repair import Repair
from p2ptrain.sim.branch_lies import FalseJumps
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.ledger import Guarantee, Ledger, Violation
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import load_scenario, scenario_of

FOLDER = Path(__file__).parents[2] / "scenarios"
SEED = 1
SEEDS = range(1, 25)  # not every seed gives a lie its chance


def whoever_is_quoted_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts a member as alive if anybody quotes it, even with an old message."""
    take = Inbox.take

    def taking(self: Inbox, event: MessageReceived) -> Any:
        author = getattr(event.received.message, "author", b"")
        if author in self.chain.state.place:
            self.context.heard_at[author] = self.context.now
        return take(self, event)

    monkeypatch.setattr(Inbox, "take", taking)


def whoever_asks_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repair, "may_send", lambda self, *_: True)
    monkeypatch.setattr(Repair, "may_tell_history", lambda self, peer: True)


def a_question_leads_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_again(self: CatchingUp, asked: HistoryRequest, branch: bytes, point: int) -> None:
        self._ask(asked.peer, branch, point)

    monkeypatch.setattr(CatchingUp, "_ask_again", ask_again)


def every_claim_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CatchingUp, "is_behind", property(lambda self: bool(self.ahead)))


def every_jump_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CatchingUp, "_may_jump", lambda self, *_: True)
    monkeypatch.setattr(CatchingUp, "_may_follow", lambda self, *_: True)


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "keep-the-dead": (whoever_is_quoted_is_alive, "members in the end are "),
    "ask": (whoever_asks_is_answered, "rounds a minute, of "),
    "endless-histories": (a_question_leads_to_another, "have not applied round "),
    "claim-to-be-ahead": (every_claim_is_believed, "members in the end are "),
    "false-jumps": (every_jump_is_followed, "have not applied round "),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_the_rule_the_lie_works_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, sentence = MUTATIONS[name]
    mutate(monkeypatch)
    scenario = load_scenario(FOLDER / f"liar-{name}.toml")
    failures = (failure for seed in SEEDS for failure in simulate(scenario, seed, standard()).failures)
    assert any(sentence in failure for failure in failures)


# ---------------------------------------------------------------------------------------------------
# Branches of liars alone


def test_a_roster_of_liars_alone_does_not_come_into_force() -> None:
    """Else a newcomer that is led away would end the run, or what is promised in it."""
    fault = [{"kind": "liar", "nodes": "f", "how": "coup", "at": 0.0}]
    cluster = Cluster(SEED, scenario_of({"sentence": "One.", "nodes": 7, "rounds": 3, "fault": fault}), standard())
    checkers, keys = cluster.watch.checkers, sorted(node.key for node in cluster.nodes[5:])
    cluster.watch.roster_came_into_force(cluster, replace(cluster.setup.genesis, members=tuple(keys)), was_lost=False)
    assert (cluster.watch.is_beyond, cluster.calendar.is_over, cluster.watch.checkers) == (False, False, checkers)
    cluster.watch.roster_came_into_force(
        cluster, replace(cluster.setup.genesis, members=tuple(sorted([*keys, cluster.nodes[0].key])))
    )
    assert (cluster.watch.is_beyond, cluster.calendar.is_over) == (True, True)


def test_one_who_believes_in_a_jump_to_liars_alone_has_broken_nothing() -> None:
    """Not yet: it has no seat, and comes back. What follows something else that nobody decided is still a violation."""
    fault = [{"kind": "liar", "nodes": "f", "how": "false jumps", "at": 0.0}]
    cluster = Cluster(SEED, scenario_of({"sentence": "One.", "nodes": 7, "rounds": 3, "fault": fault}))
    for is_liar in (True, False):
        ledger, author = Ledger(), cluster.nodes[5 if is_liar else 0]
        base = replace(cluster.setup.genesis, branch=bytes(32), head=bytes(32), round=20, members=(author.key,))
        liar = FalseJumps(Random(SEED), author.signer, cluster)
        entry, state = liar._alone(base, cluster.setup.run_config)
        record = Certified(entry, state, Trunk((), (), (), base))
        if is_liar:
            ledger.after(cluster, 1, Tick(), [Persist(record)])
            assert ledger.promises(state.head) is Guarantee.NOTHING
        else:
            with pytest.raises(Violation, match="which follows something that no honest node has decided"):
                ledger.after(cluster, 1, Tick(), [Persist(record)])
