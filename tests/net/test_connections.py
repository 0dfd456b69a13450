"""Connections: dialling without end and not too often, and hints that may say anything."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from p2ptrain.address import ADDRESS_CHARACTERS_MAX, parse
from p2ptrain.core import wire
from p2ptrain.identity import peer_id_of
from p2ptrain.net import connections as connections_module
from p2ptrain.net import questions
from p2ptrain.net.address_book import ADDRESSES_MAX, TELL_SECONDS, Origin
from p2ptrain.net.addresses import Reach, address_range, split
from p2ptrain.net.connections import (
    DIAL_SECONDS_MAX,
    FORGOTTEN_AT_ONCE,
    KNOWN_MAX,
    LINKS_MAX,
    STEADY_SECONDS,
    Connections,
    topic_of,
)
from p2ptrain.net.libp2p.dht import VALUE_BYTES_MAX
from p2ptrain.net.transport import Stream, TransportError
from tests.helpers.connections import ME, RUN, A, B, C, RecordedConnections, address, key, others
from tests.helpers.memory_network import Network
from tests.helpers.net import at, skipping_time, until

# ---------------------------------------------------------------------------------------------------
# Dialling


@skipping_time
async def test_dials_that_fail_are_repeated_after_growing_waits_that_differ_from_node_to_node() -> None:
    network = Network()
    nodes = [RecordedConnections(network, ME), RecordedConnections(network, B)]
    for node in nodes:
        node.connections.add(address(A), Origin.USER)
        async with node.running():
            await until(lambda: len(node.dials) == 30)  # noqa: B023
    gaps = [[later - earlier for (earlier, _), (later, _) in pairwise(node.dials)] for node in nodes]
    for waits in gaps:
        for number, wait in enumerate(waits):
            expected = min(2.0**number, DIAL_SECONDS_MAX)
            assert 0.5 * expected <= wait <= 1.5 * expected + 0.3
        assert max(waits[8:]) - min(waits[8:]) > 20.0  # they are not synchronised
    assert gaps[0] != gaps[1]


@skipping_time
async def test_after_an_outage_of_any_length_a_peer_is_found_again() -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A)
    node.connections.add(network.address(A), Origin.USER)
    async with node.running() as connections:
        await until(lambda: node.told == [("seen", A)])
        network.cut(ME, A)
        await until(lambda: node.told == [("seen", A), ("lost", A)])
        assert connections.linked == {}
        await at(2 * 3600.0)
        network.heal()
        await until(lambda: node.told == [("seen", A), ("lost", A), ("seen", A)])
        assert asyncio.get_running_loop().time() < 2 * 3600.0 + 1.5 * DIAL_SECONDS_MAX + 3.0
        assert list(connections.linked) == [A]


@skipping_time
async def test_a_peer_that_comes_from_elsewhere_now_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A)
    node.connections.add(network.address(A), Origin.USER)
    async with node.running() as connections:
        await until(lambda: node.told == [("seen", A)])
        monkeypatch.setattr(node.transport, "range_of", lambda peer: "10.9.0.0/16")
        await until(lambda: connections.linked == {A: "10.9.0.0/16"})
        assert node.told == [("seen", A), ("seen", A)]


@skipping_time
async def test_a_peer_whose_addresses_cannot_be_judged_does_not_make_us_blind_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A, B)
    real = connections_module.met_in

    def judged(addresses: list[str]) -> Reach:
        if any(each.endswith(peer_id_of(A)) for each in addresses):
            raise IndexError
        return real(addresses)

    monkeypatch.setattr(connections_module, "met_in", judged)
    for peer in (A, B):
        node.connections.add(network.address(peer), Origin.USER)
    async with node.running() as connections:
        await until(lambda: connections.linked.keys() == {A, B})
        assert connections.met == {A: Reach.PUBLIC, B: real([network.address(B)])}
        assert node.transport.boundary.counts.keys() == {"the networks of a connected peer"}


@pytest.mark.parametrize("fails", ["_meet", "_dial"])
@skipping_time
async def test_an_error_that_ends_a_dial_or_a_meeting_before_it_began_bars_nobody(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A)
    real, failures = getattr(Connections, fails), iter(range(3))

    async def failing(self: Connections, peer: bytes, *more: object) -> None:
        if next(failures, None) is not None:
            raise IndexError
        await real(self, peer, *more)

    monkeypatch.setattr(Connections, fails, failing)
    node.connections.add(network.address(A), Origin.USER)
    async with node.running() as connections:
        await until(lambda: A in connections.linked)


@skipping_time
async def test_who_lets_us_in_and_hangs_up_is_dialled_ever_less_often() -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A)
    node.connections.add(network.address(A), Origin.USER)
    async with node.running() as connections:
        for count in range(1, 8):
            await until(lambda: len(node.dials) == count)  # noqa: B023
            await until(lambda: A in connections.linked)
            network.unlink(ME, A, "I hang up")
            await until(lambda: A not in connections.linked)
        gaps = [later - earlier for (earlier, _), (later, _) in pairwise(node.dials)]
        assert all(0.5 * 2.0**number <= gap <= 1.5 * 2.0**number + 3.0 for number, gap in enumerate(gaps))
        await until(lambda: A in connections.linked)
        await at(asyncio.get_running_loop().time() + 2 * STEADY_SECONDS)
        count, lost_at = len(node.dials), asyncio.get_running_loop().time()
        network.unlink(ME, A, "an outage")
        await until(lambda: len(node.dials) == count + 1)
        assert asyncio.get_running_loop().time() < lost_at + 2.0


@skipping_time
async def test_who_came_to_us_while_it_was_still_starting_is_asked_again_where_it_is() -> None:
    network = Network()
    node = RecordedConnections(network)
    peer, _ = await others(network, A, B)
    node.connections.add(network.address(B), Origin.USER)
    async with node.running() as connections:
        await at(310.0)  # by now searches come once a minute
        await peer.connect(network.address(ME))
        await until(lambda: node.told == [("seen", B), ("seen", A)])
        await at(313.0)
        assert connections.remembered() == [network.address(B)]

        async def told(stream: Stream) -> None:
            await stream.receive(questions.QUESTION_BYTES_MAX)
            await stream.send(wire.encode(questions.Peers((network.address(A),))))

        await peer.serve(questions.PROTOCOL, told)
        await until(lambda: connections.remembered() == [network.address(B), network.address(A)])
        assert asyncio.get_running_loop().time() < 320.0


@skipping_time
async def test_who_goes_and_comes_between_two_looks_is_asked_where_it_is_now() -> None:
    network = Network()
    node = RecordedConnections(network)
    (peer,) = await others(network, A)
    asked = 0

    async def told(stream: Stream) -> None:
        nonlocal asked
        asked += 1
        await stream.receive(questions.QUESTION_BYTES_MAX)
        await stream.send(wire.encode(questions.Peers((network.address(A),))))

    await peer.serve(questions.PROTOCOL, told)
    async with node.running() as connections:
        await peer.connect(network.address(ME))
        await at(130.1)  # by now searches come once a minute
        before = asked
        network.unlink(ME, A, "it is started again")
        await peer.connect(network.address(ME))
        connections.takes_part(A)  # as soon as it asks us
        await at(130.2)
        assert (asked - before, node.told) == (1, [("seen", A)])
        network.unlink(ME, A, "and again")
        await peer.connect(network.address(ME))
        await at(132.0)
        assert (asked - before, node.told) == (2, [("seen", A)])


@skipping_time
async def test_who_never_tells_where_it_is_and_comes_back_again_and_again_is_not_asked_ever_more_often() -> None:
    network = Network()
    node = RecordedConnections(network)
    (peer,) = await others(network, A)
    asked: list[float] = []

    async def silent(stream: Stream) -> None:
        asked.append(asyncio.get_running_loop().time())
        stream.abort()

    await peer.serve(questions.PROTOCOL, silent)
    async with node.running() as connections:
        for count in range(1, 9):
            await peer.connect(network.address(ME))
            await until(lambda: node.told.count(("seen", A)) == count)  # noqa: B023
            await at(asyncio.get_running_loop().time() + 4.0)
            if count < 8:
                network.unlink(ME, A, "it flaps")
                await until(lambda: A not in connections.linked)
        now = asyncio.get_running_loop().time()
        await at(now + 90.0)
        assert len([each for each in asked if now + 30.0 < each]) <= 4, "the search asks now and then"
        assert len([each for each in asked if now < each <= now + 30.0]) <= 12, (
            "only the last connection's loop is left"
        )


@skipping_time
async def test_a_network_that_is_down_ends_nothing() -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A)
    node.connections.add(network.address(A))
    async with node.running():
        await until(lambda: bool(node.told))
        network.kill(ME)
        await at(100.0)


@skipping_time
async def test_a_bootstrap_that_is_dead_is_named_with_its_address_and_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = Network()
    node = RecordedConnections(network)
    node.connections.add(address(A), Origin.USER)
    node.connections.add(address(B))  # unrequested
    with caplog.at_level(logging.WARNING):
        async with node.running():
            await at(600.0)
    told = [record.getMessage() for record in caplog.records]
    assert 4 <= len(told) <= 600 / TELL_SECONDS + 1
    assert all(address(A) in line and "the node keeps trying" in line for line in told)
    assert {dialled for _, dialled in node.dials} == {address(A), address(B)}


@skipping_time
async def test_bootstraps_come_first_then_members_then_other_address_ranges() -> None:
    network = Network()
    node, neighbour = RecordedConnections(network), key(100)
    await others(network, neighbour)
    for number in range(10, 30):
        node.connections.add(address(key(number), "127.0.0.2", number))
    elsewhere = [address(key(number), f"10.{number}.0.1") for number in range(40, 45)]
    for each in elsewhere:
        node.connections.add(each)
    member, bootstrap = address(key(50), "127.0.0.3"), address(key(51), "127.0.0.3")
    node.connections.add(member)
    node.connections.roster = lambda: (key(50),)
    node.connections.add(bootstrap, Origin.USER)
    node.connections.linked[neighbour] = None
    node.connections.add(network.address(neighbour))
    await node.transport.connect(network.address(neighbour))  # in the same range as the twenty
    node.connections.known[neighbour].worked = network.address(neighbour)
    node.dials.clear()
    async with node.running():
        await until(lambda: len({dialled for _, dialled in node.dials}) == 27)
    order = list(dict.fromkeys(dialled for _, dialled in node.dials))
    assert order[:2] == [bootstrap, member]
    assert sorted(order[2:7]) == sorted(elsewhere)
    assert order[7:] != sorted(order[7:])  # in random order


@skipping_time
async def test_no_more_are_dialled_than_there_are_places() -> None:
    network = Network()
    node = RecordedConnections(network)
    for number in range(1, LINKS_MAX + 13):
        network.transport(key(number))
        node.connections.add(network.address(key(number)))
    async with node.running() as connections:
        await until(lambda: len(connections.linked) == LINKS_MAX)
        await at(300.0)
        assert len(connections.linked) == len(node.dials) == LINKS_MAX
        gone = next(iter(connections.linked))
        network.cut(ME, gone)
        await until(lambda: len(node.told) == LINKS_MAX + 2)
        assert len(connections.linked) == LINKS_MAX


@skipping_time
async def test_whoever_fills_all_places_keeps_us_from_no_bootstrap_and_no_member() -> None:
    network = Network()
    node = RecordedConnections(network)
    for number in range(1, LINKS_MAX + 1):
        await network.transport(key(number)).connect(network.address(ME))
    bootstrap, member, other = key(200), key(201), key(202)
    await others(network, bootstrap, member, other)
    async with node.running() as connections:
        await until(lambda: len(connections.linked) == LINKS_MAX)
        connections.add(network.address(bootstrap), Origin.USER)
        connections.add(network.address(member))
        connections.add(network.address(other))
        connections.roster = lambda: (member,)
        await at(60.0)
        assert {bootstrap, member} <= connections.linked.keys()
        assert other not in connections.linked


@skipping_time
async def test_a_shunned_peer_is_not_dialled_until_its_time_is_over() -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A, B)
    for peer in (A, B):
        node.connections.add(network.address(peer))
    node.connections.shun(A, 50.0)
    for number in range(2 * KNOWN_MAX):
        node.connections.shun(key(1_000 + number), 40.0)
    assert len(node.connections.shunned) == KNOWN_MAX
    node.connections.shun(A, 50.0)
    async with node.running():
        await at(49.5)
        assert node.told == [("seen", B)]
        await until(lambda: node.told == [("seen", B), ("seen", A)])
        assert asyncio.get_running_loop().time() < 52.0


# ---------------------------------------------------------------------------------------------------
# Hints


def known(connections: Connections) -> dict[bytes, list[str]]:
    return {peer: each.addresses for peer, each in connections.known.items()}


@skipping_time
async def test_a_hint_that_is_not_about_who_gave_it_or_is_no_address_is_passed_over() -> None:
    node = RecordedConnections(Network())
    long = f"/dns4/{'a' * ADDRESS_CHARACTERS_MAX}/tcp/1/p2p/{peer_id_of(A)}"
    node.connections.tell(A, [address(B), "", "/p2p/", "nonsense", f"/p2p/{'1' * 60}", long, address(ME), address(A)])
    assert known(node.connections) == {A: [address(A)]}
    node.connections.tell(A, [address(A, port=number) for number in range(1, 1_000)])
    assert len(node.connections.known[A].addresses) == ADDRESSES_MAX


@pytest.mark.parametrize(
    "place",
    [
        "",
        "anything",
        "\x1b[2J\x1b[H",  # terminal control codes
        "/ip4/203.0.113.7/tcp/4001\n",
        "/unix/run/secret",
        "/ip4/203.0.113.7/tcp/4001/ws",  # p2pd would not dial it
        f"/dns4/{'a' * 300}/tcp/4001",
    ],
)
@skipping_time
async def test_what_is_no_address_is_neither_kept_nor_told_nor_dialled(place: str) -> None:
    network = Network()
    node = RecordedConnections(network)
    (teller,) = await others(network, B)
    told = f"{place}/p2p/{peer_id_of(A)}"
    await questions.serve(teller, lambda peer, question: questions.Peers((told, address(C))))
    await teller.connect(network.address(ME))
    with pytest.raises(TransportError):
        node.connections.add(told, Origin.USER)
    node.connections.tell(A, [told])
    async with node.running() as connections:
        await until(lambda: C in connections.known)
        assert A not in connections.known
        assert {dialled for _, dialled in node.dials} <= {address(C)}


@skipping_time
async def test_a_peer_says_its_release_and_its_owners_name_in_letters_that_no_terminal_obeys() -> None:
    network = Network()
    node = RecordedConnections(network)
    honest, other = await others(network, A, B)
    await questions.serve(honest, lambda peer, question: questions.Peers((), "0.1.0", "Ada L."))
    await questions.serve(other, lambda peer, question: questions.Peers((address(C),), "0.1.0", "\x1b[2J"))
    for transport in (honest, other):
        await transport.connect(network.address(ME))
    async with node.running() as connections:
        await until(lambda: A in connections.linked and B in connections.linked and bool(connections.known[A].release))
        known = [connections.known[peer] for peer in (A, B)]
        assert [(each.release, each.owner) for each in known] == [("0.1.0", "Ada L."), ("", "")]
        assert C not in connections.known


def test_the_longest_address_is_taken_and_as_many_as_are_kept_of_a_peer_fit_an_announcement() -> None:
    name = ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 61])
    longest = f"/dns4/{name}/udp/65535/quic-v1/p2p/{peer_id_of(B)}/p2p-circuit/p2p/{peer_id_of(A)}"
    assert (len(name), split(longest)[0]) == (253, A)
    assert len(msgspec.msgpack.encode(["x" * ADDRESS_CHARACTERS_MAX] * ADDRESSES_MAX)) <= VALUE_BYTES_MAX


@skipping_time
async def test_an_address_has_one_spelling_and_a_name_that_a_peer_tells_is_not_even_read() -> None:
    connections = RecordedConnections(Network()).connections
    end = f"/p2p/{peer_id_of(A)}"
    for host in ("2001:db8::7", "2001:DB8::7", "2001:0db8:0:0:0:0:0:7"):
        connections.add(f"/ip6/{host}/tcp/4001{end}")
    connections.tell(A, [f"/ip6/2001:db8::0:7/tcp/4001{end}"])
    assert known(connections) == {A: [f"/ip6/2001:db8::7/tcp/4001{end}"]}
    parse.cache_clear()
    connections.tell(A, [f"/dns4/{'a.' * 126}a/tcp/1{end}"])
    connections.add(f"/dns4/node.example.org/tcp/1{end}")
    assert parse.cache_info().misses == 0
    connections.add(f"/dns4/Node.example.org/tcp/1{end}", Origin.USER)
    connections.add(f"/dns4/node.example.org/tcp/2{end}")
    assert len(connections.known[A].addresses) == 3


@skipping_time
async def test_whatever_stands_in_the_dht_costs_failed_dials_and_no_more() -> None:
    network = Network()
    node = RecordedConnections(network)
    good, *bad = await others(network, A, *(key(number) for number in range(10, 17)))
    for each in (good, *bad):
        await each.connect(network.address(ME))
    encode = msgspec.msgpack.encode
    values = [b"", b"\xc1", encode({"a": 1}), encode([1, 2]), encode([b"\xff"]), encode("x"), b"\x91" * 5_000]
    for each, value in zip(bad, values, strict=True):
        await each.announce(topic_of(RUN), value, 1_000.0)
    await good.announce(topic_of(RUN), encode([address(A, port=number) for number in range(1, 500)]), 1_000.0)
    async with node.running() as connections:
        await until(lambda: address(A, port=1) in connections.known[A].addresses if A in connections.known else False)
        assert len(connections.known[A].addresses) <= ADDRESSES_MAX
        assert all(each.addresses == [] for peer, each in connections.known.items() if peer != A)


@skipping_time
async def test_an_announcement_that_nobody_accepts_is_repeated_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as of a node whose clock is wrong: it would use up what each peer grants it."""
    network, tries = Network(), list[float]()
    node = RecordedConnections(network)
    await others(network, A)

    async def refused(*_: object) -> None:
        tries.append(asyncio.get_running_loop().time())
        raise TransportError("nobody accepted it")

    monkeypatch.setattr(node.connections.transport, "announce", refused)
    node.connections.add(network.address(A))
    async with node.running():
        await until(lambda: len(tries) == 1)
        await at(tries[0] + 60.0)
        assert 5 <= len(tries) <= 8


