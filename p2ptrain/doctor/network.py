"""The network: ports, and how peers see this machine: clock, address, kind of NAT.

Peers are asked under a temporary identity, through a separate p2pd, so that a running daemon is not disturbed. Whether
others can dial this machine is left to libp2p (AutoNAT) in the daemon's first minutes. We do not ask peers to dial us
back, because a peer that dials any given address could be used as a weapon."""

from __future__ import annotations

import asyncio
import ipaddress
import statistics
from collections.abc import Sequence
from contextlib import suppress

from p2ptrain.address import AddressError, parse
from p2ptrain.config import HttpConfig, NetworkConfig
from p2ptrain.doctor.findings import Diagnosis, Level, refused
from p2ptrain.errors import ConfigError, PortTakenError, RemoteProtocolError
from p2ptrain.net import questions
from p2ptrain.net.addresses import kind_of_address
from p2ptrain.net.libp2p.process import Ports
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.observe import http

PEERS_ASKED = 4  # enough to tell one wrong clock from three right ones
SKEW_USUAL_SECONDS = 1.0  # NTP keeps a clock a hundred times closer
ASK_SECONDS = 20.0  # time for all questions to one peer


# -- Ports ------------------------------------------------------------------------------------------


def check_listen(listen: tuple[str, ...], is_running: bool, *, gives_way: bool = False) -> list[Diagnosis]:
    """Checks that the ports to listen on are free, or in use by the running node.

    gives_way: whether a start would take another port instead of a taken one"""
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


# -- As peers see us --------------------------------------------------------------------------------


async def ask_peers(
    transport: Transport, addresses: Sequence[str]
) -> tuple[list[questions.PeerAnswer], list[Diagnosis], list[bytes]]:
    """Asks peers. Returns their answers, a diagnosis for each silent peer, and the peers that were reached."""
    found: list[questions.PeerAnswer] = []
    trouble: list[Diagnosis] = []
    reached: list[bytes] = []

    async def ask(address: str) -> None:
        peer = None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                peer = await transport.connect(address)
                reached.append(peer)
                found.append(await questions.look_from(transport, peer))
        except TimeoutError:
            trouble.append(Diagnosis("peers", "warning", f"{address}: no answer within {ASK_SECONDS:.0f} s"))
        except TransportError as error:
            text = f"{address} does not answer: {error}" if peer else str(error)
            trouble.append(Diagnosis("peers", "warning", text))
        except RemoteProtocolError as error:
            text = f"{address} sent an invalid answer: {error.why}"
            trouble.append(Diagnosis("peers", "warning", text, "Name another node"))

    await asyncio.gather(*(ask(address) for address in addresses[:PEERS_ASKED]))
    return found, trouble, reached


def judge_peers(asked: int, reached: int, trouble: Sequence[Diagnosis], is_named: bool = True) -> list[Diagnosis]:
    """Judges how many peers answered. Remembered peers, unlike named ones, may be gone for good."""
    if not reached:
        fix = "Check the addresses and this machine's connection; is a firewall in the way?"
        level: Level = "failed" if is_named else "warning"
        return [*trouble, Diagnosis("peers", level, f"none of {asked} could be reached", fix)]
    return [*trouble, Diagnosis("peers", "good", f"{reached} of {asked} answered")]


def judge_clock(answers: Sequence[questions.PeerAnswer]) -> Diagnosis:
    """Judges this machine's clock by the median of the peers' clocks, because a single peer may be wrong."""
    if not answers:
        return Diagnosis("clock", "warning", "unknown: no peer sent its time", "Name a node with --bootstrap")
    offset = statistics.median(each.offset_seconds for each in answers)
    uncertain = max(each.uncertain_seconds for each in answers)
    way = "behind" if offset > 0 else "ahead of"
    peers = "a peer" if len(answers) == 1 else f"{len(answers)} peers"
    text = f"{abs(offset):.2f} s {way} {peers}, give or take {uncertain:.2f} s"
    fix = "Set the clock by NTP (timedatectl set-ntp true), or find out whether the peer's clock is wrong"
    if abs(offset) - uncertain > questions.SKEW_SECONDS_MAX:
        text += f"; more than {questions.SKEW_SECONDS_MAX:.0f} s, so the others' DHT refuses this node"
        return Diagnosis("clock", "failed", text, fix)
    if abs(offset) > SKEW_USUAL_SECONDS + uncertain:
        return Diagnosis("clock", "warning", text, fix)
    return Diagnosis("clock", "good", text)


def places_of(answers: Sequence[questions.PeerAnswer]) -> list[tuple[str, int]]:
    """Returns the hosts and ports at which peers see us, with the answers of peers outside our own network first,
    because peers inside see a different address. Answers that are not addresses are ignored."""
    found = []
    for each in answers:
        with suppress(AddressError):
            seen = parse(each.seen_at)
            found += [] if isinstance(seen.host, str) or seen.relay_id else [(str(seen.host), seen.port)]
    return [each for each in found if _is_global(each[0])] or found


def judge_nat(answers: Sequence[questions.PeerAnswer], own: Sequence[str], listen_ports: Sequence[int]) -> Diagnosis:
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


def judge_reach(told: Sequence[str] | None) -> Diagnosis:
    """Judges reachability by the running node's addresses, as its p2pd has found them; None if none is running."""
    if told is None:
        fix = "Look while the node runs: AutoNAT finds out in some minutes"
        return Diagnosis("reachability", "warning", "not known yet", fix)
    kinds = {kind_of_address(address) for address in told}
    if kinds & {"public", "name"}:
        return Diagnosis("reachability", "good", f"others are given {told[0]}; `p2ptrain peers` shows who connects")
    if "relay" in kinds:
        text = "through a relay: libp2p has found that others cannot connect directly"
        fix = "Forward the port of network.listen on the router, if you can"
    elif told:
        text = f"from the same network only, as far as is known: {told[0]}"
        fix = "For nodes elsewhere, forward the port of network.listen, or add the address to network.announce"
    else:
        text = "no address is known yet that others could use"
        fix = "Wait a few minutes, or forward the port of network.listen on the router"
    return Diagnosis("reachability", "warning", text, fix)


def asking_network(config: NetworkConfig) -> NetworkConfig:
    """Returns the config of the temporary p2pd: the node's listen addresses on other ports, without port mapping."""
    listen = tuple(dict.fromkeys(parse(address).at_port(0) for address in config.listen))
    return NetworkConfig(listen=listen or ("/ip4/127.0.0.1/tcp/0",), nat=False, relay=config.relay)
