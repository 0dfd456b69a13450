"""The network: ports, and what peers see: the clock, where we call from, what kind of NAT is between, how fast it is.

Peers are asked with an identity made for the purpose, through a p2pd of its own, so that a daemon that runs here is not
disturbed. Whether others can call us first is found out by libp2p (AutoNAT) in the daemon, in its first minutes: a
peer that dials back whomever it is told to would be a weapon, so we ask for no such thing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2ptrain.config import HttpConfig, NetworkConfig
from p2ptrain.doctor.findings import Finding, refused
from p2ptrain.errors import ConfigError, DataError, P2ptrainError, RemoteProtocolError
from p2ptrain.learn.shortage import mega
from p2ptrain.net import inquiry
from p2ptrain.net.addresses import kind_of_address
from p2ptrain.net.blobs import BlobName, all_pieces
from p2ptrain.net.bulk import FetchError
from p2ptrain.net.fetch import Fetcher
from p2ptrain.net.limits import TokenBucket
from p2ptrain.net.process import with_ports
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.observe import http

PEERS_ASKED = 4  # enough to tell one wrong clock from three right ones
TRIES = 3  # of the clock question: the quickest answer tells most
SKEW_REFUSED_SECONDS = 3.0  # hivemind's DHT refuses those who are further off
SKEW_USUAL_SECONDS = 1.0  # what NTP keeps is a hundredth of it
ASK_SECONDS = 20.0  # for all that one peer is asked
BANDWIDTH_SECONDS = 4.0
BANDWIDTH_BYTES_MAX = 64 * 2**20
TELLING_BYTES = 2**20  # less than a piece tells of delays, not of bandwidth
SLOW_BYTES_PER_SECOND = 125_000  # 1 Mbit/s


# ---------------------------------------------------------------------------------------------------
# Ports


def check_listen(listen: tuple[str, ...], is_running: bool) -> list[Finding]:
    """`is_running`: the node itself runs here, and has them."""
    if not listen:
        fix = "Name an address in network.listen, if others should be able to call first"
        return [Finding("ports", "warning", "nothing is listened on: others cannot call first", fix)]
    found = []
    for address in listen:
        try:
            with_ports((address,))
        except ConfigError as error:
            if is_running and "is in use" in error.problem:
                found.append(Finding("ports", "good", f"{address} is in use, as it should be: the node runs"))
            else:
                found.append(Finding("ports", "failed", error.problem, error.fix))
        else:
            found.append(Finding("ports", "good", f"{address} is free"))
    if all(kind_of_address(address) == "loopback" for address in listen):
        fix = 'Set network.listen to ["/ip4/0.0.0.0/tcp/4001"] to be reached from other machines'
        found.append(Finding("ports", "warning", "only loopback is listened on", fix))
    return found


def check_http(config: HttpConfig, url: str | None) -> Finding:
    """`url` is where the daemon that runs shows itself, if one does."""
    if url:
        return Finding("http", "good", f"{url}, of the node that runs")
    if not config.enabled:
        return Finding("http", "good", "off")
    try:
        listener, token = asyncio.run(http.listen(config))  # as the start does it
    except ConfigError as error:
        return refused("http", error)
    port = listener.getsockname()[1]
    listener.close()
    place, guarded = f"port {config.port} of {config.host}", ", and the token can be read" if token else ""
    if config.port and port != config.port:
        text = f"{place} is taken, perhaps by another node: this one takes a free one{guarded}"
        return Finding("http", "good", text)
    return Finding("http", "good", f"{place} is free{guarded}")


# ---------------------------------------------------------------------------------------------------
# What peers see


@dataclass(frozen=True, slots=True)
class Sight:
    """What one peer has told of us, and how long it took."""

    address: str  # of the peer
    offset_seconds: float  # its clock before ours
    uncertain_seconds: float  # half of what the question and the answer took
    seen_at: str = ""  # our address, as it sees it


async def look_from(transport: Transport, peer: bytes, address: str, clock: Callable[[], float] = time.time) -> Sight:
    """As NTP does it: the answer is taken to be from the middle of the time that it took."""
    best: Sight | None = None
    for _ in range(TRIES):
        before = clock()
        seen = await inquiry.ask_seen(transport, peer)
        after = clock()
        offset, uncertain = seen.milliseconds / 1_000 - (before + after) / 2, (after - before) / 2
        if best is None or uncertain < best.uncertain_seconds:
            best = Sight(address, offset, uncertain, seen.address)
    assert best is not None
    return best


async def ask_peers(transport: Transport, addresses: Sequence[str]) -> tuple[list[Sight], list[Finding], list[bytes]]:
    """What each of these tells, what is wrong with those that do not, and who was reached."""
    found: list[Sight] = []
    trouble: list[Finding] = []
    reached: list[bytes] = []

    async def ask(address: str) -> None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                peer = await transport.connect(address)
                reached.append(peer)
                found.append(await look_from(transport, peer, address))
        except TimeoutError:
            trouble.append(Finding("peers", "warning", f"{address}: no answer within {ASK_SECONDS:.0f} s"))
        except TransportError as error:
            is_older = any(address.endswith(f"/p2p/{each}") for each in map(_name, reached))
            text = f"{address} is of a version that tells no time" if is_older else str(error)
            trouble.append(Finding("peers", "warning", text))
        except RemoteProtocolError as error:
            trouble.append(Finding("peers", "warning", f"{address} answers nonsense: {error.why}", "Name another node"))

    await asyncio.gather(*(ask(address) for address in addresses[:PEERS_ASKED]))
    return found, trouble, reached


def _name(peer: bytes) -> str:
    from p2ptrain.identity import peer_id_of  # noqa: PLC0415

    return peer_id_of(peer)


def judge_peers(asked: int, reached: int, trouble: Sequence[Finding], is_named: bool = True) -> list[Finding]:
    """`is_named`: somebody has named them; those of the last time may have gone for good."""
    if not reached:
        fix = "Check the addresses and this machine's connection; is a firewall in the way?"
        return [*trouble, Finding("peers", "failed" if is_named else "warning", f"none of {asked} can be reached", fix)]
    return [*trouble, Finding("peers", "good", f"{reached} of {asked} answer")]


def judge_clock(sights: Sequence[Sight]) -> Finding:
    """One peer may be wrong itself: what most of them say counts."""
    if not sights:
        return Finding("clock", "warning", "not known: no peer has told its time", "Name a node with --bootstrap")
    offset = statistics.median(each.offset_seconds for each in sights)
    uncertain = max(each.uncertain_seconds for each in sights)
    way = "behind" if offset > 0 else "ahead of"
    peers = "a peer" if len(sights) == 1 else f"{len(sights)} peers"
    text = f"{abs(offset):.2f} s {way} {peers}, give or take {uncertain:.2f} s"
    fix = "Set the clock by NTP (timedatectl set-ntp true), or find out whether it is the peer's that is wrong"
    if abs(offset) - uncertain > SKEW_REFUSED_SECONDS:
        text += f"; more than {SKEW_REFUSED_SECONDS:.0f} s, and the others' DHT refuses this node"
        return Finding("clock", "failed", text, fix)
    if abs(offset) > SKEW_USUAL_SECONDS + uncertain:
        return Finding("clock", "warning", text, fix)
    return Finding("clock", "good", text)


PLACE = re.compile(r"/ip[46]/([0-9A-Fa-f.:]{2,45})/(tcp|udp)/([0-9]{1,5})(/|\Z)")


def places_of(sights: Sequence[Sight]) -> list[tuple[str, int]]:
    """Where peers see us: host and port. A peer in our own network sees what none outside does, so those outside go
    before it; what is no address, though a peer says so, is passed over."""
    found = []
    for each in sights:
        match = PLACE.match(each.seen_at)
        try:
            if match and (host := ipaddress.ip_address(match[1])):
                found.append((str(host), int(match[3])))
        except ValueError:
            continue
    return [each for each in found if _is_global(each[0])] or found


def judge_nat(sights: Sequence[Sight], own: Sequence[str], listen_ports: Sequence[int]) -> Finding:
    """Of what kind the way out is; `own` are this machine's addresses, the ports those that the asking p2pd has."""
    places = places_of(sights)
    if not places:
        if any("/p2p-circuit" in each.seen_at for each in sights):
            return Finding("nat", "warning", "peers are reached through a relay only", "Open a port, if you can")
        return Finding("nat", "warning", "not known: no peer has told where it sees this machine")
    hosts, ports = {host for host, _ in places}, {port for _, port in places}
    seen = ", ".join(sorted(hosts))
    if hosts <= set(own):
        scope = "" if any(_is_global(host) for host in hosts) else ", which is not on the internet"
        return Finding("nat", "good", f"none in between: peers see this machine's own address {seen}{scope}")
    return _behind_router(
        f"peers see {seen}, which is an address of a router", len(places), len(hosts), ports, listen_ports
    )


