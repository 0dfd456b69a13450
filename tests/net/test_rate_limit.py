"""The rate limit holds on average, is fair, and can be changed."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.digest import PIECE_BYTES
from p2ptrain.net.rate_limit import DEBT_SECONDS, PEERS_MAX, PeerLimits, TokenBucket
from tests.helpers.net import at, skipping_time, until


def now() -> float:
    return asyncio.get_running_loop().time()


@skipping_time
async def test_without_a_limit_nobody_waits() -> None:
    bucket = TokenBucket(0)
    for _ in range(100):
        await bucket.take(2**40)
    assert bucket.take_now(2**40)
    assert now() == 0


@skipping_time
async def test_a_burst_is_a_second_or_a_piece_whichever_is_larger() -> None:
    for rate, burst in ((10 * PIECE_BYTES, 10 * PIECE_BYTES), (PIECE_BYTES // 4, PIECE_BYTES)):
        bucket, start = TokenBucket(rate), now()
        await bucket.take(burst)
        assert now() == start
        await bucket.take(rate)
        assert now() - start == pytest.approx(1)


@skipping_time
async def test_the_average_holds_whatever_the_size() -> None:
    for size in (1_000, PIECE_BYTES, 5 * PIECE_BYTES):
        bucket, start = TokenBucket(PIECE_BYTES), now()
        for _ in range(20):
            await bucket.take(size)
        lasted = now() - start
        assert (20 * size - PIECE_BYTES) / PIECE_BYTES - 1e-3 <= lasted + size / PIECE_BYTES
        assert lasted <= 20 * size / PIECE_BYTES
    assert lasted == pytest.approx(95)  # the last request may go into debt


@skipping_time
async def test_who_came_first_goes_first() -> None:
    bucket, order = TokenBucket(PIECE_BYTES), list[int]()
    await bucket.take(PIECE_BYTES - 10)

    async def take(number: int) -> None:
        await bucket.take(PIECE_BYTES if number == 0 else 1)
        order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(take(number))
        await asyncio.sleep(0)
        assert not bucket.take_now(1)
    assert order == [0, 1, 2, 3, 4]


@skipping_time
async def test_a_change_of_the_rate_is_felt_by_who_waits() -> None:
    bucket = TokenBucket(PIECE_BYTES // 100)
    await bucket.take(PIECE_BYTES)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(bucket.take(PIECE_BYTES))
        await until(lambda: now() > 1)
        bucket.set_rate(PIECE_BYTES)
    assert waiting.done()
    assert now() == pytest.approx(2, abs=0.05)
    async with asyncio.TaskGroup() as group:
        group.create_task(bucket.take(PIECE_BYTES))
        await asyncio.sleep(0)
        bucket.set_rate(0)
    assert now() == pytest.approx(2, abs=0.05)
    assert bucket.rate == 0


@skipping_time
async def test_who_is_cancelled_has_taken_nothing_and_holds_up_nobody() -> None:
    bucket = TokenBucket(PIECE_BYTES)
    await bucket.take(PIECE_BYTES)
    first, second = asyncio.create_task(bucket.take(PIECE_BYTES)), asyncio.create_task(bucket.take(PIECE_BYTES // 2))
    await until(lambda: now() > 0.25)
    first.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert now() == pytest.approx(0.5, abs=0.01)


@skipping_time
async def test_whoever_charges_without_end_leaves_half_to_those_who_wait() -> None:
    limit = TokenBucket(2**20)
    assert limit.take_now(2**20)
    for second in range(1, 21):
        limit.charge(2**22)
        await limit.take(2**19)
        assert asyncio.get_running_loop().time() == pytest.approx(second, rel=0.01)


@skipping_time
async def test_what_was_charged_is_paid_for() -> None:
    limit = TokenBucket(2**20)
    assert limit.take_now(2**20)
    limit.charge(2**22)
    for _ in range(12):
        await limit.take(2**20)
    assert asyncio.get_running_loop().time() == pytest.approx(12 + 4, rel=0.01)


@skipping_time
async def test_what_is_spent_at_once_is_waited_for_afterwards_and_what_is_given_back_is_there() -> None:
    limit = TokenBucket(1_000, burst=1_000)
    limit.spend(3_000)
    assert not limit.take_now(1)
    await limit.take(500)
    assert now() == pytest.approx(2.5)
    limit.spend(-1_000)
    assert limit.take_now(1_000)
    limit.spend(-5_000)
    assert not limit.take_now(1_000) or not limit.take_now(1)  # no more than the burst


@skipping_time
async def test_whatever_is_spent_later_ones_wait_for_a_minute_at_most() -> None:
    limit = TokenBucket(1_000, burst=1_000)
    for _ in range(50):
        limit.spend(10_000)
    assert limit.seconds_until(1_000) == pytest.approx(DEBT_SECONDS + 1)


@skipping_time
async def test_a_lowered_limit_keeps_no_more_debt_than_it_may_have() -> None:
    spent, charged = TokenBucket(10**6, burst=1_000), TokenBucket(10**6, burst=1_000)
    spent.spend(10**9)
    charged.spend(10**6)
    charged.charge(10**9)
    for limit in (spent, charged):
        limit.set_rate(1_000)
    assert spent.seconds_until(1_000) == pytest.approx(DEBT_SECONDS + 1)
    await charged.take(1_000)
    for _ in range(2 * int(DEBT_SECONDS)):
        await charged.take(1_000)
    assert now() == pytest.approx(3 * DEBT_SECONDS, rel=0.05), "half as fast until it is paid for"


MEMBER = b"a member"


def limits_of(**rates: int) -> PeerLimits:
    """Returns limits under which a stranger's key begins with its address range."""
    return PeerLimits(lambda peer: peer == MEMBER, lambda peer: peer[:4].hex(), **rates)


