"""The network: ports, and how peers see this machine: clock, address, kind of NAT, bandwidth.

Peers are asked under a temporary identity, through a separate p2pd, so that a running daemon is not disturbed. Whether
others can dial this machine is left to libp2p (AutoNAT) in the daemon's first minutes. We do not ask peers to dial us
back, because a peer that dials any given address could be used as a weapon.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2ptrain.config import HttpConfig, NetworkConfig
from p2ptrain.doctor.findings import Diagnosis, refused
from p2ptrain.errors import ConfigError, DataError, P2ptrainError, PortTakenError, RemoteProtocolError
from p2ptrain.exact.shortage import mega
from p2ptrain.net import questions
from p2ptrain.net.addresses import kind_of_address
from p2ptrain.net.blobs.blob import BlobName, all_pieces
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.libp2p.process import Ports
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.observe import http

PEERS_ASKED = 4  # enough to tell one wrong clock from three right ones
TRIES = 3  # attempts to ask for the time; the quickest answer is the most precise
SKEW_REFUSED_SECONDS = 3.0  # hivemind's DHT refuses nodes whose clocks are further off
SKEW_USUAL_SECONDS = 1.0  # NTP keeps a clock a hundred times closer
ASK_SECONDS = 20.0  # time for all questions to one peer
BANDWIDTH_SECONDS = 4.0
BANDWIDTH_BYTES_MAX = 64 * 2**20
TELLING_BYTES = 2**20  # less than one piece would measure latency rather than bandwidth
SLOW_BYTES_PER_SECOND = 125_000  # 1 Mbit/s


# ---------------------------------------------------------------------------------------------------
# Ports


def check_listen(listen: tuple[str, ...], is_running: bool, *, gives_way: bool = False) -> list[Diagnosis]:
    """Checks that the ports to listen on are free, or in use by the running node.

    gives_way: whether a start would take another port instead of a taken one
    """
    if not listen:
        fix = "Add an address to network.listen if others should be able to connect to this node"
        return [Diagnosis("ports", "warning", "it listens on no address: others cannot connect to it", fix)]
    found = []
    for address in listen:
        try:
            Ports((address,)).close()
        except ConfigError as error:
            if is_running and isinstance(error, PortTakenError):
                found.append(Diagnosis("ports", "good", f"{address} is in use by the running node, as it should be"))
            elif gives_way and isinstance(error, PortTakenError):
                text = f"{address} is in use, perhaps by another node: this one will take a free port"
                found.append(Diagnosis("ports", "good", text))
            else:
                found.append(Diagnosis("ports", "failed", error.problem, error.fix))
        else:
            found.append(Diagnosis("ports", "good", f"{address} is free"))
    if all(kind_of_address(address) == "loopback" for address in listen):
        fix = 'Set network.listen to ["/ip4/0.0.0.0/tcp/4001"] to be reached from other machines'
        found.append(Diagnosis("ports", "warning", "it listens on loopback only", fix))
    return found


def check_http(config: HttpConfig, url: str | None) -> Diagnosis:
    """Checks the HTTP port; `url` is the running daemon's page, if there is one."""
    if url:
        return Diagnosis("http", "good", f"{url}, served by the running node")
    if not config.enabled:
        return Diagnosis("http", "good", "off")
    try:
        listener, token = asyncio.run(http.listen(config))  # opens the port as a start does
    except ConfigError as error:
        return refused("http", error)
    port = listener.getsockname()[1]
    listener.close()
    place, guarded = f"port {config.port} of {config.host}", ", and the token is readable" if token else ""
    if config.port and port != config.port:
        text = f"{place} is taken, perhaps by another node: this one will take a free port{guarded}"
        return Diagnosis("http", "good", text)
    return Diagnosis("http", "good", f"{place} is free{guarded}")


# ---------------------------------------------------------------------------------------------------
# As peers see us


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One peer's answer about us, and how long it took."""

    address: str  # the peer's address
    offset_seconds: float  # how far its clock is ahead of ours
    uncertain_seconds: float  # half of the round trip
    seen_at: str = ""  # our address, as it sees it


async def look_from(
    transport: Transport, peer: bytes, address: str, clock: Callable[[], float] = time.time
) -> PeerAnswer:
    """Estimates the clock's offset as NTP does, assuming that the peer answered in the middle of the round trip."""
    best: PeerAnswer | None = None
    for _ in range(TRIES):
        before = clock()
        seen = await questions.ask_seen(transport, peer)
        after = clock()
        offset, uncertain = seen.milliseconds / 1_000 - (before + after) / 2, (after - before) / 2
        if best is None or uncertain < best.uncertain_seconds:
            best = PeerAnswer(address, offset, uncertain, seen.address)
    assert best is not None
    return best


