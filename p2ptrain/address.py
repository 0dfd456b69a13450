"""Reads and writes addresses (multiaddrs), by the package multiaddr, and holds them to what we take.

We take a place, which is an IP address or a host name with a port of TCP or QUIC. It may be followed by a relay's id
and /p2p-circuit, and by the id of the peer. That leaves out sockets of this machine and transports that p2pd does not
have. multiaddr reads the place; ids are read where ids are (identity.py), since only those of Ed25519 keys count.

Strangers send addresses too, so a first look at the text comes before multiaddr, which takes 0.8 ms for the worst one.
What remains are long host names; `name_in` in net/addresses.py finds them before a stranger's address is read."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from p2ptrain.errors import P2ptrainError

ADDRESS_CHARACTERS_MAX = 448  # a relayed address with two ids and a long name takes 415
# The characters and the lengths of the parts. multiaddr also takes "tcp=4001", "04_001", "//" and slashes at the end.
_PART = r"(0|[1-9][0-9]{0,4}|[a-z][0-9a-z-]{0,15})"
_PLACE = rf"/(ip[46]|dns[46]?)/[0-9A-Za-z.:_-]{{1,253}}(/{_PART}){{2,3}}"
_ID = r"[1-9A-HJ-NP-Za-km-z]{40,64}"
_NAMED = rf"(?P<place>{_PLACE})(/p2p/(?P<relay>{_ID})/p2p-circuit)?(/p2p/(?P<peer>{_ID}))?"
ADDRESS_PATTERN = re.sub(r"\?P<\w+>", "", _NAMED)  # without names, which other kinds of expressions do not have
ADDRESSES_KEPT = 1_024  # addresses that are not read again, as many as peers are remembered; 1 MB
IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_look = re.compile(_NAMED).fullmatch


class AddressError(P2ptrainError, ValueError):
    """A text that is not an address, or none of those that we take. Only the caller knows who wrote it."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address that we take."""

    place: str  # as multiaddr writes it
    family: str  # ip4, ip6, dns, dns4 or dns6
    host: IP | str  # a name is text
    transport: str  # tcp or udp, which is QUIC
    port: int
    relay_id: str  # ids as text, not checked yet; empty: none
    peer_id: str

    @property
    def route(self) -> str:
        """Writes the address without the peer's id."""
        return f"{self.place}/p2p/{self.relay_id}/p2p-circuit" if self.relay_id else self.place

    def __str__(self) -> str:
        return f"{self.route}/p2p/{self.peer_id}" if self.peer_id else self.route

    def at_port(self, port: int) -> str:
        """Writes the place with another port."""
        quic = "" if self.transport == "tcp" else "/quic-v1"
        return written(f"/{self.family}/{self.host}/{self.transport}/{port}{quic}")


def looks_right(text: str) -> bool:
    """The first look at a text, which costs next to nothing."""
    return len(text) <= ADDRESS_CHARACTERS_MAX and _look(text) is not None


@lru_cache(ADDRESSES_KEPT)
def parse(text: str) -> Address:
    """Returns an address that we take. AddressError if it is none."""
    parts = _look(text) if len(text) <= ADDRESS_CHARACTERS_MAX else None
    if parts is None:
        raise AddressError("it does not look like one")
    place = parts["place"]
    whole = to_bytes(place)
    if place.startswith("/ip6/"):  # all others have one spelling
        place = from_bytes(whole)
    match place.split("/"):
        case [_, family, host, "tcp" as transport, port] | [_, family, host, "udp" as transport, port, "quic-v1"]:
            ip = ipaddress.ip_address(host) if family in ("ip4", "ip6") else None
            return Address(place, family, ip or host, transport, int(port), parts["relay"] or "", parts["peer"] or "")
    raise AddressError("it is of a kind that is not dialled")


def written(text: str) -> str:
    """Returns any multiaddr as the package writes it. AddressError if it is none."""
    return from_bytes(to_bytes(text))


def to_bytes(text: str) -> bytes:
    """Returns any multiaddr in libp2p's form. AddressError if it is none."""
    import multiaddr  # noqa: PLC0415  # 50 ms with the first address, which some commands do without

    if len(text) > ADDRESS_CHARACTERS_MAX:
        raise AddressError("it is too long")
    try:
        whole: bytes = multiaddr.Multiaddr(text).to_bytes()
    except multiaddr.exceptions.StringParseError as error:
        raise AddressError(error.message) from error
    return whole


@lru_cache(ADDRESSES_KEPT)
def from_bytes(whole: bytes) -> str:
    """Writes an address in libp2p's form as text. AddressError if it is of a kind that multiaddr does not know."""
    import multiaddr  # noqa: PLC0415

    try:
        return str(multiaddr.Multiaddr(whole))
    except multiaddr.exceptions.BinaryParseError as error:
        raise AddressError(error.message) from error
