"""Addresses are read by multiaddr and held to what we take; no text makes that fail or last."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import process_time

import multiaddr
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2ptrain.address import AddressError, from_bytes, looks_right, parse, to_bytes, written
from p2ptrain.identity import key_of, peer_id_of
from p2ptrain.net import addresses
from p2ptrain.net.libp2p.control import in_bytes, socket_in_bytes
from p2ptrain.net.transport import TransportError

KEY, RELAY_KEY = bytes(range(32)), bytes(range(1, 33))
ID, RELAY = peer_id_of(KEY), peer_id_of(RELAY_KEY)
RSA = "QmNLfbof5rLekrACjeuLk9JmGZD2HDBHCU4z16iYKmx5SE"
SECONDS = 0.1  # for one text; the worst takes 1 ms

TAKEN = {  # a route, and how multiaddr writes it
    "/ip4/203.0.113.7/tcp/4001": "",
    "/ip4/127.0.0.1/udp/65535/quic-v1": "",
    "/ip6/2001:db8::7/tcp/1": "",
    "/ip6/2001:DB8:0:0::7/udp/4001/quic-v1": "/ip6/2001:db8::7/udp/4001/quic-v1",
    "/ip6/::FFFF:127.0.0.1/tcp/9": "/ip6/::ffff:127.0.0.1/tcp/9",
    "/dns/localhost/tcp/4001": "",
    "/dns4/Node.example.org/tcp/4001": "",
    "/dns6/xn--bcher-kva.example./udp/4001/quic-v1": "",
    f"/ip4/198.51.100.7/tcp/4001/p2p/{RELAY}/p2p-circuit": "",
    f"/dns4/a.example/udp/4001/quic-v1/p2p/{RELAY}/p2p-circuit": "",
}
REFUSED = [  # in front of an id
    # hosts
    "", "/", "/ip4", "/ip4//tcp/4001", "/ip4/1.2.3/tcp/4001", "/ip4/1.2.3.256/tcp/4001", "/ip4/01.2.3.4/tcp/4001",
    "/ip4/0x7f.0.0.1/tcp/4001", "/ip4/2130706433/tcp/4001", "/ip4/١.٢.٣.٤/tcp/4001", "/ip4/１.2.3.4/tcp/4001",
    "/ip4/::1/tcp/4001", "/ip6/1.2.3.4/tcp/4001", "/ip6/1::2::3/tcp/4001", "/ip6/[::1]/tcp/4001",
    "/ip6/fe80::1%eth0/tcp/4001", "/ip6zone/eth0/ip6/fe80::1/tcp/4001", "/IP4/1.2.3.4/tcp/4001", "ip4/1.2.3.4/tcp/4001",
    "//ip4/1.2.3.4/tcp/4001", "/ip4/1.2.3.4 /tcp/4001", "/ip4/1.2.3.4\n/tcp/4001", "/ip4/1.2.3.4\0/tcp/4001",
    "/dnsaddr/a.example/tcp/4001", "/dns4/bücher.example/tcp/4001", "/dns4/a b/tcp/4001", f"/dns4/{'a' * 300}/tcp/4001",
    "/unix/run/secret", "/memory/1", "/onion/aaaaaaaaaaaaaaaa:80", "/ip4/1.2.3.4/ip4/1.2.3.4/tcp/4001",
    # ports and transports
    "/ip4/1.2.3.4", "/ip4/1.2.3.4/tcp", "/ip4/1.2.3.4/tcp/", "/ip4/1.2.3.4/tcp/0", "/ip4/1.2.3.4/tcp/65536",
    "/ip4/1.2.3.4/tcp/-1", "/ip4/1.2.3.4/tcp/+1", "/ip4/1.2.3.4/tcp/4_001", "/ip4/1.2.3.4/tcp/ 4001",
    "/ip4/1.2.3.4/tcp/４００１", "/ip4/1.2.3.4/tcp/٤٠٠١", "/ip4/1.2.3.4/tcp/0x10", "/ip4/1.2.3.4/tcp=4001",
    "/ip4/1.2.3.4/TCP/4001", "/ip4/1.2.3.4//tcp/4001", "/ip4/1.2.3.4/tcp/4001/", "/ip4/1.2.3.4/udp/4001",
    "/ip4/1.2.3.4/udp/4001/quic", "/ip4/1.2.3.4/udp/4001/quic-v1/webtransport", "/ip4/1.2.3.4/tcp/4001/ws",
    "/ip4/1.2.3.4/tcp/4001/tls/ws", "/ip4/1.2.3.4/tcp/4001/quic-v1", "/ip4/1.2.3.4/sctp/4001",
    "/ip4/1.2.3.4/tcp/4001/tcp/4002", "/ip4/1.2.3.4/tcp/4001/unix/x",
    # ids and relays
    f"/ip4/1.2.3.4/tcp/4001/p2p/{ID}", f"/ip4/1.2.3.4/tcp/4001/p2p/{ID}/tcp/1", "/ip4/1.2.3.4/tcp/4001/p2p-circuit",
    "/p2p-circuit" * 30, f"/ip4/1.2.3.4/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{RELAY}/p2p-circuit",
    f"/ip4/1.2.3.4/tcp/4001/p2p/{RELAY}/p2p-circuit/ip4/1.2.3.4/tcp/1",
    # accepted until multiaddr read addresses
    "/ip4/1.2.3.4/tcp/04001",  # one place, one spelling
    "/dns4/node_1/tcp/4001",  # could not be dialled then either
    "/dns4/a..b/tcp/4001", "/dns4/-a.example/tcp/4001", f"/dns4/{'a' * 64}/tcp/4001",  # no host names
    "/dns4/ab--c.example/tcp/4001",  # reserved by RFC 5890
    # no node of ours has such an id
    f"/ip4/1.2.3.4/tcp/4001/p2p/{RSA}/p2p-circuit", f"/ip4/1.2.3.4/tcp/4001/p2p/{'1' * 64}/p2p-circuit",
]  # fmt: skip
ENDS_REFUSED = [
    "", "/", "/p2p/", f"/p2p/{ID}/", f"/p2p/{ID} ", f"/p2p/{ID}\n", f"/p2p/{ID[:-1]}", f"/p2p/1{ID}", f"/p2p/{RSA}",
    f"/p2p/{ID.lower()}", f"/p2p={ID}", f"/ipfs/{ID}", f"/p2p/{'z' * 64}", f"/p2p/{ID}/p2p-circuit",
]  # fmt: skip


@pytest.mark.parametrize("route", TAKEN)
def test_what_we_dial_is_written_as_multiaddr_writes_it(route: str) -> None:
    expected = TAKEN[route] or route
    assert addresses.split(f"{route}/p2p/{ID}") == (KEY, expected)
    assert str(parse(f"{route}/p2p/{ID}")) == f"{expected}/p2p/{ID}" == written(f"{route}/p2p/{ID}")
    assert from_bytes(in_bytes(route)) == expected


@pytest.mark.parametrize("route", REFUSED)
def test_all_else_is_refused(route: str) -> None:
    with pytest.raises(TransportError, match=r"address|id"):
        addresses.split(f"{route}/p2p/{ID}")


@pytest.mark.parametrize("end", ENDS_REFUSED)
def test_an_address_ends_with_one_id_of_an_ed25519_key(end: str) -> None:
    with pytest.raises(TransportError, match=r"address|id"):
        addresses.split(f"/ip4/203.0.113.7/tcp/4001{end}")


def test_the_id_is_the_one_that_multiaddr_writes() -> None:
    assert written(f"/p2p/{ID}") == f"/p2p/{ID}"
    assert key_of(from_bytes(to_bytes(f"/p2p/{ID}")).rpartition("/")[2]) == KEY


PIECES = st.sampled_from(
    [
        *(
            "/ip4",
            "/ip6",
            "/dns4",
            "/tcp",
            "/udp",
            "/quic-v1",
            "/p2p",
            "/p2p-circuit",
            "/unix",
            "/ip6zone",
            "/certhash",
        ),
        *("/203.0.113.7", "/2001:db8::7", "/a.example", "/4001", "/65536", "/0", f"/{ID}", f"/{RELAY}", f"/{RSA}"),
        *(
            "/onion3",
            "/garlic64",
            "/memory",
            "/http-path",
            "/ipcidr",
            "/",
            "=",
            "%2f",
            "xn--",
            "m" * 250,
            "٤",
            "\ud800",
            "\0",
        ),
    ]
)
TEXTS = st.text(max_size=1_000) | st.lists(PIECES, max_size=30).map(lambda pieces: "".join(pieces)[:1_000])
ROUTE = "/ip4/203.0.113.7/tcp/4001/p2p/"


@given(TEXTS, st.booleans())
@example("/p2p/m" + "z" * 440, True)
@example("/dns4/" + "a." * 126 + "a/tcp/1", True)
@example(f"{ROUTE}{'z' * 64}/p2p-circuit", True)
@example("/ip4/1.2.3.4" * 83, False)
def test_no_text_of_a_thousand_characters_raises_another_error_or_takes_long(text: str, has_id: bool) -> None:
    address = f"{text}/p2p/{ID}" if has_id else text
    began = process_time()
    with suppress(TransportError):
        peer, route = addresses.split(address)
        assert addresses.split(addresses.join(route, peer)) == (peer, route), "it stays as it is once written"
        assert in_bytes(route) and addresses.endpoint_of(address) and looks_right(address)
    for each in (addresses.reach_of, addresses.name_in, addresses.relay_of, addresses.kind_of_address):
        each(address)
    addresses.address_range(address)
    addresses.worth_telling([address])
    for read in (to_bytes, parse, written):
        with suppress(AddressError):
            read(address)
    assert process_time() - began < SECONDS


@given(st.binary(max_size=1_000))
def test_no_bytes_raise_another_error(whole: bytes) -> None:
    with suppress(AddressError):
        from_bytes(whole)


def test_a_socket_is_written_as_go_libp2p_reads_it() -> None:
    assert socket_in_bytes(Path("/tmp/a.sock")) == bytes.fromhex("9003") + b"\x0b/tmp/a.sock"


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, text=True, stdout=subprocess.PIPE).stdout


def test_neither_its_resolver_nor_another_event_loop_is_loaded_and_help_does_without_it() -> None:
    modules = "*{each.partition('.')[0] for each in sys.modules}"
    read = f"import p2ptrain.net.libp2p.p2pd, sys; from p2ptrain.address import parse; parse('{ROUTE}{ID}')"
    loaded = run(
        f"{read}; import logging; assert not logging.getLogger('multiaddr').handlers; print({modules})"
    ).split()
    assert "multiaddr" in loaded
    assert not {"trio", "trio_typing", "dns", "outcome", "sniffio", "async_generator", "importlib_metadata"} & {*loaded}
    loaded = run(f"import p2ptrain.cli, p2ptrain.config, sys; print({modules})").split()
    assert not {"multiaddr", "netaddr", "cid"} & {*loaded}


def test_an_address_that_is_listed_each_second_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [to_bytes(f"/ip4/203.0.113.77/tcp/{port}") for port in range(4001, 4101)]

    def read() -> list[tuple[str, object]]:
        return [(route := from_bytes(each), addresses.reach_of(f"{route}/p2p/{ID}")) for each in listed]

    found = read()
    monkeypatch.setattr(multiaddr, "Multiaddr", None)
    monkeypatch.setattr(addresses, "parse", None)
    assert read() == found
