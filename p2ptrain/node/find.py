"""Finds the run to join, by asking the bootstrap nodes and looking at this node's own disk."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

import msgspec

from p2ptrain.config import PROTOCOLS, NetworkConfig, RunConfig
from p2ptrain.core.admission import Invitation, decode_invitation, make_claim
from p2ptrain.core.origin import Descent
from p2ptrain.data.dataset import MANIFEST_NAME, TokenDataset, store_manifest
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError, P2ptrainError, RemoteProtocolError, TooLargeError
from p2ptrain.files import forget
from p2ptrain.identity import Identity
from p2ptrain.models.adapters import FrozenBase, base_file, read_base
from p2ptrain.net import questions
from p2ptrain.net.address_book import tell
from p2ptrain.net.addresses import kind_of_address, split
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node.fetching import fetch_base, fetch_manifest, fetch_tokenizer, ignore
from p2ptrain.node.heirs import fetch_origin, find_heir, keep_origin
from p2ptrain.node.home import Home
from p2ptrain.node.limits import keep_data_within
from p2ptrain.store.store import ORIGIN_NAME, origin_in
from p2ptrain.visible import count_of

RUN_ID_DIGITS = 64  # a shorter name may be that of many runs, as whoever makes runs can arrange
FIND_SECONDS = 2.0  # between attempts to ask the bootstraps for the run; doubles up to
FIND_SECONDS_MAX = 15.0  # short enough for a person who waits for the node to come up
REST_SECONDS = 2.0  # to wait for the other bootstraps once one has answered; longer if its answer was useless
HEIRS_MAX = 8  # runs of one answer that are asked whether they follow the wanted one
ASK_SECONDS = 5.0  # for bootstraps to answer, if the run is known from an earlier start

log = logging.getLogger("p2ptrain.node")
T = TypeVar("T")

Found = dict[bytes, tuple[questions.RunInfo, list[bytes]]]  # by run id: the run, and the peers that reported it


class OfferError(P2ptrainError):
    """The bootstraps offer nothing that this node can join now; at the next start they may."""


@contextmanager
def as_offered(home: Home, wanted: str | None) -> Iterator[None]:
    """Turns what the owner has to mend into an OfferError, unless the owner has named the run. Otherwise a bootstrap
    chooses it, and with it the error: it could end a node for good, as no supervisor starts it again after the exit
    status of a wrong config or of a run that is too large."""
    try:
        yield
    except (ConfigError, TooLargeError) as error:
        if len(wanted or "") == RUN_ID_DIGITS or not home.config.network.bootstrap:
            raise
        what = "The bootstrap nodes choose the run, as no --run has all of its id: the next start asks them again"
        raise OfferError(f"{error}. {what}") from error


@dataclass(slots=True)
class RunSources:
    """The peers that reported a run, and the addresses to ask for more: the first may have nothing to give."""

    addresses: Sequence[str]
    peers: list[bytes]
    told: questions.RunInfo | None = None  # by the first of them
    origins: Sequence[Descent] = ()  # if the run follows the one that was asked for: how that and those between ended

    async def ask_again(self, transport: Transport, run_id: bytes, rest_seconds: float) -> None:
        """Asks all addresses again and puts new peers of the run first."""
        found, _ = await ask_around(transport, self.addresses, rest_seconds)
        if run_id in found:
            _, told = found[run_id]
            self.peers = [*(peer for peer in told if peer not in self.peers), *self.peers]


async def ask_around(
    transport: Transport, addresses: Sequence[str], rest_seconds: float = REST_SECONDS
) -> tuple[Found, list[str]]:
    """Asks these addresses for their runs. Returns the runs, and a problem for each address that gave no answer."""
    found: Found = {}
    problems: list[str] = []

    async def ask(address: str) -> None:
        try:
            peer = await transport.connect(address)
        except TransportError as error:
            problems.append(str(error))
            return
        try:
            runs = await questions.ask_runs(transport, peer)
        except (TransportError, RemoteProtocolError):
            problems.append(f"{address} is reachable, but {await questions.why_not(transport, peer)}")
            return
        for info in runs:
            found.setdefault(info.run_id, (info, []))[1].append(peer)

    tasks = {asyncio.create_task(ask(address), name=address) for address in addresses}
    try:
        waiting = tasks
        while waiting and not found:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=rest_seconds)
        problems += sorted(f"{task.get_name()}: no answer yet" for task in waiting)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found, problems


async def find_run(transport: Transport, home: Home, wanted: str | None) -> tuple[RunConfig, RunSources]:
    """Returns the config of the run to join and the peers that reported it. Keeps asking the bootstraps. A run on this
    disk comes before what they offer, or a bootstrap could move the nodes that return to it to another run; a single
    one is taken if none of them answers."""
    addresses = home.config.network.bootstrap
    mine = home.current(wanted)
    stored = mine
    if addresses and not wanted:  # a bootstrap unknown to the runs on this disk means another run, if it is named
        stored = [run for run in mine if _is_among_peers(run, home, addresses)]
    home.check_whom_to_ask(stored)
    wait, told = FIND_SECONDS, dict[str, float]()
    while True:
        found: Found = {}
        problems: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_SECONDS if len(stored) == 1 else None):
                found, problems = await ask_around(transport, addresses, wait)  # the first to answer may know no run
        now = asyncio.get_running_loop().time()
        for problem in problems:
            tell(told, problem, now)
        matching = {run_id: each for run_id, each in found.items() if run_id.hex().startswith(wanted or "")}
        ours = {run_id: each for run_id, each in matching.items() if run_id in {run.id for run in mine}}
        is_there = bool(ours or (matching and not mine))
        if not is_there and (heir := await find_successor(transport, home, found, addresses, wanted, mine)) is not None:
            return heir
        if matching and mine and not ours and len(wanted or "") < RUN_ID_DIGITS:
            return _keep_stored_run(matching, mine, stored), RunSources(addresses, [])
        matching = ours or matching
        if len(matching) > 1:
            names = "\n".join(f"  {run_id.hex()}  {info.name}" for run_id, (info, _) in sorted(matching.items()))
            raise ConfigError(f"there are {len(matching)} runs:\n{names}", key="--run", fix="Name one of them")
        for run_id, (info, peers) in matching.items():
            run = await fetch_config(transport, run_id, peers)
            if run is not None:
                return run, RunSources(addresses, peers, info)
        if stored:
            return _only_one(stored, has_asked=bool(addresses)), RunSources(addresses, [])
        if found and not matching:
            tell(told, _without_wanted(found, wanted, have_all_answered=not problems), now)
        await asyncio.sleep(wait)
        wait = min(2 * wait, FIND_SECONDS_MAX)


async def find_successor(
    transport: Transport,
    home: Home,
    found: Found,
    addresses: Sequence[str],
    wanted: str | None,
    mine: Sequence[RunConfig],
) -> tuple[RunConfig, RunSources] | None:
    """Returns the run that follows the wanted one, or one of `mine`, if that has ended while this node was away."""
    names = {run.id for run in mine}
    for run_id, (info, peers) in [*found.items()][:HEIRS_MAX]:
        meant = [each for each in info.follows if each in names or (wanted and each.hex().startswith(wanted))]
        if not meant:
            continue
        try:
            run = await fetch_config(transport, run_id, peers)
        except ConfigError as error:  # nobody has proved yet that it follows
            log.warning("what is said to follow run %s: %s", meant[-1].hex()[:16], error)
            continue
        if run is None:
            continue
        if origins := await find_heir(transport, home, meant[-1], run, peers):
            what = "run %s has ended with round %s, as its members decided; it goes on as %s (%s)"
            log.warning(what, meant[-1].hex()[:16], origins[0].last.manifest.round, run.run_id[:16], run.name)
            return run, RunSources(addresses, peers, info, origins)
    return None


def _only_one(stored: Sequence[RunConfig], *, has_asked: bool) -> RunConfig:
    """Returns the run of this disk to go on with; raises ConfigError if there are several."""
    if len(stored) > 1:
        names = ", ".join(run.run_id[:16] for run in stored)
        raise ConfigError(f"there are {len(stored)} runs on this disk: {names}", key="--run", fix="Name one of them")
    [run] = stored
    if has_asked:
        log.warning("no bootstrap node answers; continuing run %s (%s) from this disk", run.name, run.run_id)
    return run


def _without_wanted(found: Found, wanted: str | None, *, have_all_answered: bool) -> str:
    """Returns what to say of bootstraps that do not know the named run; raises OfferError if there are no others."""
    names = ", ".join(f"{run_id.hex()[:16]} ({info.name})" for run_id, (info, _) in sorted(found.items()))
    what = f"the bootstrap nodes do not know run {wanted}, only {names}"
    if have_all_answered:
        raise OfferError(f"--run: {what}. Name one of them")
    return what


def _keep_stored_run(offered: Found, mine: Sequence[RunConfig], stored: Sequence[RunConfig]) -> RunConfig:
    """Returns the run of this disk to go on with where bootstraps offer others; ConfigError if none is clear."""
    others = ", ".join(f"{run_id.hex()} ({info.name})" for run_id, (info, _) in sorted(offered.items()))
    if len(stored) != 1:
        kept = ", ".join(f"{run.run_id} ({run.name})" for run in mine)
        what = f"the bootstrap nodes know only {others}, and this directory has {kept}"
        raise ConfigError(what, key="--run", fix="Name the run to join")
    [run] = stored
    what = "the bootstrap nodes know only %s; continuing run %s (%s) from this disk. --run joins another"
    log.warning(what, others, run.name, run.run_id)
    return run


def _is_among_peers(run: RunConfig, home: Home, addresses: Sequence[str]) -> bool:
    """Whether one of these addresses belongs to a remembered peer of this run."""
    known = {address.rpartition("/p2p/")[2] for address in home.peers_of(run)}
    return any(address.rpartition("/p2p/")[2] in known for address in addresses)


def check_addresses(network: NetworkConfig) -> None:
    """Raises ConfigError for a malformed address, which would otherwise be tried forever."""
    for key, addresses in (("bootstrap", network.bootstrap), ("trusted_relays", network.trusted_relays)):
        for address in addresses:
            try:
                split(address)
            except TransportError as error:
                raise ConfigError(
                    str(error), key=f"network.{key}", fix="Check that it was copied completely"
                ) from error


def with_relays(home: Home, wanted: str | None) -> NetworkConfig:
    """Adds relays to the network config: the bootstraps, and remembered peers, so that a node behind a router still has
    relays if it restarts without a bootstrap or if that has gone for good. Public addresses come first, since private
    ones are reachable only from the same network."""
    network = home.config.network
    if network.trusted_relays:
        return network
    remembered = [address for run in home.runs(wanted) for address in home.peers_of(run)]
    SystemRandom().shuffle(remembered)  # so that the same few peers are not first at every start
    remembered.sort(key=lambda address: kind_of_address(address) in ("public", "name"), reverse=True)
    return network.model_copy(update={"trusted_relays": (*network.bootstrap, *remembered)})


async def fetch_config(transport: Transport, run_id: bytes, peers: list[bytes]) -> RunConfig | None:
    """Fetches the run's config from the first peer that sends the right one."""
    for peer in peers:
        try:
            encoded = await questions.ask_config(transport, peer, run_id)
            if digest("run id", encoded) == run_id:  # whoever sent it, this is the run's config
                _check_protocol(run_id, encoded)
            run = RunConfig.from_canonical(encoded)
        except (TransportError, RemoteProtocolError) as error:
            log.warning("cannot get the config from %s: %s", peer.hex()[:16], error)
            continue
        if run.is_sealed and run.id == run_id:
            return run
        log.warning("%s sent a config that is not the run's", peer.hex()[:16])
    return None


