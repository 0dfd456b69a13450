"""Admission in the simulator: invitations and allowlists decide, and scenarios fail if they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.core import admission
from p2ptrain.core.manifest import NO_BEARER, Join
from p2ptrain.errors import ConfigError, RemoteProtocolError
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.keys import node_key
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import load_scenario, scenario_of
from p2ptrain.sim.swarm import draw

FOLDER = Path(__file__).parents[2] / "scenarios"
SEED = 1

Lenient = Callable[..., Join]
check = admission._join


def everyone(message: Any, *_: Any) -> Join:
    return Join(message.author, NO_BEARER, 0, 0)


# The manifest looks at a ticket's bearer and last round once more; so what is let in here gets others.


def whoever_shows_a_spent_ticket(message: Any, state: Any, *rest: Any) -> Join:
    return replace(check(message, replace(state, spent=()), *rest), bearer=message.author)


def whoever_shows_an_old_ticket(message: Any, state: Any, *rest: Any) -> Join:
    return replace(check(message, replace(state, round=0), *rest), last_round=2**40)


def whoever_shows_any_ticket(message: Any, *_: Any) -> Join:
    if not message.claim:
        raise RemoteProtocolError("no invitation")
    ticket = admission.decode_claim(message.claim).ticket
    return Join(message.author, ticket.bearer, ticket.uses, ticket.last_round)


def whoever_shows_a_stolen_ticket(message: Any, *rest: Any) -> Join:
    try:
        return check(message, *rest)
    except RemoteProtocolError as error:
        if "not signed for this key" not in error.why:
            raise
        ticket = admission.decode_claim(message.claim).ticket
        return Join(message.author, message.author, 1, ticket.last_round)


LENIENT: list[tuple[str, Lenient, list[int]]] = [
    ("invite-only", everyone, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    ("invite-only", whoever_shows_a_stolen_ticket, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ("invite-only", whoever_shows_a_spent_ticket, [0, 1, 2, 3, 4, 5, 6, 7, 9]),
    ("invite-only", whoever_shows_an_old_ticket, [0, 1, 2, 3, 4, 5, 6, 7, 10]),
    ("invite-only", whoever_shows_any_ticket, [0, 1, 2, 3, 4, 5, 6, 7, 11]),
    ("allowlist", everyone, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
]


@pytest.mark.parametrize(("name", "lenient", "members"), LENIENT)
def test_the_scenario_notices_who_should_not_be_in(
    name: str, lenient: Lenient, members: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_join", lenient)
    failures = simulate(load_scenario(FOLDER / f"{name}.toml"), SEED, standard()).failures
    assert any(f"members in the end are {members}, " in failure for failure in failures), failures


@pytest.mark.parametrize("name", ["invite-only", "allowlist"])
def test_nobody_gets_in_whom_nobody_lets_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario also notices if admission refuses everybody."""
    scenario = load_scenario(FOLDER / f"{name}.toml")
    faults = [replace(fault, ticket="none") for fault in scenario.fault]
    failures = simulate(replace(scenario, fault=faults, admission_keys=[0]), SEED, standard()).failures
    assert "members in the end are [0, 1, 2, 3, 4, 5], " in failures[0]


def table(**changes: Any) -> dict[str, Any]:
    return {"sentence": "One.", "nodes": 4, "rounds": 3, "admission": {"policy": "invite"}, **changes}


def test_keys_are_those_of_the_nodes_of_this_seed() -> None:
    scenario = scenario_of(table(admission_keys=[1, 3]))
    for seed in (1, 2):
        keys = Cluster(seed, scenario).setup.run_config.admission.keys
        assert keys == (node_key(seed, 1).hex(), node_key(seed, 3).hex())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, "Add the public keys for invite"),
        ({"admission_keys": [4]}, "admission_keys: there is no node 4. Name nodes from 0 to 3"),
        ({"admission_keys": [-1]}, "admission_keys: there is no node -1. Name nodes from 0 to 3"),
        ({"admission_keys": [1], "admission": {}}, "keys belong to policy"),
        ({"admission_keys": "some"}, "admission_keys: 'some' names no nodes. "),
    ],
)
def test_keys_that_cannot_be_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario_of(table(**changes), "s.toml")
    assert complaint in str(caught.value)


def test_every_policy_and_every_ticket_is_drawn() -> None:
    drawn = [draw(seed) for seed in range(300)]
    assert {scenario.admission.get("policy", "open") for scenario in drawn} == {"open", "invite", "allowlist"}
    tickets = {ticket for scenario in drawn for fault in scenario.fault if (ticket := getattr(fault, "ticket", ""))}
    assert tickets == {"none", "new", "spent", "stolen", "expired", "false"}
