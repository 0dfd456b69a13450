"""A clock that is wrong is found by asking peers, of whom some may be wrong themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

from p2ptrain.core import wire
from p2ptrain.core.complaints import Code, Complaint
from p2ptrain.net import questions
from p2ptrain.net.transport import Stream
from p2ptrain.node.clock import ASKED, ClockWatch
from tests.helpers.memory_network import Network
from tests.helpers.net import key, skipping_time

ME, PEERS = key(1), [key(number) for number in range(2, 7)]


async def found(ahead: Sequence[float], mine: float = 0.0) -> Complaint | None:
    """Looks with a clock that is so many seconds ahead, at peers that are; infinitely far: it does not answer."""
    network = Network(latency_seconds=0.01)
    asking, now = network.transport(ME), time.time()
    asked = []
    for peer, offset in zip(PEERS, ahead, strict=False):
        transport = network.transport(peer)
        await asking.connect(transport.addresses()[0])
        asked.append(transport)
        told = questions.Seen(0 if offset == float("inf") else int((now + offset) * 1_000))

        async def handle(stream: Stream, told: questions.Seen = told) -> None:
            await stream.receive(questions.QUESTION_BYTES_MAX)
            if told.milliseconds:
                await stream.send(wire.encode(told))

        await transport.serve(questions.PROTOCOL, handle)
    watch = ClockWatch(asking, PEERS[: len(ahead)], Random(1), clock=lambda: now + mine)
    await watch.look()
    for transport in (asking, *asked):
        await transport.close()
    return watch.complaint


@skipping_time
async def test_a_clock_that_most_peers_contradict_is_told() -> None:
    behind = await found([7.0] * ASKED)
    assert behind is not None
    assert (behind.code, behind.fields) == (Code.CLOCK_WRONG, {"seconds": 7, "way": "behind", "peers": ASKED})
    assert (await found([0.0, 7.0, 0.0, 7.0, 7.0])) == behind, "two agree with it"
    ahead = await found([0.0, 0.1, 0.0, float("inf")], mine=3_600.0)
    assert ahead is not None and ahead.fields == {"seconds": 3_600, "way": "ahead of", "peers": 3}


@skipping_time
async def test_two_wrong_peers_of_five_a_small_difference_and_too_few_answers_say_nothing() -> None:
    for ahead in ([-9e5, 9e5, 0.0, 0.2, 0.1], [2.0] * ASKED, [60.0, 60.0], [60.0, 60.0, float("inf")], []):
        assert await found(ahead) is None