def _check_protocol(run_id: bytes, encoded: bytes) -> None:
    """Raises ConfigError if the run uses another protocol version."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        needed = msgspec.json.decode(encoded, type=dict[str, object]).get("protocol")
        if needed not in PROTOCOLS:
            spoken = " and ".join(map(str, PROTOCOLS))
            what = f"{run_id.hex()[:16]} uses protocol {ascii(needed)[:20]}, and this release speaks {spoken}"
            raise ConfigError(what, key="--run", fix="Install a release that speaks it")


def open_dataset(directory: Path, manifest: str) -> TokenDataset | None:
    """Opens a data set; None if it has to be fetched because it is missing or damaged."""
    if not (directory / MANIFEST_NAME).exists():
        return None
    try:
        return TokenDataset.open(directory, manifest)
    except DataError as error:
        log.warning("%s: fetching it again", error)
        return None


async def fetch_dataset(
    transport: Transport, home: Home, run: RunConfig, directory: Path, sources: RunSources
) -> TokenDataset:
    """Fetches the data set's manifest and tokenizer; its pieces are fetched when they are needed."""

    async def fetch(fetcher: Fetcher) -> TokenDataset:
        encoded = await fetch_manifest(fetcher, run.data.manifest, sources.peers)
        data = await asyncio.to_thread(store_manifest, directory, encoded, run.data.manifest)
        if run.tokenizer.kind == "json":
            await fetch_tokenizer(fetcher, run, data, sources.peers)
        await asyncio.to_thread(keep_data_within, run, home, data)
        return data

    return await _keep_trying(transport, home, run, sources, fetch)