def _behind_router(text: str, peers: int, hosts: int, ports: set[int], listen_ports: Sequence[int]) -> Finding:
    if peers > 1 and (len(ports) > 1 or hosts > 1):
        fix = (
            "Forward a port on the router, or rely on relays (network.relay): holes cannot be punched through this kind"
        )
        return Finding("nat", "warning", f"{text}, at another port for each peer (symmetric NAT)", fix)
    if ports & set(listen_ports):
        return Finding("nat", "good", f"{text}, at the port that this machine has (a kind that holes go through)")
    if peers > 1:
        return Finding("nat", "good", f"{text}, at one port for all (a kind that holes go through)")
    fix = "Name two nodes with --bootstrap, to tell whether the port is the same for all"
    return Finding("nat", "warning", f"{text}; of what kind it is takes two peers to tell", fix)


def _is_global(host: str) -> bool:
    return ipaddress.ip_address(host).is_global


def _reach_of_daemon(told: Sequence[str]) -> Finding:
    kinds = {kind_of_address(address) for address in told}
    if kinds & {"public", "name"}:
        return Finding("reachability", "good", f"others are told {told[0]}; `p2ptrain peers` shows who calls")
    if "relay" in kinds:
        text = "through a relay: libp2p has found that others cannot call first"
        return Finding("reachability", "warning", text, "Forward the port of network.listen on the router, if you can")
    if not told:
        fix = "Wait a few minutes, or forward the port of network.listen on the router"
        return Finding("reachability", "warning", "no address that others could use is known yet", fix)
    text = f"from the same network alone, as far as is known: {told[0]}"
    fix = "For nodes elsewhere, forward the port of network.listen, or name the address in network.announce"
    return Finding("reachability", "warning", text, fix)


