"""A whole swarm in one process agrees, through crashes, newcomers and departures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import DataError
from p2ptrain.node import driver
from p2ptrain.observe.build import peers_of
from p2ptrain.replay import replay
from p2ptrain.store.store import Store
from tests.helpers.memory_swarm import FOUNDERS, Member, swarm
from tests.helpers.net import at, skipping_time, until


@skipping_time
async def test_four_nodes_apply_the_same_rounds_and_their_logs_run_again(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(10)
        made.compare(10)
        for node in made.nodes:
            status = node.status
            assert status["health"] == []
            assert status["fault_tolerance"] == {"liars": 1, "crashes": 1, "mode": "byzantine"}
            assert len(status["peers"]) == 3
            assert len(peers_of(node.daemon).peers) == 3
            assert 8 in dict(node.daemon.edges.served_blobs.states.places())
        taken = [node.status["counters"]["contributions taken"] for node in made.nodes]
        assert sum(taken) >= 32  # of 40: a lost message costs its node two rounds, and threads say which are lost
        edges = made.nodes[0].daemon.edges
        assert (edges.mailboxes._upload.rate, edges.fetching.fetcher.download.rate) == (10**9, 2 * 10**9)
        for node in made.nodes[1:]:  # also if it is killed now: whom it joined by
            assert node.daemon.edges.persistence.store.records.addresses() == [made.network.address(made.nodes[0].key)]
        directories = [node.daemon.edges.persistence.store.directory for node in made.nodes]
    for directory in directories:
        logs = sorted((directory / "events").glob("*.jsonl"))
        assert logs
        again = replay(logs[-1])
        assert again.difference == ""
        assert again.events > 100


@skipping_time
async def test_one_that_crashes_is_not_missed_and_comes_back_from_its_disk(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        *others, victim = made.nodes
        await made.reach(6)
        await victim.crash()
        was = victim.applied
        await made.reach(was + 12, *others)
        await victim.start()
        assert was - 10 < victim.applied <= was  # from a checkpoint, or the first weights
        await made.reach(made.newest + 3)
        await until(lambda: victim.status["health"] == [] and victim.key in others[0].members)
        made.compare(20)


@skipping_time
async def test_one_that_was_cut_off_follows_when_the_network_heals(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        *others, lonely = made.nodes
        await made.reach(4)
        for other in others:
            made.network.cut(lonely.key, other.key)
        stood = lonely.applied
        await made.reach(stood + 10, *others)
        assert lonely.applied <= stood + 1
        assert "no peers" in lonely.status["health"]
        made.network.heal()
        await made.reach(made.newest + 3)
        made.compare(15)
        await until(lambda: lonely.status["health"] == [])


@skipping_time
async def test_two_halves_stop_and_go_on_together(tmp_path: Path) -> None:
    async with swarm(tmp_path, on_quorum_loss="halt") as made:
        await made.reach(4)
        for one in made.nodes[:2]:
            for other in made.nodes[2:]:
                made.network.cut(one.key, other.key)
        now = asyncio.get_running_loop().time()
        stood = made.newest
        await at(now + 120.0)
        assert made.newest <= stood + 1
        made.network.heal()
        await made.reach(made.newest + 5)
        made.compare(8)


@skipping_time
async def test_a_newcomer_gets_data_and_state_from_the_others_and_takes_part(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(10)
        newcomer = Member(made, FOUNDERS)
        made.nodes.append(newcomer)
        await newcomer.start()
        await until(lambda: newcomer.key in made.nodes[0].members)
        await made.reach(made.newest + 3)
        adopted = [number for what, number, *_ in newcomer.workshop.replica.chain.done if what == "adopt"]
        assert adopted
        assert newcomer.workshop.replica.chain.dataset is not None
        assert newcomer.workshop.replica.chain.dataset.missing_anywhere() == []
        assert newcomer.status["counters"]["contributions taken"] >= 1
        assert newcomer.status["health"] == []
        made.compare(13)


@skipping_time
async def test_who_leaves_is_missed_by_nobody_and_may_come_again(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        *others, leaver = made.nodes
        await made.reach(5)
        await leaver.leave()
        assert leaver.why
        rounds = [int(path.name.split("-")[-1]) for path in leaver.directory.glob("runs/*/checkpoints/*")]
        assert max(rounds) == leaver.workshop.replica.chain.round >= 5  # the last thing it does is to save where it was
        await until(lambda: all(leaver.key not in node.members for node in others))  # who leaves hears of it first
        await made.reach(made.newest + 5, *others)
        assert all(len(node.members) == 3 for node in others)
        await leaver.start()
        await until(lambda: leaver.key in others[0].members)
        await made.reach(made.newest + 3)
        made.compare(15)


@skipping_time
async def test_a_disk_in_trouble_is_told_in_the_status_and_stops_one_node_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm(tmp_path) as made:
        *others, victim = made.nodes
        await made.reach(4)
        store, write = victim.daemon.edges.persistence.store, Store.write
        full: Callable[..., None]

        def full(self: Store, records: Any) -> None:
            if self is store:
                raise DataError("the disk is full")
            write(self, records)

        monkeypatch.setattr(Store, "write", full)
        await until(lambda: bool(victim.daemon.driver.effects.disk_trouble))
        stood = victim.applied
        await made.reach(stood + 10, *others)
        assert victim.status["health"][0] == "degraded: the disk is full"
        assert victim.applied <= stood + 1
        monkeypatch.undo()
        await made.reach(made.newest + 3)
        await until(lambda: victim.status["health"] == [])
        made.compare(15)


@skipping_time
async def test_a_node_leaves_though_its_disk_takes_nothing_and_no_event_is_handled_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(records: Any) -> None:
        raise DataError("the disk is full")

    async with swarm(tmp_path) as made:
        victim = made.nodes[-1]
        await made.reach(4)
        monkeypatch.setattr(driver, "EFFECTS_MAX", 8)
        monkeypatch.setattr(victim.daemon.edges.persistence.store, "write", full)
        await until(lambda: len(victim.daemon.driver.effects) > 8)
        async with asyncio.timeout(60.0):
            await victim.leave()
        assert victim.why == "the disk cannot be written: the disk is full"


@skipping_time
async def test_all_stop_at_once_and_go_on_where_they_were(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(7)
        for node in made.nodes:
            await node.crash()
        stood = max(max(node.roots) for node in made.nodes)
        for node in made.nodes:
            await node.start()
        await made.reach(stood + 4)
        made.compare(stood + 4)


@pytest.mark.parametrize("assignment", ["drawn", "window", "capability"])
@skipping_time
async def test_members_train_on_different_sequences_by_every_policy(tmp_path: Path, assignment: str) -> None:
    recipe = {"local_steps": 6, "sequences_per_pass": 1}  # of which the fake trainer takes one
    async with swarm(tmp_path, sections={"data": {"assignment": assignment}, "recipe": recipe}) as made:
        await made.reach(12)
        made.compare(12)
        trainers = [node.workshop.replica.chain for node in made.nodes]
        for number in range(1, 13):
            used = [position for each in trainers for position in each.used.get(number, ())]
            assert used and len(set(used)) == len(used)
        state = made.nodes[0].daemon.driver.node.view().state
        if assignment == "capability":
            assert {entry.steps for entry in state.admitted} == {1}
            assert state.assigned >= 4 * state.round
        else:
            assert (state.assigned, {entry.steps for entry in state.admitted}) == (0, {0})