async def find_base(transport: Transport, home: Home, run: RunConfig, sources: RunSources) -> FrozenBase | None:
    """Returns the frozen weights of a run that trains adapters, from this disk if they are there; else fetches them."""
    if not run.adapt.is_on:
        return None
    directory = home.bases
    path = base_file(directory, run.adapt.base)
    if path.exists():
        base = await asyncio.to_thread(read_base, path)
        if base.digest == run.adapt.base:
            return base
        log.warning("%s: damaged: fetching it again", path)
        forget(path)
    log.info("fetching the weights that the run adapts: %s", count_of(run.adapt.base_bytes))
    await _keep_trying(
        transport, home, run, sources, lambda fetcher: fetch_base(fetcher, run, directory, sources.peers)
    )
    return await asyncio.to_thread(read_base, path)


async def find_origin(transport: Transport, home: Home, run: RunConfig, sources: RunSources) -> None:
    """Makes sure that this disk has where a run comes from, if it follows another."""
    if not run.predecessor.run:
        return
    try:
        if origin_in(home.of_run(run.id)) is not None:
            return
    except DataError as error:
        log.warning("%s: fetching it again", error)
        forget(home.of_run(run.id) / ORIGIN_NAME)
    fetch = await _keep_trying(transport, home, run, sources, lambda fetcher: fetch_origin(fetcher, run, sources.peers))
    await asyncio.to_thread(keep_origin, home, run, fetch)