async def ask_peers(
    transport: Transport, addresses: Sequence[str]
) -> tuple[list[PeerAnswer], list[Diagnosis], list[bytes]]:
    """Asks peers. Returns their answers, a diagnosis for each silent peer, and the peers that were reached."""
    found: list[PeerAnswer] = []
    trouble: list[Diagnosis] = []
    reached: list[bytes] = []

    async def ask(address: str) -> None:
        peer = None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                peer = await transport.connect(address)
                reached.append(peer)
                found.append(await look_from(transport, peer, address))
        except TimeoutError:
            trouble.append(Diagnosis("peers", "warning", f"{address}: no answer within {ASK_SECONDS:.0f} s"))
        except TransportError as error:
            text = f"{address} does not answer: {error}" if peer else str(error)
            trouble.append(Diagnosis("peers", "warning", text))
        except RemoteProtocolError as error:
            trouble.append(
                Diagnosis("peers", "warning", f"{address} sent an invalid answer: {error.why}", "Name another node")
            )

    await asyncio.gather(*(ask(address) for address in addresses[:PEERS_ASKED]))
    return found, trouble, reached


def judge_peers(asked: int, reached: int, trouble: Sequence[Diagnosis], is_named: bool = True) -> list[Diagnosis]:
    """Judges how many peers answered. Remembered peers, unlike named ones, may be gone for good."""
    if not reached:
        fix = "Check the addresses and this machine's connection; is a firewall in the way?"
        return [
            *trouble,
            Diagnosis("peers", "failed" if is_named else "warning", f"none of {asked} could be reached", fix),
        ]
    return [*trouble, Diagnosis("peers", "good", f"{reached} of {asked} answered")]


def judge_clock(answers: Sequence[PeerAnswer]) -> Diagnosis:
    """Judges this machine's clock by the median of the peers' clocks, because a single peer may be wrong."""
    if not answers:
        return Diagnosis("clock", "warning", "unknown: no peer sent its time", "Name a node with --bootstrap")
    offset = statistics.median(each.offset_seconds for each in answers)
    uncertain = max(each.uncertain_seconds for each in answers)
    way = "behind" if offset > 0 else "ahead of"
    peers = "a peer" if len(answers) == 1 else f"{len(answers)} peers"
    text = f"{abs(offset):.2f} s {way} {peers}, give or take {uncertain:.2f} s"
    fix = "Set the clock by NTP (timedatectl set-ntp true), or find out whether the peer's clock is wrong"
    if abs(offset) - uncertain > SKEW_REFUSED_SECONDS:
        text += f"; more than {SKEW_REFUSED_SECONDS:.0f} s, so the others' DHT refuses this node"
        return Diagnosis("clock", "failed", text, fix)
    if abs(offset) > SKEW_USUAL_SECONDS + uncertain:
        return Diagnosis("clock", "warning", text, fix)
    return Diagnosis("clock", "good", text)


PLACE = re.compile(r"/ip[46]/([0-9A-Fa-f.:]{2,45})/(tcp|udp)/([0-9]{1,5})(/|\Z)")


def places_of(answers: Sequence[PeerAnswer]) -> list[tuple[str, int]]:
    """Returns the hosts and ports at which peers see us, with the answers of peers outside our own network first,
    because peers inside see a different address. Answers that are not addresses are ignored."""
    found = []
    for each in answers:
        match = PLACE.match(each.seen_at)
        try:
            if match and (host := ipaddress.ip_address(match[1])):
                found.append((str(host), int(match[3])))
        except ValueError:
            continue
    return [each for each in found if _is_global(each[0])] or found


def judge_nat(answers: Sequence[PeerAnswer], own: Sequence[str], listen_ports: Sequence[int]) -> Diagnosis:
    """Judges the kind of NAT; `own` are this machine's addresses, `listen_ports` those of the asking p2pd."""
    places = places_of(answers)
    if not places:
        if any("/p2p-circuit" in each.seen_at for each in answers):
            return Diagnosis("nat", "warning", "peers can be reached through a relay only", "Open a port, if you can")
        return Diagnosis("nat", "warning", "unknown: no peer told at which address it sees this machine")
    hosts, ports = {host for host, _ in places}, {port for _, port in places}
    seen = ", ".join(sorted(hosts))
    if hosts <= set(own):
        scope = "" if any(_is_global(host) for host in hosts) else ", which is not on the internet"
        return Diagnosis("nat", "good", f"none: peers see this machine's own address {seen}{scope}")
    return _behind_router(f"peers see {seen}, an address of a router", len(places), len(hosts), ports, listen_ports)


def _behind_router(text: str, peers: int, hosts: int, ports: set[int], listen_ports: Sequence[int]) -> Diagnosis:
    if peers > 1 and (len(ports) > 1 or hosts > 1):
        fix = "Forward a port on the router, or rely on relays (network.relay): hole punching fails with this kind"
        return Diagnosis("nat", "warning", f"{text}, at a different port for each peer (symmetric NAT)", fix)
    if ports & set(listen_ports):
        return Diagnosis("nat", "good", f"{text}, at this machine's own port (hole punching works)")
    if peers > 1:
        return Diagnosis("nat", "good", f"{text}, at the same port for all (hole punching works)")
    fix = "Name two nodes with --bootstrap to find out whether the port is the same for all"
    return Diagnosis("nat", "warning", f"{text}; two peers are needed to tell its kind", fix)


def _is_global(host: str) -> bool:
    return ipaddress.ip_address(host).is_global


