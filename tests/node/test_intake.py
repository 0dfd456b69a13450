"""The intake: peers' messages are bounded, checked and attributed; our own events are never dropped."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from p2ptrain.config import AgreementConfig
from p2ptrain.core import events as ev
from p2ptrain.core.messages import KEY_BYTES, authored, bare, content_name, decode, payload_digest
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.mailbox import STRANGER_A_SECOND, STRANGERS_A_SECOND, Deliver, HistoryQuery
from p2ptrain.node.intake import CHECKS_MAX, EVENTS_MAX, KEPT_MAX, SHARE_MAX, SHARE_OF_MEMBER_MAX
from tests.helpers.core import KEYS, DigestSigner, announced, signed
from tests.helpers.driver import OTHER, PAYLOAD_BYTES, PEER, THIRD, a_message, bench
from tests.helpers.net import at, skipping_time, some_bytes, until


@skipping_time
async def test_a_full_queue_drops_gossip_and_counts_it_and_never_what_is_our_own(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        for number in range(EVENTS_MAX + 10):
            each.driver.intake.hear(bytes([number % 32]) * 32, a_message(number=number))
        each.driver.intake.hear_mail(OTHER, Deliver((b"nonsense", a_message())))
        each.driver.intake.hear_mail(OTHER, HistoryQuery(bytes(32), 1))
        own: list[ev.Event] = [ev.PeerSeen(OTHER), ev.PayloadArrived(bytes(32), True, OTHER, 1), ev.PeerLost(OTHER)]
        for event in own:
            each.driver.intake.give(event)
        assert each.driver.intake.counters == {"events dropped": 13}
        async with each.running():
            await each.heard(own[-1])
        assert isinstance(each.node.handled[0][1], ev.Started)
        heard = each.node.events
        received = [event for event in heard if isinstance(event, ev.MessageReceived)]
        assert [event.received.message.round for event in received] == list(range(EVENTS_MAX))  # type: ignore[union-attr]
        assert heard[EVENTS_MAX : EVENTS_MAX + 3] == own


@skipping_time
async def test_one_peer_has_no_more_than_its_share_of_the_queue(tmp_path: Path) -> None:
    stranger = bytes(32)
    async with bench(tmp_path) as each, each.running():
        for _ in range(2):  # what was handled makes room again
            each.node.handled.clear()
            for _ in range(EVENTS_MAX):
                each.driver.intake.hear(stranger, a_message())
                each.driver.intake.hear(PEER, a_message())
            each.driver.intake.hear(OTHER, a_message())
            await until(lambda: not each.driver.intake.events)
            senders = Counter(event.sender for event in each.node.events)  # type: ignore[union-attr]
            assert senders == {stranger: SHARE_MAX, PEER: SHARE_OF_MEMBER_MAX, OTHER: 1}
        assert each.driver.intake._shares == {}


@skipping_time
async def test_what_does_not_decode_is_told_with_the_reason_and_ends_what_came_with_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        each.driver.intake.hear(PEER, b"nonsense")
        with pytest.raises(RemoteProtocolError, match="not a message"):  # which closes the line, and is told once
            each.driver.intake.hear_mail(OTHER, Deliver((a_message(), bytes(1), a_message())))
        async with each.running():
            await until(lambda: len(each.node.events) == 2)
        first, second = each.node.events
        assert isinstance(first, ev.MalformedReceived) and first.sender == PEER and first.why
        assert second == ev.MessageReceived(OTHER, decode(a_message(), DigestSigner()))


@skipping_time
async def test_a_history_that_does_not_decode_has_failed(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        each.driver.intake.history_came(PEER, b"nonsense")
        await until(lambda: bool(each.node.events))
        [event] = each.node.events
        assert isinstance(event, ev.HistoryFailed) and event.peer == PEER and event.why


@skipping_time
async def test_an_attachment_is_checked_before_the_core_hears_of_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        body = authored(PEER, some_bytes(PAYLOAD_BYTES - KEY_BYTES))
        good = signed(
            announced(PEER, payload=payload_digest(body), content=content_name(body), payload_bytes=len(body)), body
        )
        evil = authored(OTHER, b"bad" + some_bytes(PAYLOAD_BYTES - KEY_BYTES - 3))
        bad = signed(
            announced(OTHER, payload=payload_digest(evil), content=content_name(evil), payload_bytes=len(evil)), evil
        )
        opened = asyncio.Event()
        each.replica.gate = opened.wait  # type: ignore[assignment]
        async with each.running():
            each.driver.intake.hear(PEER, good.envelope)
            each.driver.intake.hear(THIRD, bad.envelope)
            await at(1.0)
            assert each.node.events == []
            opened.set()
            await until(lambda: len(each.node.events) == 2)
        assert each.node.events == [ev.MessageReceived(PEER, good, True), ev.MessageReceived(THIRD, bad, False)]
        assert each.store.payloads.get(payload_digest(body)) == body
        assert payload_digest(bad.attachment) not in each.store.payloads
        assert list(each.persistence.fresh) == [payload_digest(body)]


@skipping_time
@pytest.mark.parametrize(("author", "size"), [(KEYS[9], PAYLOAD_BYTES), (PEER, PAYLOAD_BYTES + 1)])
async def test_attachments_of_strangers_and_of_another_size_cost_nothing(
    author: bytes, size: int, tmp_path: Path
) -> None:
    async with bench(tmp_path) as each, each.running():
        body = authored(author, some_bytes(size - KEY_BYTES))
        offer = signed(
            announced(author, payload=payload_digest(body), content=content_name(body), payload_bytes=size), body
        )
        each.driver.intake.hear(PEER, offer.envelope)
        await each.heard(ev.MessageReceived(PEER, bare(offer)))
        assert (each.replica.checked, each.persistence.fresh, list(each.store.payloads.names())) == ([], {}, [])


@skipping_time
@pytest.mark.parametrize(("number", "kept"), [(1, KEPT_MAX), (10**6, 0)])
async def test_one_key_fills_no_disk(number: int, kept: int, tmp_path: Path) -> None:
    """Attachments are stored before the core has looked: few for a round, and none that it would not take."""
    async with bench(tmp_path) as each, each.running():
        for count in range(20):
            body = authored(PEER, some_bytes(PAYLOAD_BYTES - KEY_BYTES - 1) + bytes([count]))
            named = {"payload": payload_digest(body), "content": content_name(body), "payload_bytes": len(body)}
            offer = signed(announced(PEER, number, base_round=0, **named), body)
            each.driver.intake.hear(PEER, offer.envelope)
            await until(lambda: len(each.node.events) == count + 1)  # noqa: B023
        whole = [event for event in each.node.events if event.received.attachment]  # type: ignore[union-attr]
        assert len(whole) == len(each.persistence.fresh) == len(each.store.payloads.names()) == kept


@skipping_time
async def test_attachments_that_wait_to_be_checked_are_bounded(tmp_path: Path) -> None:
    """Anyone can sign announcements with new keys, and a check takes longer than a frame takes to arrive."""
    async with bench(tmp_path) as each:
        shut, opened = authored(PEER, some_bytes(PAYLOAD_BYTES - KEY_BYTES)), asyncio.Event()
        each.replica.gate = opened.wait  # type: ignore[assignment]
        offer = signed(
            announced(PEER, payload=payload_digest(shut), content=content_name(shut), payload_bytes=len(shut)), shut
        ).envelope
        async with each.running():
            await at(0.1)
            for _ in range(SHARE_OF_MEMBER_MAX + 10):
                each.driver.intake.hear(PEER, offer)
            assert each.driver.intake._waiting == CHECKS_MAX
            assert each.driver.intake.counters["events dropped"] == 10, "the others are heard without their payload"
            opened.set()
            await until(lambda: len(each.node.events) == SHARE_OF_MEMBER_MAX and not each.driver.intake.events)
        assert each.replica.checked == [shut]
        intake = each.driver.intake
        assert (intake._shares, intake._waiting, intake._checking, intake._checks) == (
            {},
            0,
            {},
            {},
        )  # there is room again


@skipping_time
async def test_copies_of_an_announcement_hold_up_no_other(tmp_path: Path) -> None:
    """Each is checked once, however many send it, and each sender's copy is heard with the outcome."""
    async with bench(tmp_path) as each:
        opened = asyncio.Event()
        each.replica.gate = opened.wait  # type: ignore[assignment]
        bodies = {author: authored(author, some_bytes(PAYLOAD_BYTES - KEY_BYTES)) for author in (PEER, OTHER)}
        copied, honest = (
            signed(
                announced(author, payload=payload_digest(body), content=content_name(body), payload_bytes=len(body)),
                body,
            )
            for author, body in bodies.items()
        )
        async with each.running():
            await at(0.1)
            for _ in range(100):
                each.driver.intake.hear(THIRD, copied.envelope)
            for sender in (PEER, OTHER):
                each.driver.intake.hear(sender, copied.envelope)
                each.driver.intake.hear(sender, honest.envelope)
            opened.set()
            await until(lambda: len(each.node.events) == 100 + 4)
            heard = Counter((event.sender, event.received.name) for event in each.node.events)  # type: ignore[union-attr]
            assert heard == {
                (THIRD, copied.name): 100,
                **{(sender, offer.name): 1 for sender in (PEER, OTHER) for offer in (copied, honest)},
            }
            whole = [event for event in each.node.events if event.sender == THIRD and event.received.attachment]  # type: ignore[union-attr]
            assert len(whole) == CHECKS_MAX, "the other copies are heard without their payload"
            assert each.replica.checked == [bodies[PEER], bodies[OTHER]]