async def _keep_trying(
    transport: Transport, home: Home, run: RunConfig, sources: RunSources, fetch: Callable[[Fetcher], Awaitable[T]]
) -> T:
    """Fetches what the node cannot begin without, for as long as it takes."""
    run_id, rate = run.id, TokenBucket(home.config.limits.download_bytes_per_second)
    fetcher = Fetcher(transport, run_id, download=rate, blame=ignore)
    wait = FIND_SECONDS
    while True:
        try:
            return await fetch(fetcher)
        except FetchError as error:
            log.warning("%s; the node keeps trying", error)
        await asyncio.sleep(wait)
        await sources.ask_again(transport, run_id, wait)
        wait = min(2 * wait, FIND_SECONDS_MAX)


def read_invitation(text_or_file: str) -> Invitation:
    """Reads an invitation, or the file that contains it."""
    try:
        if re.fullmatch(r"[0-9a-f]{128,}", text_or_file):  # longer than what people call a file
            return decode_invitation(text_or_file)
        return decode_invitation(Path(text_or_file).read_text("utf-8"))
    except (OSError, ValueError, RemoteProtocolError) as error:  # ValueError: not UTF-8, or a name with a zero byte
        fix = "Use the invitation exactly as you received it: its text, or the file that contains it"
        raise ConfigError(f"not an invitation: {error}", key="--invitation", fix=fix) from error


def claim_for(invitation: Invitation, identity: Identity, run_id: str) -> bytes:
    """Returns the claim that this node shows when it asks to join: the bearer's signature for its key."""
    bearer = Identity(invitation.seed)
    if bearer.key != invitation.ticket.bearer:
        raise ConfigError("not an invitation: its key is damaged", key="--invitation", fix="Ask for it again")
    return make_claim(invitation.ticket, bearer.sign, bytes.fromhex(run_id), identity.key)
