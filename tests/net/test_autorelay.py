"""The relays passed to p2pd: those that answer, each once; and when p2pd is restarted for a lost one."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import uvloop

from p2ptrain.identity import peer_id_of
from p2ptrain.net.libp2p import autorelay
from p2ptrain.net.libp2p.autorelay import (
    ASK_SECONDS,
    LOST_SECONDS,
    RELAYS_MAX,
    STARTS_APART_SECONDS,
    TRIED_MAX,
    VAIN_MAX,
    RelayLoss,
    relays_to_use,
)
from tests.helpers.net import key
from tests.helpers.p2pd import nodes_in


class LocalPorts:
    """Ports of this machine, some with a listener and some without."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, kind: str = "tcp", *, open_too: bool = True) -> str:
        taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
        self._stack.enter_context(taken)
        taken.bind(("127.0.0.1", 0))
        if kind == "tcp" and open_too:
            taken.listen()
        return f"/ip4/127.0.0.1/{kind}/{taken.getsockname()[1]}" + ("/quic-v1" if kind == "udp" else "")


@pytest.fixture
def port() -> Iterator[LocalPorts]:
    with ExitStack() as stack:
        yield LocalPorts(stack)


def of(route: str, number: int) -> str:
    return f"{route}/p2p/{peer_id_of(key(number))}"


async def test_only_those_that_answer_are_used_and_each_peer_once(port: LocalPorts) -> None:
    there, also, gone = of(port(), 1), of(port(), 2), of(port(open_too=False), 3)
    again, gone_too = of(port(), 1), of(port(open_too=False), 2)
    assert await relays_to_use([gone, there, gone_too, again, there, also]) == [there, also]


async def test_who_answers_at_another_of_its_addresses_is_used_there(port: LocalPorts) -> None:
    gone, there = of(port(open_too=False), 1), of(port(), 1)
    assert await relays_to_use([gone, there]) == [there]


async def test_where_nobody_answers_all_are_hoped_for_each_at_one_address(port: LocalPorts) -> None:
    gone = [of(port(open_too=False), number) for number in (1, 1, 2)]
    assert await relays_to_use(gone) == [gone[0], gone[2]]
    assert await relays_to_use([]) == []


async def test_there_are_not_too_many_and_those_named_first_are_taken(port: LocalPorts) -> None:
    there = [of(port(), number) for number in range(1, RELAYS_MAX + 3)]
    assert await relays_to_use(there) == there[:RELAYS_MAX]


async def test_what_cannot_be_a_relay_is_left_out_and_takes_no_place(port: LocalPorts) -> None:
    there = of(port(), 1)
    relayed = [f"{there}/p2p-circuit/p2p/{peer_id_of(key(number))}" for number in range(2, 3 + TRIED_MAX)]
    wrong = ["/ip4/999.999.999.999/tcp/1", "/ip4/203.0.113.7/tcp/99999", "/ip6/::::/tcp/1"]
    assert await relays_to_use([*relayed, *(of(route, 3) for route in wrong), "no address", there]) == [there]


async def test_of_many_addresses_the_first_are_tried(port: LocalPorts) -> None:
    gone = [of(port(open_too=False), number) for number in range(1, TRIED_MAX + 1)]
    assert await relays_to_use([*gone, of(port(), 0)]) == gone[:RELAYS_MAX]


@pytest.mark.parametrize("name", ["a..b", "x" * 64, "no-such-name.invalid"])
async def test_a_name_that_leads_nowhere_is_one_that_does_not_answer(name: str, port: LocalPorts) -> None:
    there = of(port(), 1)
    assert await relays_to_use([of(f"/dns4/{name}/tcp/4001", 2), there]) == [there]
    assert await relays_to_use([of(f"/dns/{name}/udp/4001/quic-v1", 2), there]) == [there]


