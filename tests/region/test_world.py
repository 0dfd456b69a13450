"""A region's node and its world node: what cannot be sent now is sent later, and a liar's addresses go nowhere."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from p2ptrain.config import NodeConfig, RecipeConfig, RunConfig, WorldConfig
from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.errors import DataError
from p2ptrain.loop.channel import CarriedOut, NodeAnswer, NodeFailed, NodeNote, NodeReady, RoundToTrain
from p2ptrain.net import questions
from p2ptrain.net.addresses import Reach
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.transport import TransportError
from p2ptrain.region import world as module
from p2ptrain.region import world as worker_module
from p2ptrain.region.world import RegionWorker, Session, WorldLink

DENSE = RecipeConfig(transform="none", k=64**2, value_bits=8)
RUN = RunConfig(name="region", recipe=DENSE, world=WorldConfig(run="ab" * 32))
ME, PEERS = bytes(32), [bytes([number]) * 32 for number in (1, 2, 3)]
PEER_ID = "12D3KooWM87ULyCQ4p5uagyH3ypi1uA1kM2paeTuzQhvQtzAb3C9"


class Writer:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


@pytest.fixture
async def link() -> WorldLink:
    return WorldLink(RUN, NodeConfig(), ME)


@pytest.fixture
def worker(link: WorldLink) -> RegionWorker:
    return worker_of(link)


def worker_of(link: WorldLink) -> RegionWorker:
    """Makes a worker that trains nothing."""
    learner = SimpleNamespace(run=RUN, replica=None, can_overlap=False, device=None)
    thread = SimpleNamespace(learner=learner, threads=1, capture=print, evaluate=None, sample=None, measure=None)
    return link.worker(cast(Any, thread), ME, cast(Any, None))


def away(why: str) -> list[Complaint]:
    return [complaint(Code.WORLD_AWAY, why=why)]


def session() -> Session:
    memory = SimpleNamespace(base=torch.full((2,), 8.0), moved=torch.zeros(2))
    return Session(cast(Any, Writer()), cast(Any, memory), steps=30)


def talking(link: WorldLink) -> Session:
    """Joins a world node to the link."""
    link._session = made = session()
    return made


def moved(value: float) -> Tensor:
    return torch.full((2,), value)


async def test_a_movement_goes_to_the_round_that_the_world_node_trains(link: WorldLink, worker: RegionWorker) -> None:
    talk = talking(link)
    link.hear(NodeAnswer(0, NodeReady("run", "", ("/ip4/127.0.0.1/tcp/1",), (), 30, 30)), talk)
    assert worker.addresses == ("/ip4/127.0.0.1/tcp/1",)
    link.contribute(moved(1.0))
    assert talk.sent is None, "it trains none yet"
    link.hear(NodeAnswer(1, RoundToTrain(6, 5, 1)), talk)
    assert talk.sent is not None
    assert worker.region.is_followed
    assert talk.memory.moved.tolist() == [1.0, 1.0]
    link.contribute(moved(0.5))
    link.hear(NodeAnswer(talk.sent[0], CarriedOut()), talk)
    assert (worker.contributions, talk.sent) == (1, None)
    link.hear(NodeAnswer(9, RoundToTrain(7, 6, 1)), talk)
    assert talk.memory.moved.tolist() == [0.5, 0.5], "what was due meanwhile goes with the next round"


async def test_what_came_too_late_goes_with_the_next(link: WorldLink, worker: RegionWorker) -> None:
    talk = talking(link)
    link.hear(NodeAnswer(1, RoundToTrain(6, 5, 1)), talk)
    link.contribute(moved(1.0))
    assert talk.sent is not None
    link.contribute(moved(0.25))
    link.hear(NodeAnswer(talk.sent[0], NodeFailed("ConfigError", "no round is being trained")), talk)
    assert worker.contributions == 0
    link.hear(NodeAnswer(9, RoundToTrain(7, 6, 1)), talk)
    assert talk.memory.moved.tolist() == [1.25, 1.25]


async def test_a_world_node_that_is_killed_before_its_contribution_is_out_gets_it_again(
    link: WorldLink, worker: RegionWorker
) -> None:
    killed = talking(link)
    link.hear(NodeAnswer(1, RoundToTrain(6, 5, 1)), killed)
    link.contribute(moved(1.0))
    assert killed.sent is not None
    link.hear(NodeAnswer(killed.sent[0], CarriedOut()), killed)
    again = talking(link)
    link.hear(NodeAnswer(1, RoundToTrain(6, 5, 1)), again)
    assert again.memory.moved.tolist() == [1.0, 1.0], "it would not be asked to train what it has contributed to"
    assert again.sent is not None
    link.hear(NodeAnswer(again.sent[0], CarriedOut()), again)
    later = talking(link)
    link.hear(NodeAnswer(1, RoundToTrain(7, 6, 1)), later)
    assert later.sent is None, "the round was agreed on"


async def test_a_world_node_that_trains_a_round_again_on_another_branch_has_what_it_was_given(
    link: WorldLink, worker: RegionWorker
) -> None:
    talk = talking(link)
    link.hear(NodeAnswer(1, RoundToTrain(6, 5, 1)), talk)
    link.contribute(moved(1.0))
    assert talk.sent is not None
    link.hear(NodeAnswer(talk.sent[0], CarriedOut()), talk)
    link.hear(NodeAnswer(2, RoundToTrain(6, 5, 1)), talk)
    assert talk.sent is None, "it is in the residual there"


async def test_notes_tell_why_the_world_is_away_until_it_is_there(
    link: WorldLink, worker: RegionWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "AWAY_SECONDS", 0.0)
    talk = session()
    link.hear(NodeAnswer(1, NodeNote("waiting for round 4: no peers")), talk)
    assert worker.complaints == away("waiting for round 4: no peers")
    link.hear(NodeAnswer(1, RoundToTrain(6, 5, 1)), talk)
    link.hear(NodeAnswer(2, NodeNote("waiting for round 7: no peers", is_trouble=True)), talk)
    assert not worker.region.is_followed
    link.hear(NodeAnswer(2, NodeNote("waiting for round 7: the others are not done")), talk)
    assert worker.region.is_followed
    with pytest.raises(DataError, match="it cannot go on"):
        link.hear(NodeAnswer(0, NodeFailed("DataError", "it cannot go on")), talk)


def at(address: str) -> str:
    return f"/ip4/{address}/tcp/4001/p2p/{PEER_ID}"


async def test_only_members_are_asked_and_only_addresses_that_they_may_tell_are_taken(
    link: WorldLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        PEERS[0]: (at("8.8.8.8"), at("192.168.0.7"), "/ip4/8.8.8.8/x", "nonsense", at("127.0.0.1")),
        PEERS[1]: tuple(at(f"9.9.9.{number}") for number in range(30)),
    }

    async def ask_peers(_: object, peer: bytes, run_id: bytes) -> questions.Peers:
        assert run_id == bytes.fromhex(RUN.world.run)
        if peer not in told:
            raise TransportError("hung up")
        return questions.Peers(told[peer])

    monkeypatch.setattr(questions, "ask_peers", ask_peers)
    strangers = [bytes([9]) * 32]
    connections = SimpleNamespace(
        linked=[*PEERS, *strangers], met={PEERS[0]: Reach.PUBLIC, PEERS[1]: Reach.LOOPBACK, PEERS[2]: Reach.LOOPBACK}
    )
    view = SimpleNamespace(is_in=lambda peer: peer in PEERS)
    edges = SimpleNamespace(connections=connections, transport=SimpleNamespace(boundary=Boundary()), view=view)
    found = await link._ask_around(cast(Any, edges))
    assert sorted(found) == sorted([at("8.8.8.8"), *(at(f"9.9.9.{number}") for number in range(module.TOLD))])


async def test_a_world_node_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.01)
    monkeypatch.setattr(worker_module, "AWAY_SECONDS", 0.0)
    ended: list[object] = []

    class SilentProcess:
        def wait(self, _: float) -> None:
            ended.append(self)

    ours, theirs = module.channel.socket.socketpair()
    memory = SimpleNamespace(base=None, moved=None)
    monkeypatch.setattr(module.channel, "spawn_node", lambda *_: (SilentProcess(), ours, memory))
    link = WorldLink(RUN, NodeConfig.model_validate({"region": {"bootstrap": [at("8.8.8.8")]}}), ME)
    worker = worker_of(link)
    why = "the world node does not answer, or finds nobody at the addresses that it was told"
    async with asyncio.timeout(20), link.attached(cast(Any, None)):
        while worker.complaints != away(why):  # noqa: ASYNC110  # what is noted of the world sets no event
            await asyncio.sleep(0)
    assert len(ended) == 1
    theirs.close()
