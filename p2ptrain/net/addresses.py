"""Says where addresses lead and who is there, and picks which of ours to tell others; p2ptrain/address.py reads them.

Also shortens p2pd's error messages about them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from functools import lru_cache

from p2ptrain.address import ADDRESS_CHARACTERS_MAX, ADDRESSES_KEPT, IP, AddressError, parse, written
from p2ptrain.identity import PeerIdError, key_of, peer_id_of
from p2ptrain.net.transport import TransportError

REASON_CHARACTERS_MAX = 300
# Unspecified and link-local networks; then those for documentation, which examples and tests use as public ones.
NEVER_DIALLED = tuple(map(ipaddress.ip_network, ("0.0.0.0/8", "::/128", "169.254.0.0/16", "fe80::/10", "fec0::/10")))
DOCUMENTATION = tuple(map(ipaddress.ip_network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")))
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are an IPv4 address
EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."


def split(address: str) -> tuple[bytes, str]:
    """Splits an address into its peer and its route, as multiaddr writes it. TransportError if we dial none such."""
    try:
        found = parse(address)
    except AddressError as error:
        raise _not_dialled(address, f": {error}") from error
    if not found.port or not found.peer_id:
        raise _not_dialled(address)
    try:
        if found.relay_id:
            key_of(found.relay_id)
        return key_of(found.peer_id), found.route
    except PeerIdError as error:
        raise TransportError(f"{address}: {error}") from error


def _not_dialled(address: str, why: str = "") -> TransportError:
    short = address[:ADDRESS_CHARACTERS_MAX]
    return TransportError(f"{short!r} is not an address with an id at its end, such as {EXAMPLE}{why}")


class Reach(IntEnum):
    """The networks in which an address leads somewhere, the widest first."""

    PUBLIC = 0
    PRIVATE = 1
    LOOPBACK = 2


@lru_cache(ADDRESSES_KEPT)  # asked for every connected peer, each second
def reach_of(address: str) -> Reach | None:
    """Returns where an address leads; for one through a relay that is where the relay is. None for a name, and for what
    no peer has: link-local, multicast, unspecified and reserved addresses."""
    found = _ip_in(address)
    if found is None:
        return None
    host = _inside(found)
    if host.is_multicast or any(host in each for each in NEVER_DIALLED if each.version == host.version):
        return None
    if host.is_loopback:
        return Reach.LOOPBACK
    if host.is_global or any(host in each for each in DOCUMENTATION if each.version == host.version):
        return Reach.PUBLIC
    return None if host.is_reserved else Reach.PRIVATE


def is_within(address: str, told_in: Reach) -> bool:
    """Whether an address leads into no narrower a network than the one in which whoever told it was met."""
    reach = reach_of(address)
    return reach is not None and reach <= told_in


def met_in(addresses: Iterable[str]) -> Reach:
    """Returns the widest network that a connected peer was met in. Anyone can be behind a relay: that is public."""
    found = [reach_of(each) for each in addresses if "/p2p-circuit" not in each]
    return min((each for each in found if each is not None), default=Reach.PUBLIC)


def endpoint_of(address: str) -> str:
    """Names the place that a dial goes to, IP address and port."""
    found = parse(address)
    host = found.host.lower() if isinstance(found.host, str) else _inside(found.host)
    return f"{host} {found.port}"


def _ip_in(address: str) -> IP | None:
    """Returns the IP address in an address, also of a kind that only p2pd knows. None for a name, which is not read."""
    if not address.startswith("/ip"):
        return None
    with suppress(AddressError):
        host = parse(address).host
        return None if isinstance(host, str) else host
    with suppress(AddressError):
        _, kind, host, *_ = written(address).split("/")
        return ipaddress.ip_address(host) if kind in ("ip4", "ip6") else None
    return None


def _inside(host: IP) -> IP:
    """Returns the IP address that a dial goes to, also if it is inside one of IPv6."""
    if isinstance(host, ipaddress.IPv6Address):
        inside = host.ipv4_mapped or host.sixtofour or (host.teredo or (None, None))[1]
        return inside or (ipaddress.IPv4Address(int(host) % 2**32) if host in NAT64 else host)
    return host


def name_in(address: str) -> str:
    """Returns the host name in an address, or nothing: a first look, for which the address is not read."""
    _, kind, name, *_ = (*address[:ADDRESS_CHARACTERS_MAX].split("/", 3), "", "", "")
    return name.lower() if kind.startswith("dns") else ""


def relay_of(route: str) -> bytes | None:
    """Returns the relay that a route goes through, or None."""
    before, found, _ = route.partition("/p2p-circuit")
    with suppress(AddressError, PeerIdError):
        return key_of(written(before).rpartition("/p2p/")[2]) if found else None
    return None


def join(route: str, peer: bytes) -> str:
    return f"{route}/p2p/{peer_id_of(peer)}"


def worth_telling(routes: list[str]) -> list[str]:
    """Returns the routes at which other machines may reach us; loopback only if there is nothing else."""
    near = [route for route in routes if (host := _ip_in(route)) is None or not host.is_link_local]
    return [route for route in near if (host := _ip_in(route)) is None or not host.is_loopback] or near


def kind_of_address(address: str) -> str:
    """Names the kind of a multiaddr for people: relay, name, loopback, private, public or unknown."""
    host = _ip_in(address)
    if "p2p-circuit" in address.split("/"):
        return "relay"
    if host is None:
        return "name" if address.startswith("/dns") else "unknown"
    return "loopback" if host.is_loopback else "public" if host.is_global else "private"


@lru_cache(1_024)  # asked for every connected peer, again and again
def address_range(address: str) -> str:
    """Returns the range around an address that one provider or attacker is likely to own. Empty if unknown: names cost
    nothing, and anyone can be behind a relay."""
    host = _ip_in(address)
    if host is None or "p2p-circuit" in address.split("/"):
        return ""
    return str(ipaddress.ip_network((host, 16 if host.version == 4 else 32), strict=False))


def reason(told: str | bytes) -> str:
    """Shortens p2pd's message about a failure, which may quote a peer: protobuf gives the bytes if it is not UTF-8."""
    text = " ".join((told if isinstance(told, str) else told.decode(errors="replace")).split())
    if "remote key matches" in text:
        return f"another peer answers there, {text.rpartition('remote key matches ')[2].split(' ')[0].rstrip(']')}"
    for sign, meaning in {
        "connection refused": "nobody listens there (connection refused)",
        "no route to host": "no way there (no route to host)",
        "network is unreachable": "no way there (network is unreachable: is this machine connected?)",
        "no good addresses": "no address to reach: its name does not resolve, or it is an address of this node itself",
        "dial backoff": "it cannot be reached; the next attempt comes in a few seconds",
        "protocols not supported": "it does not speak this protocol",
        "deadline exceeded": "no answer",
        "i/o timeout": "no answer",
        "no addresses": "none of its addresses is known",
    }.items():
        if sign in text:
            return meaning
    return text[-REASON_CHARACTERS_MAX:]
