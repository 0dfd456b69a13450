"""The driver's payloads: fetched once, checked, stored and served, despite liars and disk losses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.messages import KEY_BYTES, authored, content_name, payload_digest
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DataError
from p2ptrain.net.blobs.blob import BlobName
from p2ptrain.node.persistence import DISK_SECONDS
from p2ptrain.store.payloads import PayloadStore
from tests.helpers.blobs import MemoryBlob
from tests.helpers.core import KEYS
from tests.helpers.driver import PAYLOAD_BYTES, a_message, bench, doing, of_kind
from tests.helpers.net import at, skipping_time, some_bytes, until

ME, PEER, OTHER, THIRD, FAR = KEYS[:5]
BODY = authored(PEER, some_bytes(PAYLOAD_BYTES - KEY_BYTES, 7))
NAME = payload_digest(BODY)
BLOB = BlobName("payload", NAME)
FETCH = ev.Fetch(NAME, PAYLOAD_BYTES, (PEER,))
ARRIVED = ev.PayloadArrived(NAME, True, PEER, PAYLOAD_BYTES, content_name(BODY))


class CountingBlob(MemoryBlob):
    """A blob that counts how often it is read."""

    reads = 0

    def read(self, index: int) -> bytes:
        self.reads += 1
        return super().read(index)


@skipping_time
async def test_a_payload_that_is_wanted_twice_at_once_is_fetched_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        server, blob = await each.serve(PEER), CountingBlob.tree(BODY)
        counted = CountingBlob(BODY, is_tree=True)
        server.blobs[BLOB] = counted
        assert blob.name == NAME
        doing(each, FETCH, FETCH, FETCH)
        await until(lambda: len(each.node.events) == 3)
        assert each.node.events == [ARRIVED] * 3
        assert counted.reads == 1
        assert each.store.payloads.get(NAME) == BODY
        assert NAME in each.persistence.fresh
        assert each.driver.payloads.running == {}


@skipping_time
async def test_when_no_source_has_a_payload_each_has_failed_and_the_next_fetch_asks_others(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        await each.serve(PEER)
        (await each.serve(OTHER)).blobs[BLOB] = MemoryBlob.tree(BODY[:-1] + b"x")
        (await each.serve(THIRD)).blobs[BLOB] = MemoryBlob.tree(BODY)
        doing(each, ev.Fetch(NAME, PAYLOAD_BYTES, (PEER, FAR, ME, OTHER)))
        await until(lambda: len(each.node.events) == 4)
        doing(each, ev.Fetch(NAME, PAYLOAD_BYTES, (PEER, THIRD)))
        await each.heard(ARRIVED)
        *failed, again, last = each.node.events
        assert (again.peer, last) == (PEER, ARRIVED)  # type: ignore[union-attr]
        assert all(isinstance(event, ev.FetchFailed) and event.payload == NAME and event.why for event in failed)
        assert sorted(event.peer for event in failed) == sorted([PEER, FAR, ME, OTHER])  # type: ignore[union-attr]
        assert [peer for peer, _ in each.blamed] == [OTHER]


@skipping_time
@pytest.mark.parametrize("is_lie_first", [True, False])
async def test_who_announces_another_s_payload_and_sends_nothing_does_not_delay_it(
    is_lie_first: bool, tmp_path: Path
) -> None:
    """Each source that says nothing takes up to 20 s, and there may be many liars."""
    liars = KEYS[4:9]
    async with bench(tmp_path) as each, each.running():
        (await each.serve(PEER)).blobs[BLOB] = MemoryBlob.tree(BODY)
        for liar in liars:
            transport = each.network.transport(liar)
            await transport.serve(each.edges.server.protocol, lambda stream: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
            await transport.connect(each.edges.transport.addresses()[0])
        asked_at = asyncio.get_running_loop().time()
        lies = [ev.Fetch(NAME, PAYLOAD_BYTES, (liar, OTHER)) for liar in liars]
        true = ev.Fetch(NAME, PAYLOAD_BYTES, (PEER, OTHER))
        doing(each, *([*lies, true] if is_lie_first else [true, *lies]))
        await each.heard(ARRIVED)
        assert asyncio.get_running_loop().time() - asked_at < 1.0
        await until(lambda: not each.driver.payloads.running)
        assert each.store.payloads.get(NAME) == BODY


@skipping_time
async def test_a_payload_that_is_here_is_not_fetched(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        each.store.payloads.put(NAME, BODY)
        doing(each, ev.Fetch(NAME, PAYLOAD_BYTES, ()))
        await each.heard(ARRIVED)


@skipping_time
@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_fault_of_our_own_store_ends_the_node_and_is_no_peer_s(
    is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as each:

        def broken(*_: object) -> None:
            raise KeyError("our own state")

        monkeypatch.setattr(each.persistence, "put", broken)
        with pytest.raises(ExceptionGroup) as told:
            async with each.running() as running:
                (await each.serve(PEER)).blobs[BLOB] = MemoryBlob.tree(BODY)
                if is_lost:
                    each.driver.tasks.spawn(each.driver.payloads.fetch_lost(NAME), "lost")
                else:
                    doing(each, FETCH)
                await running
        assert told.value.subgroup(KeyError) is not None
        assert not each.transport.boundary.counts


@skipping_time
async def test_a_payload_whose_check_fails_by_a_fault_of_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as each, each.running():

        def broken(payload: bytes) -> None:
            raise IndexError

        monkeypatch.setattr(each.trainer, "check", broken)
        (await each.serve(PEER)).blobs[BLOB] = MemoryBlob.tree(BODY)
        doing(each, FETCH)
        await each.heard(ev.PayloadArrived(NAME, False, PEER, PAYLOAD_BYTES, content_name(BODY)))
        assert each.transport.boundary.counts == {"the check of a payload": 1}


@skipping_time
async def test_a_payload_that_is_no_contribution_arrives_as_a_bad_one(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        body = authored(PEER, b"bad" + some_bytes(PAYLOAD_BYTES - KEY_BYTES - 3))
        (await each.serve(PEER)).blobs[BlobName("payload", payload_digest(body))] = MemoryBlob.tree(body)
        doing(each, ev.Fetch(payload_digest(body), PAYLOAD_BYTES, (PEER,)))
        await each.heard(ev.PayloadArrived(payload_digest(body), False, PEER, PAYLOAD_BYTES, content_name(body)))


@skipping_time
async def test_a_payload_that_is_said_to_have_another_size_is_not_fetched(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        server = await each.serve(PEER)
        server.blobs[BLOB] = MemoryBlob.tree(BODY)
        doing(each, ev.Fetch(NAME, 2**32 - 1, (PEER, OTHER)))
        await until(lambda: len(of_kind(each, ev.FetchFailed)) == 2)
        assert server.server.counters == {}


@skipping_time
async def test_a_payload_that_was_lost_before_we_could_rest_our_words_on_it_is_fetched_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        said = ev.Said(a_message(ME), (), (NAME,))
        each.node.answer = lambda event: [ev.Persist(said), ev.Publish(b"said")] if event == ev.PeerSeen(PEER) else []
        each.driver.intake.give(ev.PeerSeen(PEER))
        await at(2.5 * DISK_SECONDS)
        assert each.done == []
        (await each.serve(PEER)).blobs[BLOB] = MemoryBlob.tree(BODY)
        await until(lambda: ("publish", b"said") in each.done)
        assert each.store.payloads.get(NAME) == BODY
        assert each.driver.effects.disk_trouble == ""


@skipping_time
async def test_who_wants_to_stop_does_not_wait_for_ever_for_a_payload_that_nobody_has(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running() as life:
        said = ev.Said(a_message(ME), (), (NAME,))
        each.node.answer = lambda event: [ev.Persist(said)] if event == ev.PeerSeen(PEER) else []
        each.driver.intake.give(ev.PeerSeen(PEER))
        await at(2.5 * DISK_SECONDS)
        assert not life.done()
        each.node.seen.is_stopping = True
        await at(5.0 * DISK_SECONDS)
        assert life.result().startswith(f"payload {NAME.hex()} is no longer here")


@skipping_time
async def test_a_disk_that_cannot_be_read_or_is_full_does_not_end_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storing a payload may spill another to the disk, and a lookup may read the disk."""

    def broken(self: PayloadStore, *arguments: object) -> None:
        raise DataError("the disk does not answer")

    async with bench(tmp_path) as each, each.running() as task:
        (await each.serve(PEER)).blobs[BLOB] = MemoryBlob.tree(BODY)
        for method in ("get", "put"):
            with monkeypatch.context() as patch:
                patch.setattr(PayloadStore, method, broken)
                before = len(each.node.events)
                doing(each, FETCH)
                await until(lambda: len(each.node.events) > before or task.done())  # noqa: B023
                assert not task.done()
                assert of_kind(each, ev.FetchFailed, ev.PayloadArrived)
                await until(lambda: not each.driver.payloads.running)


@skipping_time
@pytest.mark.parametrize("what", ["size", "get", "read_piece"])
async def test_a_payload_whose_file_cannot_be_read_is_not_served_and_the_server_goes_on(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise DataError("the disk does not answer")

    async with bench(tmp_path) as each:
        peer = await each.serve(PEER)
        mine = await each.serve(OTHER, connected=False)
        mine.find = each.edges.served_blobs.find  # type: ignore[method-assign]
        await peer.transport.connect(mine.transport.addresses()[0])
        large = some_bytes(PIECE_BYTES + 1, 5)  # of two pieces: whoever fetches it asks for their digests
        name = BlobName("payload", payload_digest(large))
        each.store.payloads.put(name.name, large)
        monkeypatch.setattr(each.store.payloads, what, broken)
        with pytest.raises(Exception, match="not available"):
            await peer.fetch(name, len(large), OTHER)
        monkeypatch.undo()
        assert await peer.fetch(name, len(large), OTHER) == large
