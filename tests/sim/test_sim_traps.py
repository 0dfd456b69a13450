"""Traps: each scenario fails without the rule that it tests.

The rule is broken in the running core, and the scenario of that name has to fail; with the rule the same seed passes
(test_sim_scenarios.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.core import catchup, manifest, regroup, roster
from p2ptrain.core import round as core_round
from p2ptrain.core.agreement import Act, Agreement, View
from p2ptrain.core.chain import common_branch
from p2ptrain.core.events import Apply
from p2ptrain.core.local_work import LocalWork
from p2ptrain.core.messages import Proposal
from p2ptrain.core.offers import Offers
from p2ptrain.core.repair import Repair
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import Scenario, load_scenario
from tests.helpers.sim import MessageLog

FOLDER = Path(__file__).parents[2] / "scenarios"
SEED = 1


def trap(name: str) -> Scenario:
    return load_scenario(FOLDER / f"trap-{name}.toml")


def heavier_branch_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes follow the longer history, whoever signed it."""

    def weigh(self: catchup.CatchingUp, asked: catchup.HistoryRequest, history: Any) -> catchup.Verified | None:
        line = self.chain
        common = common_branch(line.lineage, history.lineage)
        if common is None or history.round <= line.state.round:
            return None
        place = history.lineage.index(common)
        theirs, mine = history.lineage[place + 1 : place + 2], line.successor_of(common.branch)
        ends = [theirs[0].start if theirs else history.round, mine.start if mine else line.state.round]
        point = min(ends) if theirs or mine else ends[1]
        if (asked.branch, asked.round) != (common.branch, point):
            self._ask_again(asked, common.branch, point)
            return None
        return self._verify(asked, common.branch, point, history)

    monkeypatch.setattr(catchup.CatchingUp, "_weigh", weigh)
    monkeypatch.setattr(catchup.CatchingUp, "_may_follow", lambda self, *_: True)
    monkeypatch.setattr(catchup.CatchingUp, "_may_jump", lambda self, *_: True)


def absent_is_who_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that a proposal's availabilities do not name counts as absent, although others hear it."""
    make = manifest.manifest_of

    def manifest_of(state: Any, run: Any, named: list[Any], *rest: Any) -> Any:
        keys = {each.author for each in named}
        unnamed = [index for index, key in enumerate(state.members) if key not in keys]
        monkeypatch.setattr(manifest, "_unheard", lambda named, size, least: unnamed)
        return make(state, run, named, *rest)

    monkeypatch.setattr(core_round, "manifest_of", manifest_of)


def nobody_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller signs the set that it has at once."""
    tick = regroup.Regrouping.tick

    def hasty(self: regroup.Regrouping) -> None:
        object.__setattr__(self.context.run.agreement, "settle_seconds", 0)
        tick(self)

    monkeypatch.setattr(regroup.Regrouping, "tick", hasty)


def nothing_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repair, "hand_over", lambda self, here, hello: None)


def nothing_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_handed_over(monkeypatch)
    monkeypatch.setattr(core_round.Round, "say_again", lambda self: None)


def rounds_close_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds close after a minute, however long training takes."""
    collect, deadline = core_round.Round.collect, vars(core_round.Round)["deadline"].fget

    def closing(self: core_round.Round) -> None:
        if self.closed_at is None and self.context.now >= self.began + 60:
            self._close()
        else:
            collect(self)

    def sooner(self: core_round.Round) -> float | None:
        times = [deadline(self), self.began + 60 if self.closed_at is None else None]
        return min((time for time in times if time is not None), default=None)

    monkeypatch.setattr(core_round.Round, "collect", closing)
    monkeypatch.setattr(core_round.Round, "deadline", property(sooner))


def what_is_announced_counts_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members attest and vote for contributions that they have only heard of."""

    def attestable(self: Offers, state: Any, looks_at: Any) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        offers = [offer for each in self.by_author.values() for offer in each]
        return tuple(sorted(offer.name for offer in offers if state.may_take(offer.announcement, self.staleness))), ()

    monkeypatch.setattr(Offers, "attestable", attestable)
    monkeypatch.setattr(core_round.Round, "_payloads_are_here", lambda self, manifest: True)


def views_pass_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a cut, from the end of collecting on, each twice as long as the one before it, without an end; who has
    no proposal soon votes for nothing, and waits for the next view."""
    close, enter = core_round.Round._close, Agreement._enter

    def closing(self: core_round.Round) -> None:
        self.agreement.start(self.context.now)
        close(self)

    def ending(self: Agreement, view: View, now: float) -> Act | None:
        if self.view_timer is None:
            self.view_timer = now + self.seconds(self.view)
        return self._enter(self.view + 1, now) if now >= self.view_timer else None

    def entering(self: Agreement, number: int, now: float) -> Act:
        act = enter(self, number, now)
        self.timer = now + self.shortest
        return act

    monkeypatch.setattr(core_round.Round, "_close", closing)
    monkeypatch.setattr(Agreement, "_enter", entering)
    monkeypatch.setattr(Agreement, "_end_of_view", ending)
    monkeypatch.setattr(Agreement, "seconds", lambda self, view: self.shortest * 2.0**view)


