"""The owner's orders to a running node of an in-memory swarm: pause, limits, a checkpoint now."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.events import Applied
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.observe.build import unreadiness_of
from p2ptrain.observe.schema import PeerList, Status
from tests.helpers.memory_swarm import Member, MemorySwarm, swarm
from tests.helpers.net import skipping_time, until

ROUNDS = 6


def taken(node: Member) -> int:
    return int(node.status["counters"].get("contributions taken", 0))


async def go_on(made: MemorySwarm, *nodes: Member) -> None:
    await made.reach(made.newest + ROUNDS, *nodes)


@skipping_time
async def test_a_paused_node_votes_and_applies_and_contributes_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        node = made.nodes[3]
        assert await node.daemon.answer({"do": "pause"}) == {"is_paused": True, "pauses": [complaint(Code.PAUSED).text]}
        await go_on(made)  # what was on its way is through
        before = taken(node)
        await go_on(made)
        assert taken(node) == before
        assert (node.status["is_paused"], node.status["health"]) == (True, [complaint(Code.PAUSED).text])
        assert unreadiness_of(node.daemon) == []
        for each in made.nodes:
            assert node.key in each.members
            assert each.status["counters"].get("root mismatches", 0) == 0
        assert await node.daemon.answer({"do": "resume"}) == {"is_paused": False, "pauses": []}
        await until(lambda: taken(node) > before + 2)
        assert (node.status["is_paused"], node.status["health"]) == (False, [])
        await go_on(made)
        made.compare(3 * ROUNDS)


@skipping_time
async def test_a_run_of_which_all_are_paused_waits_and_goes_on(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        for node in made.nodes:
            await node.daemon.answer({"do": "pause"})
        await until(lambda: all(node.daemon.driver.node.view().phase == "train" for node in made.nodes))
        stood = made.newest
        for node in made.nodes:
            await node.daemon.answer({"do": "resume"})
        await made.reach(stood + ROUNDS)
        made.compare(ROUNDS)


@skipping_time
async def test_a_paused_node_leaves_like_any_other(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(3)
        node = made.nodes[3]
        await node.daemon.answer({"do": "pause"})
        await go_on(made)
        await node.leave()
        assert node.why == "left"
        await go_on(made, *made.nodes[:3])


@skipping_time
async def test_limits_change_at_once_and_what_is_not_named_stays(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        daemon = made.nodes[0].daemon
        edges = daemon.edges
        rates = {"upload_bytes_per_second": 10**9, "download_bytes_per_second": 2 * 10**9}
        rest: dict[str, Any] = {"memory_bytes": 0, "hours": "", "device_percent": 100, "on_battery": "pause"}
        rest |= {"k_max": 0, "on_gpu_busy": "ignore"}
        rest["threads"] = threads = daemon.driver.worker.threads
        first = rates | rest
        assert await daemon.answer({"do": "limit"}) == first == made.nodes[0].status["limits"]
        changed = await daemon.answer({"do": "limit", "upload": 7, "download": None})
        assert changed == first | {"upload_bytes_per_second": 7}
        assert (edges.mailboxes._upload.rate, edges.fetching.fetcher.download.rate) == (7, 2 * 10**9)
        assert edges.server is not None
        assert edges.server._upload.rate == 7
        assert await daemon.answer({"do": "limit", "upload": 0, "download": 0}) == dict.fromkeys(rates, 0) | rest
        assert (await daemon.answer({"do": "limit", "threads": threads + 1}))["threads"] == threads + 1
        for wrong in (0, 1_025, True, "2"):
            with pytest.raises(ConfigError, match=r"^--threads: .* is not valid\. Give 1 to 1,024"):
                await daemon.answer({"do": "limit", "threads": wrong, "percent": 50})
        assert made.nodes[0].status["limits"] == dict.fromkeys(rates, 0) | rest | {"threads": threads + 1}


@skipping_time
async def test_a_limit_that_is_none_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        daemon = made.nodes[0].daemon
        for wrong in (-1, 10**12 + 1, True, 1.5, "7", [7]):
            with pytest.raises(ConfigError, match=r"^--download: .* is not valid\. Give 0 to 1,000,000,000,000"):
                await daemon.answer({"do": "limit", "upload": 7, "download": wrong})
        assert made.nodes[0].status["limits"]["upload_bytes_per_second"] == 10**9


@skipping_time
async def test_a_checkpoint_is_made_when_it_is_asked_for(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        node = made.nodes[0]
        await made.reach(3)
        saved = (await node.daemon.answer({"do": "checkpoint"}))["round"]
        assert saved >= 3
        present = {each.round for each in node.daemon.edges.persistence.store.checkpoints.present()}
        assert saved in present
        await go_on(made)


@skipping_time
async def test_a_checkpoint_of_a_round_that_the_core_has_not_heard_of_yet_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlapping rounds that is usual: the round before is applied while the request waits for the training."""
    async with swarm(tmp_path) as made:
        node = made.nodes[0]
        await made.reach(3)
        intake, held = node.daemon.driver.intake, []
        give = intake.give
        holding = lambda each, *of: held.append(each) if isinstance(each, Applied) else give(each, *of)  # noqa: E731
        monkeypatch.setattr(intake, "give", holding)
        await until(lambda: bool(held))
        asked = asyncio.create_task(node.daemon.answer({"do": "checkpoint"}))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not asked.done()
        monkeypatch.undo()
        give(held[0])
        assert (await asked)["round"] >= held[0].round


@skipping_time
async def test_a_checkpoint_that_the_disk_does_not_take_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm(tmp_path) as made:
        node = made.nodes[0]
        await made.reach(3)

        def fail(*arguments: Any) -> None:
            raise DataError("the disk is full")

        monkeypatch.setattr(node.daemon.edges.persistence.store.checkpoints, "write", fail)
        await node.daemon.answer({"do": "pause"})
        with pytest.raises(DataError, match="the state was not saved"):
            while True:
                await node.daemon.answer({"do": "checkpoint"})  # the round may have one already


@skipping_time
async def test_what_the_daemon_says_is_what_the_models_describe(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(4)
        for node in made.nodes:
            status, peers = node.status, await node.daemon.answer({"do": "peers"})
            for told, model in ((status, Status), (peers, PeerList)):
                jsonschema.validate(told, model.model_json_schema(mode="serialization"))
            assert sum(each["applied"] for each in (peers["me"], *peers["peers"])) >= 4
            assert peers["me"]["peer_id"] == status["peer_id"]
            assert status["since_applied_seconds"] >= 0
            assert status["mine"]["applied"] == taken(node)


@skipping_time
async def test_every_byte_has_one_purpose(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(5)
        for node in made.nodes:
            status = node.status
            for way in ("sent", "received"):
                traffic = {purpose: ways[way] for purpose, ways in status["traffic"].items()}
                assert sum(traffic.values()) == status["bytes"][f"bytes {way}"]
                assert traffic["messages"] > 0  # and gossip has none, or little: all are connected
                assert traffic["payloads"] > 0
            served = node.daemon.edges.server
            assert served is not None
            blobs = sum(status["traffic"][purpose]["sent"] for purpose in ("payloads", "states", "data"))
            assert blobs > served.counters["bytes"] > 0, "what was served, and what was asked"
