"""The boundary: what nobody foresaw ends the exchange, is counted, told and paid for, and goes no further."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from p2ptrain.core.complaints import Code
from p2ptrain.errors import ConfigError, RemoteProtocolError
from p2ptrain.identity import peer_id_of
from p2ptrain.net import boundary as module
from p2ptrain.net.boundary import KEY_SECONDS, OWED_SECONDS, PEERS_MAX, Boundary, FaultError
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.transport import Stream, TransportError
from tests.helpers.net import key
from tests.helpers.p2pd import SECONDS, connected, nodes_in
from tests.helpers.surprises import KINDS

PEER, RANGE = key(1), "203.0.0.0/16"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_surprise_becomes_a_network_failure(kind: str) -> None:
    boundary = Boundary(lambda peer: RANGE)
    with (
        pytest.raises(FaultError, match=rf"a bug of p2ptrain .* \(a place: {kind}\): please report it") as told,
        boundary.guard("a place", PEER),
    ):
        raise KINDS[kind]("what it was")
    assert isinstance(told.value, TransportError)
    assert (boundary.counts, boundary.by_peer) == ({"a place": 1}, {(PEER, RANGE): 1})
    with boundary.contain("another place", PEER):
        raise KINDS[kind]("what it was")
    assert boundary.counts == {"a place": 1, "another place": 1}


async def test_a_surprise_is_counted_once_however_many_boundaries_it_passes() -> None:
    boundary = Boundary()
    with boundary.contain("outside", PEER), boundary.guard("between"), boundary.guard("inside", PEER):
        raise KeyError
    assert boundary.counts == {"inside": 1}


@pytest.mark.parametrize(
    "error", [RemoteProtocolError("a lie"), TransportError("gone"), ConfigError("no"), TimeoutError()]
)
async def test_what_is_foreseen_passes_a_guard_and_nothing_passes_the_last_boundary(error: Exception) -> None:
    boundary = Boundary()
    with pytest.raises(type(error)), boundary.guard("a place", PEER):
        raise error
    assert not boundary.counts
    with boundary.contain("a place", PEER):
        raise error  # who should have handled it did not
    assert boundary.counts == {"a place": 1}


async def test_a_surprise_in_one_of_several_tasks_is_one() -> None:
    boundary = Boundary()

    async def fail() -> None:
        raise IndexError

    with pytest.raises(FaultError), boundary.guard("a place"):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    assert [each.fields["error"] for each in boundary.complaints] == ["ExceptionGroup"]


@pytest.mark.parametrize("error", [MemoryError(), ExceptionGroup("tasks", [KeyError(), MemoryError()])])
async def test_a_lack_of_memory_passes(error: Exception) -> None:
    boundary = Boundary()
    with pytest.raises(type(error)), boundary.guard("a place"):
        raise error
    with pytest.raises(type(error)), boundary.contain("a place"):
        raise error
    assert not boundary.counts


async def test_being_cancelled_is_no_surprise() -> None:
    boundary = Boundary()

    async def wait() -> None:
        with boundary.contain("a place"):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not boundary.counts


async def test_the_traceback_is_logged_once_a_minute_for_each_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    boundary = Boundary()
    for seconds, place in ((0, "here"), (1, "here"), (1, "there"), (59, "here")):
        now[0] += seconds
        with caplog.at_level(logging.ERROR), boundary.contain(place, PEER):
            raise KeyError("what it was")
    assert [("(here:" in each, "(there:" in each) for each in caplog.messages] == [(1, 0), (0, 1), (1, 0)]
    assert all(each.exc_info for each in caplog.records)
    assert "please report it" in caplog.text


async def test_an_owner_is_told_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    boundary = Boundary(lambda peer: RANGE)
    assert boundary.complaints == []
    with boundary.contain("a place", PEER):
        raise KeyError
    (told,) = boundary.complaints
    assert (told.code, told.hinders) == (Code.EXCHANGE_FAULT, False)
    assert "bug of p2ptrain: please report" in told.text
    assert told.fields["range"] == RANGE
    now[0] += module.SHOWN_SECONDS + 1.0
    assert boundary.complaints == []


async def test_a_stranger_pays_for_faults_and_a_member_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    members: set[bytes] = set()
    boundary = Boundary(lambda peer: RANGE, members.__contains__)
    while not boundary.is_tired_of(PEER):
        with boundary.contain("a place", PEER):
            raise KeyError
    assert boundary.counts.total() == OWED_SECONDS / KEY_SECONDS
    assert not boundary.is_tired_of(key(2)), "another of its range"
    members.add(PEER)
    assert not boundary.is_tired_of(PEER)
    members.clear()
    assert boundary.is_tired_of(PEER)
    now[0] += KEY_SECONDS
    assert not boundary.is_tired_of(PEER)


async def test_no_stranger_pays_for_another_of_another_range() -> None:
    boundary = Boundary(lambda peer: f"{peer[0]}.0.0.0/16")
    for _ in range(1_000):
        with boundary.contain("a place", b"\1" * 32):
            raise KeyError
    assert boundary.is_tired_of(b"\1" * 32)
    assert boundary.is_tired_of(b"\1" + bytes(31)), "a new key of a range that has caused as many"
    assert not boundary.is_tired_of(b"\2" * 32)


async def test_many_peers_of_no_known_range_do_not_pay_for_one_another() -> None:
    boundary = Boundary()
    for _ in range(1_000):
        with boundary.contain("a place", PEER):
            raise KeyError
    assert boundary.is_tired_of(PEER) and not boundary.is_tired_of(key(2))
    for number in range(3 * PEERS_MAX):
        with boundary.contain("a place", number.to_bytes(32, "big")):
            raise KeyError
    assert boundary.is_tired_of(PEER), "keys that cost nothing do not make it forgotten"


@pytest.mark.parametrize("error", [KeyError(), TransportError("gone"), TimeoutError(), ConfigError("no")])
async def test_whoever_waits_for_a_task_learns_that_it_failed(error: Exception) -> None:
    boundary, told = Boundary(), list[str]()

    async def fail() -> None:
        raise error

    await boundary.contained("a place", PEER, fail, failed=told.append)
    what = f"{peer_id_of(PEER)} (a place: {type(error).__name__})"
    assert told == [f"a bug of p2ptrain ended an exchange with {what}: please report it"]

    def broken(why: str) -> None:
        raise IndexError

    await boundary.contained("a place", PEER, fail, failed=broken)
    assert boundary.counts == {"a place": 3}


async def test_faults_of_many_peers_are_counted_within_bounds() -> None:
    boundary = Boundary()
    for number in range(PEERS_MAX + 10):
        with boundary.contain("a place", number.to_bytes(32, "big")):
            raise KeyError
    assert len(boundary.by_peer) == PEERS_MAX
    assert boundary.counts.total() == PEERS_MAX + 10


async def test_a_fault_in_what_names_the_peer_goes_no_further() -> None:
    def broken(peer: bytes) -> str:
        raise IndexError

    boundary = Boundary(broken)
    with boundary.contain("a place", PEER):
        raise KeyError
    assert boundary.by_peer == {(PEER, ""): 1}


async def _cause_many(nodes: list[P2pd]) -> None:
    async def fail(stream: Stream) -> None:
        await stream.receive(10)
        raise ZeroDivisionError

    await nodes[0].serve("/fail/1", fail)
    while nodes[0].counters().get("streams refused", 0) < 3:
        stream = await nodes[1].open(nodes[0].me, "/fail/1")
        await stream.send(b"bug")
        with pytest.raises(TransportError):
            await asyncio.wait_for(stream.receive(1), SECONDS)
        stream.abort()
    assert nodes[0].boundary.counts["an incoming stream"] == OWED_SECONDS / KEY_SECONDS
    nodes[0].prefer(lambda peer: peer == nodes[1].me)  # what an honest member sets off must not part the swarm
    assert not nodes[0].boundary.is_tired_of(nodes[1].me)


async def test_who_causes_many_faults_is_not_answered_for_a_while(tmp_path: Path) -> None:
    async with nodes_in(tmp_path) as make:
        await _cause_many(await connected(make, 2))


@pytest.mark.parametrize("error", [IndexError(), None])
async def test_what_a_task_holds_is_let_go_even_if_its_work_never_began(error: Exception | None) -> None:
    held = {PEER}

    async def work() -> None:
        assert held
        if error is not None:
            raise error

    await Boundary().contained("a place", PEER, work, ended=lambda: held.discard(PEER))
    assert not held


async def test_letting_go_may_fail_as_well() -> None:
    async def work() -> None: ...

    def ended() -> None:
        raise IndexError

    boundary = Boundary()
    await boundary.contained("a place", PEER, work, ended=ended)
    assert boundary.counts == {"a place": 1}