async def test_over_quic_a_server_answers_and_a_silent_port_does_not(
    tmp_path: Path, port: LocalPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes_in(tmp_path) as make:
        node = await make(("/ip4/127.0.0.1/udp/0/quic-v1",))
        (there,) = node.addresses()
        monkeypatch.setattr(autorelay, "ANSWER_SECONDS", 0.5)
        silent, refused = of(port("udp"), 2), of("/ip4/127.0.0.1/udp/9/quic-v1", 3)
        assert await relays_to_use([silent, refused, there]) == [there]


class Hanging:
    """Replaces asyncio.open_connection, and hangs for one host."""

    def __init__(self, host: str) -> None:
        self.host, self.open = host, asyncio.open_connection

    async def __call__(self, host: str, port: int) -> object:
        if host == self.host:
            await asyncio.Event().wait()
        return await self.open(host, port)


async def test_one_that_never_answers_does_not_keep_the_start_for_long(
    port: LocalPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autorelay, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(asyncio, "open_connection", Hanging("203.0.113.7"))
    silent, there = of("/ip4/203.0.113.7/tcp/4001", 1), of(port(), 2)
    async with asyncio.timeout(5):
        assert await relays_to_use([silent]) == [silent]
        assert await relays_to_use([silent, there]) == [there]


async def test_a_name_is_tried_at_all_that_it_leads_to_at_once(
    port: LocalPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = port().rpartition("/")[2]
    named, gone = of(f"/dns/node.example/tcp/{number}", 1), of(port(open_too=False), 2)

    def found(host: str, *_: object) -> list[tuple[object, ...]]:
        assert host == "node.example"
        return [(0, 0, 0, "", (host, 0)) for host in ("203.0.113.7", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(asyncio, "open_connection", Hanging("203.0.113.7"))
    assert await relays_to_use([gone, named]) == [named]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_names_that_take_long_to_look_up_hold_up_neither_the_start_nor_the_end(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, ended = threading.Event(), threading.Event()

    def slow(*_: object) -> list[tuple[object, ...]]:
        released.wait(60)
        ended.set()
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(autorelay, "ANSWER_SECONDS", 0.3)
    names = [of(f"/dns4/{number}.example/tcp/4001", number) for number in range(1, 9)]
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            assert runner.run(relays_to_use(names)) == names[:RELAYS_MAX]
        assert not ended.is_set()
        assert caplog.text == ""
    finally:
        released.set()


# ---------------------------------------------------------------------------------------------------
# Losing a relay

DIRECT = ["/ip4/192.0.2.1/tcp/4001"]


def through(number: int) -> list[str]:
    return [*DIRECT, f"/ip4/192.0.2.9/tcp/4001/p2p/{peer_id_of(key(number))}/p2p-circuit"]


class TimedRelayLoss:
    """A `RelayLoss` with a fake clock and a node's routes."""

    def __init__(self, *relays: str, drawn: float = 0.0) -> None:
        self.now = 1_000.0
        self.loss = RelayLoss(relays, lambda: self.now, lambda: drawn)

    async def after(self, seconds: float, routes: list[str]) -> bool:
        """Returns whether a restart of p2pd is wanted by then."""
        self.now += seconds
        await self.loss.look(routes)
        return self.loss.is_mendable


@pytest.mark.parametrize("drawn", [0.0, 0.5])
async def test_a_relay_that_was_lost_and_answers_again_is_worth_a_new_p2pd_after_a_while(
    drawn: float, port: LocalPorts
) -> None:
    node = TimedRelayLoss(of(port(open_too=False), 1), of(port(), 2), drawn=drawn)
    patience = LOST_SECONDS * (1 + drawn)
    assert not await node.after(10, through(2))
    assert not await node.after(patience - 1, DIRECT)
    assert await node.after(1, DIRECT)


async def test_another_that_answers_is_worth_one_new_p2pd_once_the_lost_one_has_been_asked_for_long(
    port: LocalPorts,
) -> None:
    """The other relay may be full, or p2pd may not have been given it."""
    relays = [of(port(), 1), of(port(open_too=False), 2)]
    node = TimedRelayLoss(*relays)
    assert node.loss.first() == relays
    assert not await node.after(10, through(2))
    assert not any([await node.after(LOST_SECONDS, DIRECT) for _ in range(VAIN_MAX)])
    assert node.loss.first() == [*reversed(relays)]
    assert await node.after(LOST_SECONDS, DIRECT)
    node.loss.p2pd_started()
    assert not any([await node.after(LOST_SECONDS, DIRECT) for _ in range(5 * VAIN_MAX)])


async def test_the_relay_that_a_node_had_is_found_when_it_comes_back_though_others_were_tried(port: LocalPorts) -> None:
    """The others may be full, or no relays at all."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        node = TimedRelayLoss(of(port(), 1), of(f"/ip4/127.0.0.1/tcp/{own.getsockname()[1]}", 2))
        assert not await node.after(10, through(2))
        assert not any([await node.after(LOST_SECONDS, DIRECT) for _ in range(VAIN_MAX)])
        assert await node.after(LOST_SECONDS, DIRECT)
        node.loss.p2pd_started()
        assert not await node.after(STARTS_APART_SECONDS, DIRECT)
        own.listen()
        assert await node.after(STARTS_APART_SECONDS, DIRECT)


async def test_a_relay_that_is_found_again_by_itself_is_none_that_was_lost(port: LocalPorts) -> None:
    node = TimedRelayLoss(of(port(), 1))
    for _ in range(20):
        assert not await node.after(10, through(1))
        assert not await node.after(LOST_SECONDS - 1, DIRECT)


async def test_who_never_had_a_relay_gets_no_new_p2pd_for_one(port: LocalPorts) -> None:
    """Such a node is publicly reachable, or the peers that answer are not relays."""
    node = TimedRelayLoss(of(port(), 1))
    assert not any([await node.after(LOST_SECONDS, DIRECT) for _ in range(20)])


async def test_a_new_p2pd_that_gets_no_place_is_left_alone_and_one_that_crashed_meanwhile_does_not_count(
    port: LocalPorts,
) -> None:
    """The node may have become publicly reachable since, or the relay may be full."""
    node = TimedRelayLoss(of(port(), 1))
    assert not await node.after(1, through(1))
    node.loss.p2pd_started()
    assert await node.after(LOST_SECONDS, DIRECT)
    node.loss.p2pd_started()
    assert not any([await node.after(STARTS_APART_SECONDS, DIRECT) for _ in range(20)])


async def test_a_p2pd_that_was_started_while_the_relay_was_asked_is_not_the_one_that_lost_it(
    port: LocalPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = TimedRelayLoss(of(port(), 1))

    async def answers(address: str) -> bool:
        node.loss.p2pd_started()
        return True

    monkeypatch.setattr(autorelay, "_answers", answers)
    assert not await node.after(1, through(1))
    assert not await node.after(LOST_SECONDS, DIRECT)


async def test_while_nobody_answers_p2pd_is_left_alone_and_who_is_down_is_seldom_asked(
    port: LocalPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def answers(address: str) -> bool:
        asked.append(address)
        return False

    monkeypatch.setattr(autorelay, "_answers", answers)
    node = TimedRelayLoss(gone := of(port(open_too=False), 1))
    assert not await node.after(10, through(1))
    assert not any([await node.after(10, DIRECT) for _ in range(60)])
    assert asked == [gone] * int((600 - LOST_SECONDS) // ASK_SECONDS + 1)


async def test_a_relay_that_comes_and_goes_costs_no_p2pd_each_time(port: LocalPorts) -> None:
    node, starts = TimedRelayLoss(of(port(), 1)), 0
    for _ in range(60):  # two hours: alternately a minute with the relay and one without
        node.loss.p2pd_started()
        assert not await node.after(60, through(1))
        starts += await node.after(LOST_SECONDS, DIRECT)
    assert starts == 60 * (60 + LOST_SECONDS) / STARTS_APART_SECONDS


async def test_a_node_without_relays_to_ask_is_left_alone() -> None:
    node = TimedRelayLoss()
    assert not await node.after(10, through(1))
    assert not await node.after(LOST_SECONDS, DIRECT)