def judge_reach(told: Sequence[str] | None, sights: Sequence[Sight], own: Sequence[str]) -> Finding:
    """`told` are the addresses of the node that runs here, as its p2pd has found them; None: none runs."""
    if told is not None:
        return _reach_of_daemon(told)
    hosts = {host for host, _ in places_of(sights)}
    if not hosts:
        fix = "Name a node with --bootstrap, or look again while the node runs"
        return Finding("reachability", "warning", "not known", fix)
    if hosts <= set(own):
        where = "from the internet" if all(map(_is_global, hosts)) else "from the same network"
        text = f"not known yet: {where}, if the firewall lets the ports of network.listen in"
        fix = "Look again while the node runs: AutoNAT finds out in some minutes"
        return Finding("reachability", "warning", text, fix)
    text = "through the router if it opens a port (UPnP) or holes can be punched, else through a relay"
    return Finding("reachability", "warning", text, "Look again while the node runs: AutoNAT finds out in some minutes")


# ---------------------------------------------------------------------------------------------------
# Bandwidth


class Counting:
    """A sink that keeps nothing."""

    is_quick = True
    leaves = b""

    def __init__(self, bytes_max: int) -> None:
        self.size = self.held = self.got = 0
        self._bytes_max = bytes_max

    def begin(self, size: int, leaves: bytes) -> None:
        self.size, self.leaves = size, leaves

    def read(self, index: int) -> bytes:
        raise DataError("nothing was kept")

    def write(self, index: int, piece: bytes) -> None:
        self.got += len(piece)
        self.held |= 1 << index
        if self.got >= self._bytes_max:
            raise DataError("enough to know")

    def drop(self, index: int) -> None:
        self.held &= ~(1 << index)

    def finish(self) -> None:
        assert self.held == all_pieces(self.size)


async def measure(transport: Transport, peer: bytes, run_id: bytes, size_max: int, download: int) -> Finding:
    """Fetch a part of the state from a peer, as a newcomer would, and throw it away."""
    try:
        states = await inquiry.ask_states(transport, peer, run_id)
    except P2ptrainError as error:
        return Finding("bandwidth", "warning", f"not measured: {error}")
    if not states:
        return Finding("bandwidth", "warning", "not measured: this peer has no state to give", "Name another node")
    sink, failures = Counting(BANDWIDTH_BYTES_MAX), list[str]()
    fetcher = Fetcher(transport, run_id, download=TokenBucket(download), blame=lambda peer, why: failures.append(why))
    loop = asyncio.get_running_loop()
    before = loop.time()
    try:
        async with asyncio.timeout(BANDWIDTH_SECONDS):
            name = BlobName("state", max(states)[1])
            await fetcher.fetch(name, size_max, [peer], sink=sink, failed=lambda peer, why: failures.append(why))
    except (TimeoutError, DataError):
        pass  # as it is meant to be where a state is large
    except FetchError as error:
        failures.append(str(error))
    return judge_bandwidth(sink.got, loop.time() - before, failures, download)


def judge_bandwidth(got: int, seconds: float, failures: Sequence[str], limit: int) -> Finding:
    if not got:
        why = failures[0] if failures else f"nothing came in {seconds:.0f} s"
        return Finding("bandwidth", "warning", f"not measured: {why}")
    rate = got / max(seconds, 1e-9)
    text = f"{mega(got)} received in {seconds:.1f} s" if got >= 10**6 else f"{got:,} bytes received in {seconds:.2f} s"
    if got < TELLING_BYTES:
        return Finding("bandwidth", "good", f"{text}: too little to tell more; sending cannot be measured without harm")
    text += f", {mega(int(rate))}/s; sending is not measured: nobody takes what they did not ask for"
    if limit and rate > limit / 2:
        text += f"; limits.download_bytes_per_second is {limit:,}"
    slow = rate < SLOW_BYTES_PER_SECOND
    fix = "Choose a run with a small payload, or a line with more room" if slow else ""
    return Finding("bandwidth", "warning" if slow else "good", text, fix)


def asking_network(config: NetworkConfig) -> NetworkConfig:
    """For the p2pd that asks: where the node would listen, at ports of its own; no router is changed for it."""
    listen = tuple(dict.fromkeys(re.sub(r"/(tcp|udp)/[0-9]+", r"/\1/0", address) for address in config.listen))
    return NetworkConfig(listen=listen or ("/ip4/127.0.0.1/tcp/0",), nat=False, relay=config.relay)