def _reach_of_daemon(told: Sequence[str]) -> Diagnosis:
    kinds = {kind_of_address(address) for address in told}
    if kinds & {"public", "name"}:
        return Diagnosis("reachability", "good", f"others are given {told[0]}; `p2ptrain peers` shows who connects")
    if "relay" in kinds:
        text = "through a relay: libp2p has found that others cannot connect directly"
        return Diagnosis(
            "reachability", "warning", text, "Forward the port of network.listen on the router, if you can"
        )
    if not told:
        fix = "Wait a few minutes, or forward the port of network.listen on the router"
        return Diagnosis("reachability", "warning", "no address is known yet that others could use", fix)
    text = f"from the same network only, as far as is known: {told[0]}"
    fix = "For nodes elsewhere, forward the port of network.listen, or add the address to network.announce"
    return Diagnosis("reachability", "warning", text, fix)


def judge_reach(told: Sequence[str] | None, answers: Sequence[PeerAnswer], own: Sequence[str]) -> Diagnosis:
    """Judges reachability; `told` are the running node's addresses as found by its p2pd, None if none is running."""
    if told is not None:
        return _reach_of_daemon(told)
    hosts = {host for host, _ in places_of(answers)}
    if not hosts:
        fix = "Name a node with --bootstrap, or look again while the node runs"
        return Diagnosis("reachability", "warning", "not known", fix)
    if hosts <= set(own):
        where = "from the internet" if all(map(_is_global, hosts)) else "from the same network"
        text = f"not known yet: {where}, if the firewall admits the ports of network.listen"
        fix = "Look again while the node runs: AutoNAT finds out in some minutes"
        return Diagnosis("reachability", "warning", text, fix)
    text = "through the router if it opens a port (UPnP) or holes can be punched, else through a relay"
    return Diagnosis(
        "reachability", "warning", text, "Look again while the node runs: AutoNAT finds out in some minutes"
    )


# ---------------------------------------------------------------------------------------------------
# Bandwidth


class NullSink:
    """A sink that counts pieces and drops them."""

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


class Bandwidth(NamedTuple):
    """A measured bandwidth; 0 if too few bytes arrived for a measurement."""

    diagnosis: Diagnosis
    bytes_per_second: float = 0.0


async def measure(transport: Transport, peer: bytes, run_id: bytes, size_max: int, download: int) -> Bandwidth:
    """Measures the bandwidth by downloading part of a peer's state as a newcomer would, and drops the bytes."""
    try:
        states = await questions.ask_states(transport, peer, run_id)
    except P2ptrainError as error:
        return Bandwidth(Diagnosis("bandwidth", "warning", f"not measured: {error}"))
    if not states:
        what = "not measured: this peer has no state to serve"
        return Bandwidth(Diagnosis("bandwidth", "warning", what, "Name another node"))
    sink, failures = NullSink(BANDWIDTH_BYTES_MAX), list[str]()
    fetcher = Fetcher(transport, run_id, download=TokenBucket(download), blame=lambda peer, why: failures.append(why))
    loop = asyncio.get_running_loop()
    before = loop.time()
    try:
        async with asyncio.timeout(BANDWIDTH_SECONDS):
            name = BlobName("state", max(states)[1])
            await fetcher.fetch_into(sink, name, size_max, [peer], failed=lambda peer, why: failures.append(why))
    except (TimeoutError, DataError):
        pass  # expected if the state is large
    except FetchError as error:
        failures.append(str(error))
    return judge_bandwidth(sink.got, loop.time() - before, failures, download)


def judge_bandwidth(got: int, seconds: float, failures: Sequence[str], limit: int) -> Bandwidth:
    if not got:
        why = failures[0] if failures else f"nothing received in {seconds:.0f} s"
        return Bandwidth(Diagnosis("bandwidth", "warning", f"not measured: {why}"))
    rate = got / max(seconds, 1e-9)
    text = f"{mega(got)} received in {seconds:.1f} s" if got >= 10**6 else f"{got:,} bytes received in {seconds:.2f} s"
    if got < TELLING_BYTES:
        text += ": too little for a bandwidth; upload cannot be measured without burdening peers"
        return Bandwidth(Diagnosis("bandwidth", "good", text))
    text += f", {mega(int(rate))}/s; upload is not measured: peers accept only what they asked for"
    if limit and rate > limit / 2:
        text += f"; limits.download_bytes_per_second is {limit:,}"
    slow = rate < SLOW_BYTES_PER_SECOND
    fix = "Choose a run with a small payload, or a faster connection" if slow else ""
    return Bandwidth(Diagnosis("bandwidth", "warning" if slow else "good", text, fix), rate)


def asking_network(config: NetworkConfig) -> NetworkConfig:
    """Returns the config of the temporary p2pd: the node's listen addresses on other ports, without port mapping."""
    listen = tuple(dict.fromkeys(re.sub(r"/(tcp|udp)/[0-9]+", r"/\1/0", address) for address in config.listen))
    return NetworkConfig(listen=listen or ("/ip4/127.0.0.1/tcp/0",), nat=False, relay=config.relay)
