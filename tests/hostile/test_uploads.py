"""Strangers who ask for much with few bytes: the upload limit holds, and members are answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

import pytest

from p2ptrain.core.wire import encode
from p2ptrain.net import questions
from p2ptrain.net.mailbox import HistoryQuery, Mail, Mailboxes, messages_of_strangers
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import FRAME_BYTES_MAX, Stream, TransportError, everyone
from tests.helpers import memory_network
from tests.helpers.costs import costs
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import at, key, skipping_time, until

RUN, HISTORY = bytes(32), b"h" * 500_000
NODE, MEMBER = key(0), key(1)
SECONDS = 30.0


def nothing(*_: object) -> None:
    pass


def asked_for_histories(strangers: int, upload: int) -> Counter[str]:
    """Returns the bytes of histories sent to strangers and to a member that all ask twice a second."""
    sent: Counter[str] = Counter()

    async def test() -> None:
        network = Network()
        node = network.transport(NODE)

        def hear(peer: bytes, message: Mail) -> None:
            assert isinstance(message, HistoryQuery)
            sent["asked"] += 1
            mailboxes.tell_history(peer, HISTORY)

        def received_by(peer: bytes) -> Callable[[bytes, bytes], None]:
            def received(_: bytes, history: bytes) -> None:
                sent["member" if peer == MEMBER else "strangers"] += len(history)

            return received

        limit = TokenBucket(upload)
        is_member = lambda peer: peer == MEMBER  # noqa: E731
        mailboxes = Mailboxes(
            node, RUN, hear, malformed=nothing, history=nothing, no_history=nothing, upload=limit,
            is_admitted=is_member, strangers=messages_of_strangers(is_member, node.range_of),
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(mailboxes)
            others = []
            for number in range(1, 2 + strangers):
                each = network.transport(key(number))
                await each.connect(node.addresses()[0])
                tell = Mailboxes(
                    each, RUN, nothing, malformed=nothing, no_history=nothing,
                    history=received_by(key(number)), is_admitted=everyone,
                    strangers=messages_of_strangers(everyone, each.range_of),
                )  # fmt: skip
                others.append(await stack.enter_async_context(tell))
            end = asyncio.get_running_loop().time() + SECONDS
            while asyncio.get_running_loop().time() < end:
                for each in reversed(others):  # the member asks last
                    each.ask_history(NODE, bytes(32), 0)
                await at(asyncio.get_running_loop().time() + 0.5)
        for each in list(network.nodes.values()):
            await each.close()

    skipping_time(test)()
    print(f"{strangers} strangers and a limit of {upload} B/s: {dict(sent)} in {SECONDS:.0f} s")
    return sent


def test_histories_for_strangers_stay_within_their_share_of_the_upload_and_members_get_theirs() -> None:
    upload = 200_000
    sent = asked_for_histories(40, upload)
    assert sent["strangers"] < 17 * len(HISTORY) + SECONDS * upload / 8
    assert sent["member"] >= 2 * len(HISTORY)
    assert sent["strangers"] + sent["member"] < 20 * len(HISTORY) + SECONDS * upload


def test_without_an_upload_limit_strangers_get_a_few_histories_and_a_member_all() -> None:
    sent = asked_for_histories(40, 0)
    assert sent["strangers"] < 17 * len(HISTORY) + SECONDS * 2**20
    assert sent["member"] > 40 * len(HISTORY)


# ---------------------------------------------------------------------------------------------------
# Questions


async def asked(network: Network, peer: bytes, question: questions.Question | questions.AskSeen) -> bool:
    with suppress(TransportError):
        stream: Stream = await network.nodes[peer].open(NODE, questions.PROTOCOL)
        await stream.send(encode(question))
        return bool(await stream.receive(FRAME_BYTES_MAX))
    return False


@skipping_time
async def test_strangers_who_read_nothing_have_few_histories_made_for_them() -> None:
    """A history of 10 MB is encoded before it shows that there is no room for it."""
    network, made = Network(), 0
    node = network.transport(NODE)

    def hear(peer: bytes, _: Mail) -> None:
        nonlocal made
        made += 1
        mailboxes.tell_history(peer, bytes(10_000_000))

    async def read_nothing(_: Stream) -> None:
        await at(SECONDS)

    async def ask(stranger: MemoryTransport) -> None:
        stream = await stranger.open(NODE, mailboxes.protocol)
        for second in range(int(SECONDS)):
            await stream.send(encode(HistoryQuery(RUN, 0)))
            await at(1.0 + second)

    is_admitted = lambda peer: False  # noqa: E731
    mailboxes = Mailboxes(
        node, RUN, hear, malformed=nothing, history=nothing, no_history=nothing,
        is_admitted=is_admitted, strangers=messages_of_strangers(is_admitted, node.range_of),
    )  # fmt: skip
    async with mailboxes:
        strangers = [network.transport(key(number)) for number in range(1, 17)]
        for each in strangers:
            await each.connect(node.addresses()[0])
            await each.serve(mailboxes.protocol, read_nothing)
        await asyncio.gather(*(ask(each) for each in strangers))
    assert 1 <= made < 30
    for node in list(network.nodes.values()):
        await node.close()


@pytest.mark.parametrize("question", [questions.AskConfig(RUN), questions.AskRuns(), questions.AskSeen()])
async def test_what_strangers_ask_is_bounded_for_all_of_them_and_takes_nothing_from_a_member(
    question: questions.Question | questions.AskSeen,
) -> None:
    network, answers, listings = Network(), Counter[bool](), 0
    node = network.transport(NODE)

    def answer(peer: bytes, question: questions.Question) -> questions.Answer:
        return questions.Config(b"c" * 4_000)

    peers = node.peers

    async def counted() -> dict[bytes, list[str]]:
        nonlocal listings
        listings += 1
        return await peers()

    node.peers = counted  # type: ignore[method-assign]
    await questions.serve(node, answer, TokenBucket(0), lambda peer: peer == MEMBER)
    for number in range(1, 100):
        await network.transport(key(number)).connect(node.addresses()[0])
    began = asyncio.get_running_loop().time()
    with costs() as cost:
        for _ in range(40):
            for number in range(2, 100):
                answers[await asked(network, key(number), question)] += 1
    lasted, total = asyncio.get_running_loop().time() - began, sum(answers.values())
    print(f"{type(question).__name__} {total} times of 98 keys: {answers[True]} answers, {listings} listings, {cost}")
    assert answers[True] < 2**20 / 1_024 + 128 * lasted + 200  # a burst, and what comes meanwhile
    assert listings < 2 + lasted
    assert cost.loop_seconds / total < 0.001
    assert await asked(network, MEMBER, question)
    for each in list(network.nodes.values()):
        await each.close()


async def test_strangers_who_do_not_read_their_answers_leave_what_others_may_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network()
    node = network.transport(NODE)
    answered = 0

    def answer(peer: bytes, question: questions.Question) -> questions.Answer:
        nonlocal answered
        answered += 1
        return questions.Config(b"c" * 60_000)

    await questions.serve(node, answer, TokenBucket(0))
    monkeypatch.setattr(memory_network.Pipe, "is_full", lambda pipe, size: not pipe.waiting)  # until it is read
    for number in range(1, 100):
        await network.transport(key(number)).connect(node.addresses()[0])
    for number in range(2, 100):
        stream: Stream = await network.nodes[key(number)].open(NODE, questions.PROTOCOL)
        stream.outgoing.put(encode(questions.AskConfig(RUN)))  # type: ignore[attr-defined]
    await until(lambda: answered == 98)
    monkeypatch.undo()
    assert await asked(network, MEMBER, questions.AskConfig(RUN))
    for each in list(network.nodes.values()):
        await each.close()
