"""Small questions to one peer, one per stream: its runs, a run's config, its states and peers, and how it sees us.

A peer closes the stream of a question that it does not know. Asking needs no run, only an address. Answers are bounded,
and checked where they are used: a config by the run's id, a state by its root, an address by its peer's key."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from p2ptrain.address import ADDRESS_CHARACTERS_MAX
from p2ptrain.config import CONFIG_BYTES_MAX
from p2ptrain.core import wire
from p2ptrain.core.messages import Digest, Number
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.rate_limit import PeerLimits, TokenBucket
from p2ptrain.net.transport import IsAdmitted, Stream, Transport, TransportError, in_time

PROTOCOL = "/p2ptrain/1/ask"
RUNS_MAX = 64  # in one answer; a node takes part in one run, a bootstrap in a few
STATES_MAX = 16
FOLLOWS_MAX = 64
PEERS_MAX = 32  # addresses per answer: enough to find the rest
NAME_MAX = 64
RELEASE_MAX = 32
QUESTION_BYTES_MAX = 256
ANSWER_BYTES_MAX = CONFIG_BYTES_MAX + 1_024  # a config is the largest
ANSWERS_BYTES_PER_SECOND = 4_096  # per peer, after a first megabyte; a node asks for 14 KB a minute at most
ANSWERS_SHARES = 8, 8  # of the upload limit: 1/8 for strangers, and the same for admitted peers
STRANGERS_ANSWERS_BYTES_PER_SECOND = 2**17  # at most, with or without an upload limit
ANSWER_BYTES_LEAST = 1_024  # what an answer counts, however short: strangers get 128 a second, 5% of the event loop
LOOK_SECONDS = 1.0  # between listings of the connected peers, which take milliseconds when there are hundreds
SECONDS = 15.0
TRIES = 3  # attempts to ask for the time; the quickest answer is the most precise
SKEW_SECONDS_MAX = 3.0  # hivemind's DHT refuses nodes whose clocks are further off


class AskRuns(Struct, frozen=True, array_like=True, tag="runs"):
    """Asks which runs the peer takes part in."""


class AskConfig(Struct, frozen=True, array_like=True, tag="config"):
    run_id: Digest


class AskStates(Struct, frozen=True, array_like=True, tag="states"):
    """Asks which states of this run the peer serves."""

    run_id: Digest


class AskPeers(Struct, frozen=True, array_like=True, tag="peers"):
    """Asks for addresses of peers of this run."""

    run_id: Digest


class AskSeen(Struct, frozen=True, array_like=True, tag="seen"):
    """Asks for the time on the peer's clock and the address at which it sees us."""


class RunInfo(Struct, frozen=True, array_like=True):
    run_id: Digest
    name: Annotated[str, Meta(max_length=NAME_MAX, pattern=r"^[A-Za-z0-9._-]*\Z")]  # others may control a terminal
    round: Number
    members: Annotated[int, Meta(ge=0, le=2**16)]
    follows: Annotated[tuple[Digest, ...], Meta(max_length=FOLLOWS_MAX)] = ()  # the runs before it, the last one first


class Runs(Struct, frozen=True, array_like=True, tag="runs"):
    runs: Annotated[tuple[RunInfo, ...], Meta(max_length=RUNS_MAX)] = ()


class Config(Struct, frozen=True, array_like=True, tag="config"):
    config: Annotated[bytes, Meta(max_length=CONFIG_BYTES_MAX)] = b""  # empty: unknown run


class States(Struct, frozen=True, array_like=True, tag="states"):
    states: Annotated[tuple[tuple[Number, Digest], ...], Meta(max_length=STATES_MAX)] = ()  # round and root


class Peers(Struct, frozen=True, array_like=True, tag="peers"):
    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=ADDRESS_CHARACTERS_MAX)], ...], Meta(max_length=PEERS_MAX)
    ] = ()
    # of who answers, as it says; others may control a terminal
    release: Annotated[str, Meta(max_length=RELEASE_MAX, pattern=r"^[0-9A-Za-z.+!-]*\Z")] = ""
    owner: Annotated[str, Meta(max_length=NAME_MAX, pattern=r"^[A-Za-z0-9._ -]*\Z")] = ""


class Seen(Struct, frozen=True, array_like=True, tag="seen"):
    milliseconds: Number  # since 1970, by the answering peer's clock
    address: Annotated[str, Meta(max_length=ADDRESS_CHARACTERS_MAX, pattern=r"^[0-9A-Za-z./:_-]*\Z")] = ""


Question: TypeAlias = AskRuns | AskConfig | AskStates | AskPeers  # the questions that `serve` hands on
Answer: TypeAlias = Runs | Config | States | Peers | Seen
A = TypeVar("A", Runs, Config, States, Peers, Seen)

_QUESTION: msgspec.msgpack.Decoder[Question | AskSeen] = msgspec.msgpack.Decoder(Question | AskSeen)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