@skipping_time
async def test_thousands_of_hints_push_out_neither_bootstraps_nor_those_who_were_reached() -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A)
    node.connections.add(network.address(A))
    node.connections.add(address(B), Origin.USER)
    async with node.running() as connections:
        await until(lambda: node.told == [("seen", A)])
        for number in range(1_000, 1_000 + 3 * KNOWN_MAX):
            connections.add(address(key(number)))
        assert KNOWN_MAX - FORGOTTEN_AT_ONCE <= len(connections.known) <= KNOWN_MAX
        assert network.address(A) in connections.known[A].addresses
        assert connections.known[B].addresses == [address(B)]


@skipping_time
async def test_whom_to_forget_is_looked_for_once_for_many_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer brings up to 32 addresses, and anyone can give one."""
    connections, looks, use = RecordedConnections(Network()).connections, Counter[str](), Connections._use

    def counted(self: Connections, peer: bytes) -> tuple[bool, bool, bool, bool, float]:
        looks["looks"] += 1
        return use(self, peer)

    monkeypatch.setattr(Connections, "_use", counted)
    for number in range(3 * KNOWN_MAX):
        connections.add(address(key(1_000 + number)))
    assert looks["looks"] <= (2 * KNOWN_MAX / FORGOTTEN_AT_ONCE + 1) * KNOWN_MAX


@skipping_time
async def test_thousands_of_callers_are_not_all_remembered_and_push_out_no_bootstrap() -> None:
    """Each has a new key, connects, tells us nothing, and leaves."""
    network = Network()
    node = RecordedConnections(network)
    node.connections.add(address(A), Origin.USER)
    async with node.running() as connections:
        for number in range(1_000, 1_000 + KNOWN_MAX + 40):
            caller = network.transport(key(number))
            await caller.connect(network.address(ME))
            connections.changed.set()
            await until(lambda: node.told[-1:] == [("seen", caller.me)])  # noqa: B023
            network.kill(caller.me)
        assert len(connections.known) <= KNOWN_MAX
        assert connections.known[A].addresses == [address(A)]


@skipping_time
async def test_an_address_that_the_user_gave_is_dialled_whatever_else_is_told() -> None:
    """Also when the address worked once and now fails."""
    network = Network()
    node = RecordedConnections(network)
    await others(network, A)
    mine = network.address(A)
    node.connections.add(mine, Origin.USER)
    async with node.running() as connections:
        await until(lambda: node.told == [("seen", A)])
        network.cut(ME, A)
        await until(lambda: len(node.told) == 2 and len(node.dials) > 3)
        connections.tell(A, [address(A, "10.0.0.1", number) for number in range(1, 100)])
        assert mine in connections.known[A].addresses
        network.heal()
        await until(lambda: node.told[-1] == ("seen", A))


@skipping_time
async def test_only_what_was_reached_is_remembered_and_told_to_others() -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A, B)
    node.connections.add(network.address(A), Origin.USER)
    node.connections.add(address(C), Origin.USER)
    node.connections.add(address(key(9)), Origin.REMEMBERED)
    async with node.running() as connections:
        await until(lambda: node.told == [("seen", A)])
        connections.add(address(A, "10.0.0.1"))  # hearsay
        connections.add(address(B, "10.0.0.2"))
        connections.tell(key(9), [address(key(9), "10.0.0.3")])
        assert connections.remembered() == [network.address(A)]
        assert connections.reachable(but=B)[-1:] == (network.address(A),)
        assert connections.reachable(but=A) == connections.reachable(but=A)[:1]  # only our own


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (address(A, "203.0.113.7"), "203.0.0.0/16"),
        (f"/ip6/2001:db8:1::7/tcp/4001/p2p/{peer_id_of(A)}", "2001:db8::/32"),
        ("/ip4/203.0.113.7/udp/4001/quic-v1/webtransport", "203.0.0.0/16"),  # p2pd may be reached so, not dialled
        (f"/dns4/node.example.org/tcp/4001/p2p/{peer_id_of(A)}", ""),  # names cost nothing
        (
            f"/ip4/10.1.2.3/tcp/4001/p2p/{peer_id_of(B)}/p2p-circuit/p2p/{peer_id_of(A)}",
            "",
        ),  # the relay's range, not the peer's
        ("/ip4/nonsense/tcp/4001", ""),
        ("/ip4", ""),
        ("", ""),
    ],
)
def test_an_address_range_is_what_one_provider_is_likely_to_own(place: str, expected: str) -> None:
    assert address_range(place) == expected