def what_came_in_time_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node applies the contributions that it held when it stopped collecting."""
    close = core_round.Round._close
    held: dict[tuple[bytes, int], set[bytes]] = {}

    def closing(self: core_round.Round) -> None:
        held[self.context.me, self.number] = {*filter(self.pools.payloads.is_good, self.pools.payloads.held)}
        close(self)

    def apply_next(self: LocalWork, _: bool) -> None:
        entry = self.chain.entry(self.applied_round + 1)
        assert entry is not None, "nobody lags in this scenario"
        mine = held[self.context.me, entry.manifest.round]
        taken = tuple(each for each in entry.manifest.taken if each.payload in mine)
        self.applying = replace(entry.manifest, taken=taken)
        self.context.emit(Apply(self.applying))

    monkeypatch.setattr(core_round.Round, "_close", closing)
    monkeypatch.setattr(LocalWork, "_apply_next", apply_next)


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "heavier-branch": (heavier_branch_wins, "rounds that node 0 applied, from "),
    "dead-author": (what_is_announced_counts_as_held, "have not applied round 15"),
    "long-cut": (views_pass_by_the_clock, "of the faults' end"),
    "deadline": (what_came_in_time_is_applied, "have different manifests for round"),
    "absence": (absent_is_who_is_not_named, "members in the end are "),
    "settle": (nobody_settles, "branches begun: "),
    "lost-prevotes": (nothing_is_repaired, "have not applied round 40"),
    "lost-proposals": (nothing_is_handed_over, "have not applied round 30"),
    "empty-rounds": (rounds_close_by_the_clock, "contributions of node 0 were taken, expected "),
}
SLOW = {"settle"}  # two histories grow until the end: half a minute


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MUTATIONS]
)
def test_without_the_rule_the_scenario_falls_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, sentence = MUTATIONS[name]
    mutate(monkeypatch)
    failures = simulate(trap(name), SEED, standard()).failures
    assert any(sentence in failure for failure in failures), failures


# ---------------------------------------------------------------------------------------------------
# Who proposes


def proposers_of(scenario: Scenario) -> tuple[Cluster, dict[int, int]]:
    """Returns the first proposer of each round."""
    log = MessageLog()
    cluster = simulate(scenario, SEED, [log]).cluster
    said = [(index, received.message) for _, index, each in log.messages if (received := cluster.decode(each))]
    return cluster, {
        message.round: index for index, message in said if isinstance(message, Proposal) and not message.view
    }


def differing_rounds() -> list[int]:
    """Returns rounds whose proposer depends on the contributions, so that authors could choose the proposer."""
    scenario = trap("proposers")
    other = replace(scenario, training=replace(scenario.training, payload_bytes=41))
    (one, first), (two, second) = proposers_of(scenario), proposers_of(other)
    heads = [{at: each.digest for (_, at), each in cluster.metrics.manifests.items()} for cluster in (one, two)]
    assert all(heads[0][at] != heads[1][at] for at in heads[0].keys() & heads[1].keys())
    return [at for at in first.keys() & second.keys() if first[at] != second[at]]


def test_everyone_proposes_about_as_often_as_everyone_else() -> None:
    cluster, found = proposers_of(trap("proposers"))
    proposed = Counter(found.values())
    assert sum(proposed.values()) == len(cluster.metrics.manifests)
    assert all(10 <= proposed[index] <= 35 for index in range(8))  # 20 each in 160 rounds


def test_nothing_that_is_contributed_changes_who_proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing_rounds() == []
    begin, order = core_round.Round.__init__, roster.proposers
    head = b""

    def keyed_by_head(self: core_round.Round, context: Any, pools: Any, state: Any, *more: Any) -> None:
        nonlocal head
        head = state.head
        begin(self, context, pools, state, *more)

    monkeypatch.setattr(core_round.Round, "__init__", keyed_by_head)
    monkeypatch.setattr(core_round, "proposers", lambda run_id, branch, *rest: order(run_id, head, *rest))
    assert len(differing_rounds()) > 50, "an order that could be chosen is seen"