async def serve(
    transport: Transport,
    answer: Callable[[bytes, Question], Answer],
    upload: TokenBucket | None = None,
    is_admitted: IsAdmitted = lambda peer: False,
) -> None:
    """Answers the questions of peers; `answer` gets the peer and the question.

    Answers are charged to the upload limit but do not wait for it. A peer that has used up its share is hung up on;
    otherwise questions alone could take half of the upload from the run. What is longer than the least is charged when
    it has been sent, so that who does not read takes nothing from others."""
    limits = PeerLimits(
        is_admitted, transport.range_of,
        each=ANSWERS_BYTES_PER_SECOND, strangers=STRANGERS_ANSWERS_BYTES_PER_SECOND,
        upload=upload, parts=ANSWERS_SHARES,
    )  # fmt: skip
    seen = _Seen(transport)

    async def handle(stream: Stream) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                question = wire.decode(_QUESTION, await stream.receive(QUESTION_BYTES_MAX), "a question")
                if limits.seconds_until(stream.peer, ANSWER_BYTES_MAX) > 0.0:  # before any work
                    stream.abort()
                    return
                limits.spend(stream.peer, ANSWER_BYTES_LEAST)
                if isinstance(question, AskSeen):
                    frame = wire.encode(await seen.by(stream.peer))
                else:
                    frame = wire.encode(answer(stream.peer, question))
                await stream.send(frame)
                limits.spend(stream.peer, max(0, len(frame) - ANSWER_BYTES_LEAST))
                if upload is not None:
                    upload.charge(len(frame))
        except (TransportError, RemoteProtocolError, TimeoutError):
            stream.abort()

    await transport.serve(PROTOCOL, handle)


class _Seen:
    """Tells peers where this node sees them, from a listing that is shared by all who ask within a second."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._peers: dict[bytes, list[str]] = {}
        self._listed_at = -math.inf
        self._listing = asyncio.Lock()

    async def by(self, peer: bytes) -> Seen:
        async with self._listing:
            if (now := asyncio.get_running_loop().time()) >= self._listed_at + LOOK_SECONDS:
                self._listed_at = now
                with suppress(TransportError):
                    self._peers = await self._transport.peers()
        address = next(iter(self._peers.get(peer, ())), "")  # none, if multiaddr can read none of its addresses
        if len(address) > ADDRESS_CHARACTERS_MAX:
            address = ""
        return Seen(int(time.time() * 1_000), address)  # clock read last: the asker assumes equal latency both ways


async def _ask(
    transport: Transport,
    peer: bytes,
    question: Question | AskSeen,
    kind: type[A],
    took: Callable[[float], None] | None = None,
) -> A:
    """Asks one question. `took` gets the seconds from opening the stream to the answer, about one round trip."""
    clock = asyncio.get_running_loop().time
    with transport.boundary.guard("a question to a peer", peer):
        async with in_time(SECONDS, f"no answer within {SECONDS:.0f} s"):
            asked_at = clock()  # an answer that does not depend on the question could be sent as the stream opens
            stream = await transport.open(peer, PROTOCOL)
            try:
                await stream.send(wire.encode(question))
                answer = wire.decode(_ANSWER, await stream.receive(ANSWER_BYTES_MAX), "an answer")
                if took is not None:
                    took(clock() - asked_at)
            finally:
                stream.abort()
    if not isinstance(answer, kind):
        raise RemoteProtocolError("an answer to another question")
    return answer


async def ask_runs(transport: Transport, peer: bytes) -> tuple[RunInfo, ...]:
    return (await _ask(transport, peer, AskRuns(), Runs)).runs


async def ask_config(transport: Transport, peer: bytes, run_id: bytes) -> bytes:
    """Returns the config, not yet checked against the run's id; empty if the peer does not know the run."""
    return (await _ask(transport, peer, AskConfig(run_id), Config)).config


async def ask_states(transport: Transport, peer: bytes, run_id: bytes) -> tuple[tuple[int, bytes], ...]:
    return (await _ask(transport, peer, AskStates(run_id), States)).states


async def ask_peers(
    transport: Transport, peer: bytes, run_id: bytes, took: Callable[[float], None] | None = None
) -> Peers:
    return await _ask(transport, peer, AskPeers(run_id), Peers, took)


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One peer's answer about us, and how long it took."""

    offset_seconds: float  # how far its clock is ahead of ours
    uncertain_seconds: float  # half of the round trip
    seen_at: str = ""  # our address, as it sees it


async def look_from(transport: Transport, peer: bytes, clock: Callable[[], float] = time.time) -> PeerAnswer:
    """Estimates the clock's offset as NTP does, assuming that the peer answered in the middle of the round trip."""
    best: PeerAnswer | None = None
    for _ in range(TRIES):
        before = clock()
        seen = await _ask(transport, peer, AskSeen(), Seen)
        after = clock()
        offset, uncertain = seen.milliseconds / 1_000 - (before + after) / 2, (after - before) / 2
        if best is None or uncertain < best.uncertain_seconds:
            best = PeerAnswer(offset, uncertain, seen.address)
    assert best is not None
    return best


async def why_not(transport: Transport, peer: bytes) -> str:
    """Says why a peer takes no part in our run, to follow "... is reachable, but"."""
    try:
        runs = await ask_runs(transport, peer)
    except TransportError:
        return "is not a p2ptrain node, or runs an incompatible version"
    except RemoteProtocolError as error:
        return f"its answer is invalid; perhaps it runs another version: {error}"
    names = ", ".join(f"{info.name} ({info.run_id.hex()[:16]})" for info in runs[:4])
    return f"takes part in another run: {names}" if names else "does not take part in any run"