def strangers_in(place: int, count: int) -> list[bytes]:
    return [place.to_bytes(4, "big") + number.to_bytes(28, "big") for number in range(count)]


@skipping_time
async def test_strangers_share_a_budget_which_members_do_not_touch() -> None:
    budgets, start = limits_of(each=PIECE_BYTES, strangers=2 * PIECE_BYTES), now()
    strangers = [strangers_in(place, 1)[0] for place in range(2 * PEERS_MAX)]
    assert [budgets.take_now(each, PIECE_BYTES) for each in strangers[:4]] == [
        True,
        True,
        False,
        False,
    ]
    assert budgets.take_now(MEMBER, PIECE_BYTES)
    assert not budgets.take_now(MEMBER, PIECE_BYTES)
    for each in strangers:
        budgets.take_now(each, 1)
    sizes = (len(budgets._of_peers[False]), len(budgets._of_ranges))
    assert PEERS_MAX - PEERS_MAX // 16 <= min(sizes) <= max(sizes) <= PEERS_MAX
    await at(start + 1)
    assert budgets.take_now(strangers[-1], PIECE_BYTES - 1)


@skipping_time
async def test_who_has_taken_much_is_remembered_however_many_others_ask() -> None:
    limits = limits_of(each=1_000, strangers=2**40)
    debtors = (MEMBER, *strangers_in(1, 3))
    for each in debtors:
        limits.spend(each, PIECE_BYTES + 20_000)
    waits = [limits.seconds_until(each, 1_000) for each in debtors]
    assert waits == pytest.approx([21.0] * 4, rel=0.01)
    for each in strangers_in(2, 4 * PEERS_MAX):
        assert limits.take_now(each, 1)
    assert [limits.seconds_until(each, 1_000) for each in debtors] == waits


@skipping_time
async def test_a_range_of_addresses_has_all_while_nobody_else_asks_and_leaves_another_its_share() -> None:
    limits, near, far = limits_of(strangers=64, each=8, burst=1), strangers_in(1, 64), strangers_in(2, 8)

    async def taken(seconds: int, *asking: list[bytes]) -> list[int]:
        counts, start = [0] * len(asking), now()
        for tenth in range(1, 10 * seconds + 1):
            for place, keys in enumerate(asking):
                counts[place] += sum(limits.take_now(each, 1) for each in keys for _ in range(4))
            await at(start + tenth / 10)
        return counts

    assert 10 * 64 <= (await taken(10, near))[0] <= 10 * 64 + 64
    flooding, honest = await taken(10, near, far)
    assert min(flooding, honest) >= 10 * 16
    assert flooding + honest <= 10 * 64 + 32
    assert (await taken(10, near))[0] + 16 >= 10 * 64


@skipping_time
async def test_admitted_peers_and_strangers_get_their_parts_of_an_upload_limit_that_changes() -> None:
    upload, stranger = TokenBucket(0), strangers_in(1, 1)[0]
    limits = PeerLimits(
        lambda peer: peer == MEMBER, lambda peer: "", strangers=1_000, burst=1, upload=upload, parts=(8, 2)
    )
    for rate, of_member, of_stranger in ((0, 0, 1_000), (4_000, 2_000, 500), (2**20, 2**19, 1_000)):
        upload.set_rate(rate)
        assert limits.take_now(MEMBER, 0) and limits.take_now(stranger, 0)  # which sees the change
        await at(now() + 1)
        for _ in range(2):
            limits.spend(MEMBER, of_member)
            limits.spend(stranger, of_stranger)
        assert limits.seconds_until(MEMBER, of_member) == pytest.approx(2.0 * bool(of_member), rel=0.01)
        assert limits.seconds_until(stranger, 1) > 0
        await at(now() + 4)
