"""The order of pieces: payloads before states, but newcomers are not starved."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from p2ptrain.net.blobs.turns import (
    BACKGROUND_AT_ONCE,
    BACKGROUND_BYTES_PER_SECOND,
    OVERDUE_SECONDS,
    STRANGERS_AT_ONCE,
    TURN_SECONDS,
    BusyError,
    Turns,
)
from p2ptrain.net.rate_limit import TokenBucket
from tests.helpers.net import at, key, skipping_time

PIECE = 2**20
A, B, C = key(1), key(2), key(3)


def now() -> float:
    return asyncio.get_running_loop().time()


class RecordedLine:
    """Records what goes out and when."""

    def __init__(self, upload: int = 0) -> None:
        self.upload = TokenBucket(upload)
        self.turns = Turns(self.upload)
        self.went: list[tuple[str, float]] = []
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, name: str, peer: bytes, is_urgent: bool, seconds: float = 0.0, size: int = PIECE) -> None:
        self.tasks.append(asyncio.create_task(self.turn(name, peer, is_urgent, seconds, size)))

    def send_stranger(self, name: str, peer: bytes, seconds: float = 0.0) -> None:
        self.tasks.append(asyncio.create_task(self.turn(name, peer, True, seconds, PIECE, is_admitted=False)))

    async def turn(
        self, name: str, peer: bytes, is_urgent: bool, seconds: float, size: int, *, is_admitted: bool = True
    ) -> None:
        try:
            async with self.turns.turn(peer, size, is_urgent, is_admitted):
                self.went.append((name, now()))
                await at(now() + seconds)
        except BusyError:
            self.went.append((f"{name} was put off", now()))

    async def done(self) -> list[str]:
        await asyncio.gather(*self.tasks)
        return [name for name, _ in self.went]


@skipping_time
async def test_a_state_waits_while_payloads_wait_or_are_on_their_way() -> None:
    line = RecordedLine()
    line.send("payload", A, True, seconds=1.0)
    line.send("state", B, False)
    line.send("another payload", C, True)
    await at(0.5)
    assert [name for name, _ in line.went] == ["payload", "another payload"]
    assert await line.done() == ["payload", "another payload", "state"]
    assert line.went[-1][1] == 1.0


@skipping_time
async def test_payloads_do_not_wait_for_states() -> None:
    line = RecordedLine()
    line.send("state", A, False, seconds=5.0)
    await at(1.0)
    line.send("payload", B, True)
    await at(1.5)
    assert line.went == [("state", 0.0), ("payload", 1.0)]
    await line.done()


@skipping_time
async def test_a_state_that_has_waited_long_enough_goes_between_payloads() -> None:
    line = RecordedLine()
    for number in range(40):  # one of them is always being sent
        line.send("payload", key(10 + number % 4), True, seconds=1.0)
    line.send("state", B, False)
    await line.done()
    assert dict(line.went)["state"] == OVERDUE_SECONDS


@skipping_time
async def test_states_go_no_faster_than_their_limit_and_are_shared_evenly() -> None:
    line = RecordedLine()
    seconds = 4
    for number in range(seconds * BACKGROUND_BYTES_PER_SECOND // PIECE + 64):
        line.send("state", A if number % 8 else B, False)  # one peer asks for seven times as much
    line.send("payload", C, True)
    await line.done()
    given = [at for name, at in line.went if name == "state" and at > 0]
    for second in range(1, seconds):
        assert sum(at <= second for at in given) * PIECE <= (second + 1) * BACKGROUND_BYTES_PER_SECOND
    assert ("payload", 0.0) in line.went
    assert all(at <= TURN_SECONDS + OVERDUE_SECONDS for _, at in line.went)


@skipping_time
async def test_who_asks_for_more_does_not_get_more() -> None:
    line = RecordedLine()
    for number in range(200):
        line.send("greedy" if number % 20 else "modest", A if number % 20 else B, False)
    await line.done()
    last = max(at for name, at in line.went if name == "modest")
    assert last <= 2 * 10 * PIECE / BACKGROUND_BYTES_PER_SECOND  # its ten pieces get half of the traffic


@skipping_time
async def test_payloads_go_while_the_limit_of_states_is_reached_and_states_when_it_lets_them() -> None:
    line = RecordedLine()
    for number in range(BACKGROUND_BYTES_PER_SECOND // PIECE):
        line.send("first states", key(10 + number), False)
    await line.done()
    line.send("state", A, False)
    await at(0.01)
    line.send("payload", B, True)
    await at(1.0)
    (_, payload_at), (_, state_at) = line.went[-2:]
    assert (payload_at, round(state_at, 4)) == (0.01, round(PIECE / BACKGROUND_BYTES_PER_SECOND, 4))


@skipping_time
async def test_a_payload_does_not_stand_behind_a_state_that_the_upload_limit_does_not_let_go_yet() -> None:
    line = RecordedLine(upload=PIECE)
    line.send("A", A, False)
    await at(0.1)
    line.send("A again", A, False)  # the limit allows it at 1.0
    line.send("B", B, False)
    await at(0.5)
    line.send("C", C, True, size=1_000)
    await at(0.6)
    assert line.went == [("A", 0.0), ("C", 0.5)]
    assert await line.done() == ["A", "C", "B", "A again"]


@skipping_time
async def test_states_are_on_their_way_to_a_few_at_a_time() -> None:
    line = RecordedLine()
    for number in range(3 * BACKGROUND_AT_ONCE):
        line.send("state", key(10 + number), False, seconds=1.0)
    await at(0.5)
    assert len(line.went) == BACKGROUND_AT_ONCE
    await line.done()


@skipping_time
async def test_under_a_low_limit_a_state_that_is_overdue_does_not_stand_before_payloads() -> None:
    line = RecordedLine(upload=PIECE // 10)
    line.send("A", A, True)
    await at(0.1)
    line.send("state", B, False)
    line.send("another state", C, False)
    await at(OVERDUE_SECONDS + 0.2)
    line.send("payload", A, True, size=1_000)
    assert await line.done() == ["A", "state", "payload", "another state was put off"]  # the first has to be paid for
    went = {name: round(at, 1) for name, at in line.went}
    assert (went["state"], went["payload"]) == (OVERDUE_SECONDS + 0.1, OVERDUE_SECONDS + 0.2)


@skipping_time
async def test_states_that_are_overdue_leave_the_average_as_it_is() -> None:
    rate = PIECE // 10
    line = RecordedLine(upload=rate)
    for number in range(400):  # there is always another one waiting
        line.send("payload", key(10 + number % 4), True, size=rate // 2)

    async def newcomer() -> None:
        while now() < 100.0:
            await line.turn("state", B, False, 0.0, PIECE)

    line.tasks.append(asyncio.create_task(newcomer()))
    await at(100.0)
    sizes = {"payload": rate // 2, "state": PIECE}
    assert sum(sizes.get(name, 0) for name, _ in line.went) <= 100 * rate + 3 * PIECE  # a burst, and one on credit
    assert sum(name == "state" for name, _ in line.went) >= 2
    await line.done()


@skipping_time
async def test_what_others_are_charged_for_does_not_keep_states_from_going() -> None:
    rate = PIECE // 4
    line = RecordedLine(upload=rate)

    async def answers() -> None:
        while now() < 100.0:
            line.upload.charge(rate // 4)
            await at(now() + 0.5)

    async def again(name: str, peer: bytes, is_urgent: bool, size: int) -> None:
        while now() < 100.0:
            await line.turn(name, peer, is_urgent, 0.0, size)

    wishes = [("payload", key(10 + number), True, rate // 2) for number in range(4)]
    line.tasks += [asyncio.create_task(again(*wish)) for wish in [*wishes, ("state", B, False, PIECE)]]
    line.tasks.append(asyncio.create_task(answers()))
    went = await line.done()
    assert went.count("state") >= 4
    assert went.count("payload") >= 50


@skipping_time
async def test_strangers_come_after_others_and_go_in_between_at_their_own_rate_when_they_have_waited() -> None:
    line = RecordedLine()
    for number in range(60):  # one of them is always being sent
        line.send("payload", key(10 + number % 4), True, seconds=1.0)
    for number in range(8):
        line.send_stranger("stranger", key(100 + number))
    await at(OVERDUE_SECONDS + 0.5)
    assert [name for name, _ in line.went].count("stranger") == 1  # two seconds of their rate
    await line.done()
    assert [name for name, _ in line.went].count("stranger was put off") == 7


@skipping_time
async def test_strangers_who_do_not_read_take_places_of_strangers_only() -> None:
    line = RecordedLine()
    for number in range(3 * STRANGERS_AT_ONCE):
        line.send_stranger("stranger", key(100 + number), seconds=1_000.0)
    await at(TURN_SECONDS)
    line.send("payload", A, True)
    await at(TURN_SECONDS + 0.1)
    went = [name for name, _ in line.went]
    assert "payload" in went
    assert went.count("stranger") <= STRANGERS_AT_ONCE
    for task in line.tasks:
        task.cancel()
    await asyncio.wait(line.tasks)


@skipping_time
async def test_a_range_of_addresses_with_many_keys_has_no_more_turns_than_one_with_a_single_key() -> None:
    turns, went = Turns(TokenBucket(0)), list[str]()

    async def again(name: str, peer: bytes, of_range: str) -> None:
        while now() < 60.0:
            with suppress(BusyError):
                async with turns.turn(peer, PIECE, is_admitted=False, of_range=of_range):
                    went.append(name)
                    await at(now() + 0.1)

    crowd = [again("crowd", key(10 + number), "203.0") for number in range(100)]
    await asyncio.gather(again("newcomer", A, "198.51"), *crowd)
    assert went.count("newcomer") >= went.count("crowd") / 4


@skipping_time
async def test_strangers_of_one_range_who_hardly_read_leave_places_to_those_of_others() -> None:
    turns, went = Turns(TokenBucket(0)), list[str]()

    async def take(name: str, peer: bytes, of_range: str) -> None:
        with suppress(BusyError):
            async with turns.turn(peer, 1_000, is_admitted=False, of_range=of_range):
                went.append(name)
                await at(60.0)

    crowd = [asyncio.create_task(take("crowd", key(10 + number), "203.0")) for number in range(40)]
    await at(30.0)
    await take("newcomer", A, "198.51")
    await asyncio.wait(crowd)
    assert went.count("crowd") == STRANGERS_AT_ONCE // 2
    assert went[-1] == "newcomer"


@skipping_time
async def test_however_many_wait_for_the_limit_there_is_one_timer() -> None:
    line = RecordedLine(upload=PIECE // 10)
    for number in range(50):
        line.send("state", key(10 + number), False)
    await at(5.0)
    loop: Any = asyncio.get_running_loop()
    waiting = [timer for timer in loop._scheduled if not timer._cancelled and "_advance" in repr(timer)]
    assert len(waiting) <= 1 + 50  # each has one of its own, for when it is overdue
    await line.done()