@skipping_time
async def test_a_run_whose_contributions_are_too_large_takes_no_attachments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgreementConfig, "is_inline", lambda agreement, size: False)
    async with bench(tmp_path) as each, each.running():
        body = authored(PEER, some_bytes(PAYLOAD_BYTES - KEY_BYTES))
        offer = signed(
            announced(PEER, payload=payload_digest(body), content=content_name(body), payload_bytes=len(body)), body
        )
        each.driver.intake.hear(PEER, offer.envelope)
        await each.heard(ev.MessageReceived(PEER, bare(offer)))
        assert each.replica.checked == []


@skipping_time
async def test_what_peers_say_before_the_start_and_after_the_end_does_no_harm(tmp_path: Path) -> None:
    """Mailboxes are open and the topic is subscribed to slightly before and after the driver runs."""
    async with bench(tmp_path) as each:
        body = authored(PEER, some_bytes(PAYLOAD_BYTES - KEY_BYTES))
        offer = signed(
            announced(PEER, payload=payload_digest(body), content=content_name(body), payload_bytes=len(body)), body
        )
        each.driver.intake.hear(PEER, a_message())
        each.driver.intake.hear(PEER, offer.envelope)
        async with each.running() as task:
            await until(lambda: bool(each.node.events))
            each.driver.intake.give(ev.StopRequested())
            await task
            each.driver.intake.hear(PEER, offer.envelope)
            each.driver.intake.hear(PEER, a_message())
        assert isinstance(each.node.handled[0][1], ev.Started)


