"""The checkers have power: with a rule of the protocol switched off a seed finds it, and with the rule it is quiet."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from p2ptrain.core import context, roster
from p2ptrain.core.agreement import Agreement
from p2ptrain.core.events import Persist, Said
from p2ptrain.core.messages import NOTHING, Received
from p2ptrain.sim import keys
from p2ptrain.sim.checkers import safety, standard
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import scenario_of

SEEDS = range(40, 240)  # of which one in a hundred forks without locks
CUT_IN_HALF = {
    "sentence": "Three and three are cut apart, and neither half is a quorum.",
    "nodes": 6,
    "rounds": 20,
    "agreement": {"on_quorum_loss": "halt"},
    "fault": [{"kind": "partition", "at": 5, "until": 30, "groups": ["0-2", "3-5"]}],
}
FORGER = {
    "sentence": "One of four speaks in the others' names.",
    "nodes": 4,
    "rounds": 10,
    "fault": [{"kind": "liar", "nodes": [3], "how": "forge", "at": 0}],
}
KILLED = {
    "sentence": "Four nodes with slow disks are killed again and again.",
    "nodes": 4,
    "rounds": 20,
    "seconds": 600,
    "disk": {"fsync_seconds": 0.2, "kept": 0.0},
    "fault": [
        {"kind": "storm", "at": 2, "until": 20, "every_seconds": 2, "down_seconds": 1, "nodes": "all"},
    ],
}


def half_a_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    roster.roster_of.cache_clear()
    monkeypatch.setattr(roster, "quorum_of", lambda size: size // 2)


def any_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys.FakeSigner, "__call__", lambda *arguments: True)


def said_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish_once(
        self: context.Context, message: Received, backing: tuple[bytes, ...] = (), payloads: tuple[bytes, ...] = ()
    ) -> None:
        said = Said(message.envelope, backing, payloads)
        self.remember(message, said)
        self.publish(message)
        self.emit(Persist(said))

    monkeypatch.setattr(context.Context, "publish_once", publish_once)


@pytest.mark.parametrize(
    ("switch_off", "scenario", "seed", "found"),
    [
        (half_a_quorum, CUT_IN_HALF, 0, "the quorum is 5"),
        (any_signature, FORGER, 1, "bans node 0, which is honest"),
        (said_before_it_is_kept, KILLED, 0, "has made two of the same place"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_rule_that_is_switched_off_is_found_out(
    switch_off: Any, scenario: dict[str, Any], seed: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert simulate(scenario_of(scenario), seed, standard()).failures == []
    try:
        switch_off(monkeypatch)
        failures = simulate(scenario_of(scenario), seed, standard()).failures
    finally:
        roster.roster_of.cache_clear()  # of rosters with another quorum
    assert len(failures) == 1
    assert found in failures[0]


# ---------------------------------------------------------------------------------------------------
# Locking: it only matters when some have decided, the others have not seen it, and a liar proposes something else


def few_decide(seed: int) -> dict[str, Any]:
    """A liar of four, one member whom the others cannot hear by turns, and a network that loses much."""
    draw = Random(seed)
    lonely = draw.randrange(3)
    rest = [node for node in range(4) if node != lonely]
    return {
        "sentence": "A few decide what the others do not see, and a liar proposes something else.",
        "nodes": 4,
        "rounds": 30,
        "seconds": 90,
        "agreement": {
            "on_quorum_loss": "halt", "view_seconds": 1, "view_seconds_max": 2, "staleness_rounds_max": 2,
        },
        "training": {"seconds": 1.0, "spread": draw.choice([0.1, 0.5])},
        "links": {"loss": draw.choice([0.05, 0.1, 0.2]), "latency_seconds": 0.05},
        "fault": [
            {"kind": "liar", "nodes": [3], "how": draw.choice(["propose anew", "collude", "fork"]), "at": 0},
            {
                "kind": "partition", "groups": [rest, [lonely]], "one_way": True, "at": 1, "until": 80,
                "flap_seconds": draw.choice([1.0, 2.0, 4.0]),
            },
            {"kind": "lossy", "at": 1, "until": 80, "loss": draw.choice([0.2, 0.4])},
        ],
    }  # fmt: skip


def forks(seed: int) -> list[str]:
    failures = simulate(scenario_of(few_decide(seed)), seed, safety()).failures
    return [failure for failure in failures if "different manifests" in failure]


def test_without_locks_two_manifests_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a lock nor the manifest that was valid is kept from one view to the next."""
    with monkeypatch.context() as broken:
        for name, nothing in (("locked", NOTHING), ("locked_view", -1), ("valid", None), ("valid_view", -1)):
            broken.setattr(
                Agreement, name, property(lambda _, value=nothing: value, lambda _, value: None), raising=False
            )
        found = next(seed for seed in SEEDS if forks(seed))
    assert forks(found) == []
