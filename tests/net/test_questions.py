"""Small questions to one peer, also with hostile questions and answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from p2ptrain.address import ADDRESS_CHARACTERS_MAX
from p2ptrain.config import CONFIG_BYTES_MAX
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net import questions
from p2ptrain.net.questions import (
    ANSWER_BYTES_MAX,
    ANSWERS_BYTES_PER_SECOND,
    NAME_MAX,
    PEERS_MAX,
    PROTOCOL,
    QUESTION_BYTES_MAX,
    RUNS_MAX,
    SECONDS,
    STATES_MAX,
    Answer,
    Config,
    Peers,
    Question,
    RunInfo,
    Runs,
    States,
)
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import Stream, TransportError
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import at, key, skipping_time, some_bytes

A, B = key(1), key(2)
RUN = bytes(range(32))
encode = msgspec.msgpack.encode


async def two() -> tuple[MemoryTransport, MemoryTransport]:
    network = Network()
    asking, asked = network.transport(A), network.transport(B)
    await asking.connect(asked.addresses()[0])
    return asking, asked


LARGEST: list[tuple[Callable[[MemoryTransport], Awaitable[object]], Answer]] = [
    (
        lambda transport: questions.ask_runs(transport, B),
        Runs(tuple(RunInfo(some_bytes(32, n), "n" * NAME_MAX, 2**48 - 1, 2**16) for n in range(RUNS_MAX))),
    ),
    (lambda transport: questions.ask_config(transport, B, RUN), Config(some_bytes(CONFIG_BYTES_MAX))),
    (
        lambda transport: questions.ask_states(transport, B, RUN),
        States(tuple((2**48 - 1, some_bytes(32, n)) for n in range(STATES_MAX))),
    ),
    (
        lambda transport: questions.ask_peers(transport, B, RUN),
        Peers(("/" + "ß" * (ADDRESS_CHARACTERS_MAX - 1),) * PEERS_MAX),
    ),
]


@skipping_time
async def test_an_answer_that_is_sent_before_the_question_does_not_make_its_sender_seem_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (asking, asked), took = await two(), list[float]()
    opened = asking.open

    async def far(peer: bytes, protocol: str) -> Stream:
        await at(asyncio.get_running_loop().time() + 0.2)
        return await opened(peer, protocol)

    async def hasty(stream: Stream) -> None:
        await stream.send(encode(Peers()))

    monkeypatch.setattr(asking, "open", far)
    await asked.serve(PROTOCOL, hasty)
    await questions.ask_peers(asking, B, RUN, took.append)
    assert took[0] >= 0.2


@skipping_time
async def test_each_question_gets_its_answer_however_large() -> None:
    asking, asked = await two()
    answers: list[Answer] = []
    heard: list[tuple[bytes, Question]] = []

    def answer(peer: bytes, question: Question) -> Answer:
        heard.append((peer, question))
        return answers[-1]

    await questions.serve(asked, answer)
    for ask, largest in LARGEST:
        answers.append(largest)
        assert await ask(asking) in (largest, msgspec.structs.astuple(largest)[0])
    assert heard == [
        (A, questions.AskRuns()),
        (A, questions.AskConfig(RUN)),
        (A, questions.AskStates(RUN)),
        (A, questions.AskPeers(RUN)),
    ]
    await asked.close()


@skipping_time
async def test_answers_count_towards_the_upload_limit_and_do_not_wait() -> None:
    asking, asked = await two()
    upload = TokenBucket(100_000)
    await questions.serve(asked, lambda peer, question: Config(some_bytes(CONFIG_BYTES_MAX)), upload)
    assert upload.take_now(PIECE_BYTES)  # empties the bucket
    before = asyncio.get_running_loop().time()
    for _ in range(5):
        assert len(await questions.ask_config(asking, B, RUN)) == CONFIG_BYTES_MAX
    assert asyncio.get_running_loop().time() < before + 1.0
    await upload.take(100_000)  # at half the rate until the answers are paid for
    assert asyncio.get_running_loop().time() == pytest.approx(before + 2.0, rel=0.05)
    await asked.close()


BAD_ANSWERS: list[bytes] = [
    b"",
    b"\xc1",
    b"\x91" * 3_000,
    encode(["runs", [[RUN, "name", 1]]]),
    encode(["runs", [[RUN, "n" * (NAME_MAX + 1), 1, 1]]]),
    encode(["runs", [[RUN, "name", -1, 1]]]),
    encode(["runs", [[RUN[:31], "name", 1, 1]]]),
    encode(["runs", [[RUN, "na\x1b[2Jme", 1, 1]]]),  # terminal control codes
    encode(["runs", [[RUN, "name\n", 1, 1]]]),
    encode(["runs", [[RUN, "name", 1, 1]] * (RUNS_MAX + 1)]),
    encode(["config", b""]),
    encode(["states", []]),
    encode(["unknown", []]),
    encode(["runs", []]) + b"\0",
    bytes(ANSWER_BYTES_MAX + 1),
]


def answering(answer: bytes) -> Callable[[Stream], Awaitable[None]]:
    async def answers(stream: Stream) -> None:
        await stream.receive(QUESTION_BYTES_MAX)
        await stream.send(answer)

    return answers


@pytest.mark.parametrize("answer", BAD_ANSWERS, ids=lambda answer: repr(answer[:24]))
@skipping_time
async def test_an_answer_that_is_none_is_the_peers_fault(answer: bytes) -> None:
    asking, asked = await two()

    await asked.serve(PROTOCOL, answering(answer))
    with pytest.raises(RemoteProtocolError):
        await questions.ask_runs(asking, B)
    await asked.close()


@skipping_time
async def test_many_keys_together_get_no_more_than_their_share_of_the_upload() -> None:
    network, upload, given = Network(), TokenBucket(100_000), 0
    asked = network.transport(B)
    await questions.serve(asked, lambda peer, question: Config(some_bytes(CONFIG_BYTES_MAX)), upload)
    began = asyncio.get_running_loop().time()
    for number in range(60):
        stranger = network.transport(key(10 + number))
        await stranger.connect(asked.addresses()[0])
        with contextlib.suppress(TransportError):
            while True:
                given += len(await questions.ask_config(stranger, B, RUN))
        await stranger.close()
        await at(asyncio.get_running_loop().time() + 5.0)
    seconds = asyncio.get_running_loop().time() - began
    assert 0.5 * seconds * 100_000 / 8 < given < PIECE_BYTES + seconds * 100_000 / 8
    await asked.close()


@skipping_time
async def test_whoever_asks_too_much_is_hung_up_on_and_others_are_not() -> None:
    network = Network()
    asking, asked, other = (network.transport(each) for each in (A, B, key(3)))
    for each in (asking, other):
        await each.connect(asked.addresses()[0])
    upload = TokenBucket(100_000)
    await questions.serve(asked, lambda peer, question: Config(some_bytes(CONFIG_BYTES_MAX)), upload)
    began, given = asyncio.get_running_loop().time(), 0
    for _ in range(200):
        try:
            given += len(await questions.ask_config(asking, B, RUN))
        except TransportError:
            await at(asyncio.get_running_loop().time() + 1.0)
    seconds = asyncio.get_running_loop().time() - began
    share = PIECE_BYTES + seconds * ANSWERS_BYTES_PER_SECOND
    assert share - 2 * CONFIG_BYTES_MAX < given <= share
    assert len(await questions.ask_config(other, B, RUN)) == CONFIG_BYTES_MAX
    await asked.close()


@pytest.mark.parametrize(
    "answer", [encode(["peers", ["/x"] * (PEERS_MAX + 1)]), encode(["peers", ["x" * (ADDRESS_CHARACTERS_MAX + 1)]])]
)
@skipping_time
async def test_more_addresses_or_longer_ones_than_may_be_told_are_refused(answer: bytes) -> None:
    asking, asked = await two()

    await asked.serve(PROTOCOL, answering(answer))
    with pytest.raises(RemoteProtocolError):
        await questions.ask_peers(asking, B, RUN)
    await asked.close()


@skipping_time
async def test_a_peer_that_does_not_answer_costs_some_seconds() -> None:
    asking, asked = await two()
    released = asyncio.Event()

    async def silent(stream: Stream) -> None:
        await released.wait()

    await asked.serve(PROTOCOL, silent)
    with pytest.raises(TransportError, match="no answer within 15 s"):
        await questions.ask_runs(asking, B)
    assert asyncio.get_running_loop().time() == pytest.approx(SECONDS, abs=0.1)
    with pytest.raises(TransportError):
        await questions.ask_runs(asking, key(3))  # not connected
    released.set()
    await asked.close()


@pytest.mark.parametrize(
    "question",
    [b"", b"\xc1", b"\x91" * 200, encode(["config"]), encode(["config", RUN + b"x"]), encode(["x"]),
     encode(["runs"]) + b"\0", bytes(QUESTION_BYTES_MAX + 1), bytes(2**20),
     encode(["runs", bytes(QUESTION_BYTES_MAX)])],
    ids=lambda question: repr(question[:24]),
)  # fmt: skip
@skipping_time
async def test_a_question_that_is_none_gets_no_answer_and_the_next_does(question: bytes) -> None:
    asking, asked = await two()
    await questions.serve(asked, lambda peer, question: Runs())
    stream = await asking.open(B, PROTOCOL)
    await stream.send(question)
    with pytest.raises(TransportError):
        await stream.receive(ANSWER_BYTES_MAX)
    assert await questions.ask_runs(asking, B) == ()
    await asked.close()


@skipping_time
async def test_whoever_asks_nothing_is_let_go() -> None:
    asking, asked = await two()
    await questions.serve(asked, lambda peer, question: Runs())
    streams = [await asking.open(B, PROTOCOL) for _ in range(100)]
    await at(SECONDS + 1.0)
    for stream in streams:
        with pytest.raises(TransportError):
            await stream.receive(ANSWER_BYTES_MAX)
    assert await questions.ask_runs(asking, B) == ()
    await asked.close()


@skipping_time
async def test_what_a_peer_is_instead_is_told_in_words() -> None:
    asking, asked = await two()
    assert await questions.why_not(asking, B) == "is not a p2ptrain node, or runs an incompatible version"
    answers = [Runs(), Runs((RunInfo(RUN, "other", 5, 2),))]
    await questions.serve(asked, lambda peer, question: answers.pop(0))
    assert await questions.why_not(asking, B) == "does not take part in any run"
    assert await questions.why_not(asking, B) == f"takes part in another run: other ({RUN.hex()[:16]})"
    await asked.close()