@skipping_time
async def test_a_member_that_is_kept_away_sends_no_more_than_a_stranger_and_its_gossip_is_heard(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        each.node.kept_away.add(PEER)
        for number in range(50):
            each.driver.intake.hear_mail(PEER, Deliver((a_message(number=number),) * 2))
            each.driver.intake.hear_mail(OTHER, Deliver((signed(announced(THIRD)).envelope,)))
            each.driver.intake.hear_mail(PEER, Deliver((signed(announced(THIRD)).envelope,)))
        await until(lambda: not each.driver.intake.events)
        senders = Counter(event.sender for event in each.node.events)  # type: ignore[union-attr]
        assert senders == {PEER: 2 * STRANGER_A_SECOND, OTHER: 50}
        for _ in range(50):
            each.driver.intake.hear(PEER, signed(announced(THIRD)).envelope)
        await until(lambda: not each.driver.intake.events)
        assert sum(event.sender == PEER for event in each.node.events) == 2 * STRANGER_A_SECOND + 50  # type: ignore[union-attr]


@skipping_time
async def test_a_member_that_is_kept_away_says_what_it_has_signed_within_the_budget_of_a_stranger(
    tmp_path: Path,
) -> None:
    """Nobody can be silenced by being made to look bad. What it forwards, others have, too."""
    async with bench(tmp_path) as each, each.running():
        each.node.kept_away.add(PEER)
        own, others = signed(announced(PEER)).envelope, signed(announced(THIRD)).envelope
        for _ in range(STRANGER_A_SECOND):
            each.driver.intake.hear_mail(PEER, Deliver((own,)))
            each.driver.intake.hear_mail(PEER, Deliver((others,)))
        await until(lambda: not each.driver.intake.events)
        authors = Counter(event.received.message.author for event in each.node.events)  # type: ignore[union-attr]
        assert authors == {PEER: STRANGER_A_SECOND}


@skipping_time
async def test_of_a_message_that_comes_by_stream_and_by_gossip_the_second_copy_is_dropped(tmp_path: Path) -> None:
    """It would count as useless, and an author that is not connected to everyone would soon be kept away."""
    async with bench(tmp_path) as each, each.running():
        gossip, stream = each.driver.intake.hear, each.driver.intake.hear_mail
        for number in range(10):
            data = a_message(number=number)
            gossip(PEER, data)
            stream(PEER, Deliver((data,)))
            stream(OTHER, Deliver((data,)))  # another's copy: it was asked for, or is useless
        for number in range(10, 20):
            data = a_message(number=number)
            stream(PEER, Deliver((data,)))
            gossip(PEER, data)
            stream(PEER, Deliver((data,)))  # again, and the core may have asked for it
        await until(lambda: not each.driver.intake.events)
        heard = Counter((event.sender, event.received.message.round) for event in each.node.events)  # type: ignore[union-attr]
    assert heard == {(PEER, number): 1 if number < 10 else 2 for number in range(20)} | {
        (OTHER, number): 1 for number in range(10)
    }


@skipping_time
async def test_what_was_dropped_is_taken_when_it_comes_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as each, each.running():
        monkeypatch.setattr("p2ptrain.node.intake.EVENTS_MAX", 0)
        each.driver.intake.hear_mail(PEER, Deliver((a_message(),)))
        monkeypatch.undo()
        each.driver.intake.hear(PEER, a_message())
        await until(lambda: not each.driver.intake.events)
        assert [event.sender for event in each.node.events] == [PEER]  # type: ignore[union-attr]


@skipping_time
async def test_what_strangers_send_at_once_and_what_is_told_of_them_has_a_small_budget_and_members_have_none(
    tmp_path: Path,
) -> None:
    """A stranger greets and asks to join. The rest it says is for others to say."""
    strangers = [bytes([number]) * 32 for number in range(100, 200)]
    hello = a_message()
    hear = lambda peer, *envelopes: each.driver.intake.hear_mail(peer, Deliver(envelopes))  # noqa: E731
    async with bench(tmp_path) as each:
        hear(strangers[0], signed(announced(PEER)).envelope)  # decoded, and no more
        assert not each.driver.intake.events
        hear(strangers[0], *[hello] * STRANGER_A_SECOND)
        hear(strangers[0], hello, hello, hello)  # not even that
        assert len(each.driver.intake.events) == STRANGER_A_SECOND
        for stranger in strangers:
            each.driver.intake.blame(stranger, "it is one of many")
        told = len(each.driver.intake.events) - STRANGER_A_SECOND
        assert STRANGERS_A_SECOND / 2 < told < STRANGERS_A_SECOND
        async with each.running():
            for _ in range(100):
                hear(PEER, a_message())
            await at(1.0)
            assert sum(getattr(event, "sender", b"") == PEER for event in each.node.events) == 100
    assert each.driver.intake.counters["messages of strangers dropped"] == 2 + 100 - told
