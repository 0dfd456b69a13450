"""Mailboxes: small messages to one peer at a time, over one one-way stream per peer that is closed when idle.

Messages deliver envelopes, ask for messages by name, and ask for histories by branch and round. `Mailboxes.post` never
waits: the queue of each peer is bounded, and what does not fit is dropped and counted, since the core asks again for
what it lacks. A broken stream is reopened after a pause and the message in flight is sent again: it may come twice.

A history may be longer than a frame. It travels in parts, between which other messages may pass, so that no vote waits
for it. Its length comes first, and it is accepted only from a peer that was asked, while that request is open.

Few bytes ask for many. So requests for histories are answered within a share of the upload limit, and those of all
strangers together within a smaller one; what exceeds it is dropped before any work, and the asker tries another peer.

What strangers say is read only when their budget allows, so that a flood waits in the network and costs nothing here. A
peer that is not admitted says little: a hello a second while it catches up, questions for histories, and now and then a
join request. All share the budget, because a key costs nothing, and one address range leaves some of it to the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Annotated, Any, Self, TypeAlias

import msgspec
from msgspec import Meta, Struct

from p2ptrain.core import wire
from p2ptrain.core.history import HISTORY_BYTES_MAX
from p2ptrain.core.messages import ENVELOPE_BYTES_MAX, SHORT_BYTES, Digest, Number, Short
from p2ptrain.core.wire import decode_strictly
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.rate_limit import PeerLimits, TokenBucket
from p2ptrain.net.tasks import Tasks, report_crash
from p2ptrain.net.transport import FRAME_BYTES_MAX, IsAdmitted, Stream, Transport, TransportError

NAMES_MAX = 1_024  # in a `MessageQuery`: as many messages as a round of the largest run has
ENVELOPES_MAX = 64  # in a `Deliver`: verifying their signatures takes 10 ms
ENVELOPE_ROOM = 8  # overhead in bytes of an envelope in a frame; msgpack takes five
PART_BYTES = 2**19  # of a history: a vote may have to wait for one, 40 ms at 100 Mbit/s
QUEUED_MAX = 256  # messages queued for one peer
QUEUED_BYTES_MAX = 16 * 2**20
STRANGER_QUEUED_BYTES_MAX = 2**21  # the same for a stranger: one answer of the core (core/repair.py), and hellos
QUEUED_TOTAL_BYTES_MAX = 256 * 2**20  # for all admitted peers together, and as much again for histories
STRANGERS_ROOM = 4  # all strangers together have a quarter of that, beside it
PEERS_MAX = 1_024  # with queued messages, half of them strangers; also the most incoming streams
ENVELOPES_AT_ONCE = 8  # handed on without a pause: verifying their signatures takes a millisecond
INCOMING_MAX = 2  # streams from one peer: an old one may not have noticed yet that it is dead
QUESTIONS_MAX = 8  # histories requested at once: half a gigabyte if all have the maximum length
QUESTION_SECONDS = 8.0  # until an answer begins, and between its parts; the core asks another peer after 10 s
ANSWER_SECONDS = 60.0  # from the request to the complete answer
OPEN_SECONDS = 10.0
SEND_SECONDS = 30.0  # per frame; slower than 17 KB/s counts as broken
IDLE_SECONDS = 300.0  # before an unused stream is closed
STRANGER_IDLE_SECONDS = 60.0  # the same for an incoming stream; who still needs it opens another
HISTORY_SHARES = 8, 2  # of the upload limit: 1/8 for the histories of strangers, 1/2 for those of admitted peers
STRANGERS_HISTORY_BYTES_PER_SECOND = 2**20  # at most; the rounds of a run take kilobytes each
STRANGER_FRAME_BYTES_MAX = NAMES_MAX * (SHORT_BYTES + 2) + 64  # a full `MessageQuery`; hellos and joins have 600 each
LONG_RATES = 2**18, 2**20  # of longer frames, which are read over: bytes a second of one stranger, and of all
BODY_SECONDS = 60.0  # for the rest of a frame whose length has come
HISTORY_BYTES_LEAST = 2**16  # of a share: must be left before a history is looked up, and is charged when it is queued;
# the rest as it is sent, so that who reads nothing takes nothing from others
STRANGERS_A_SECOND, STRANGER_A_SECOND = 64, 8  # messages of all, which take 10 ms to decode and verify; and of one
BACKOFF_SECONDS = 0.25  # before a stream is reopened; doubles
TRIES_MAX = 6  # in a row, over 8 s; then the queue is dropped: the core has long asked elsewhere


class Deliver(Struct, frozen=True, array_like=True, tag="deliver"):
    """Hands over sealed envelopes, our own or forwarded."""

    envelopes: Annotated[
        tuple[Annotated[bytes, Meta(min_length=1, max_length=ENVELOPE_BYTES_MAX)], ...],
        Meta(min_length=1, max_length=ENVELOPES_MAX),
    ]


class MessageQuery(Struct, frozen=True, array_like=True, tag="ask"):
    """Asks for the messages with these names."""

    names: Annotated[tuple[Short, ...], Meta(min_length=1, max_length=NAMES_MAX)]


class HistoryQuery(Struct, frozen=True, array_like=True, tag="ask history"):
    """Asks for the history after this round of this branch."""

    branch: Digest
    round: Number


class HistoryBegins(Struct, frozen=True, array_like=True, tag="history"):
    """Announces a history and its size in bytes."""

    size: Annotated[int, Meta(ge=1, le=HISTORY_BYTES_MAX)]


class HistoryPart(Struct, frozen=True, array_like=True, tag="part"):
    """A part of a history; all but the last have PART_BYTES."""

    data: Annotated[bytes, Meta(min_length=1, max_length=PART_BYTES)]


Mail: TypeAlias = Deliver | MessageQuery | HistoryQuery
Frame: TypeAlias = Deliver | MessageQuery | HistoryQuery | HistoryBegins | HistoryPart

_FRAME: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def messages_of_strangers(is_admitted: IsAdmitted, range_of: Callable[[bytes], str]) -> PeerLimits:
    """Returns the limits of what strangers send to this node alone, in messages."""
    return PeerLimits(is_admitted, range_of, each=STRANGER_A_SECOND, strangers=STRANGERS_A_SECOND, burst=1)


def decode_frame(data: bytes) -> Frame:
    return decode_strictly(_FRAME, data, "a mailbox message")


def frames_of(message: Mail) -> Iterator[bytes]:
    """Yields the frames of a message; envelopes that do not fit one frame are spread over several."""
    if not isinstance(message, Deliver):
        yield wire.encode(message)
        return
    waiting: list[bytes] = []
    size = 0
    for envelope in message.envelopes:
        assert 1 <= len(envelope) <= ENVELOPE_BYTES_MAX, "envelopes are checked when they are sealed"
        if waiting and (size + len(envelope) + ENVELOPE_ROOM > FRAME_BYTES_MAX - 64 or len(waiting) == ENVELOPES_MAX):
            yield wire.encode(Deliver(tuple(waiting)))
            waiting, size = [], 0
        waiting.append(envelope)
        size += len(envelope) + ENVELOPE_ROOM
    yield wire.encode(Deliver(tuple(waiting)))


class Outgoing:
    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.size = 0
        self.history: bytes | bytearray = b""  # one at a time
        self.history_sent = -1  # bytes sent so far; -1: not even the length
        self.part = b""  # the part being sent
        self.wake = asyncio.Event()

    def next(self) -> bytes | None:
        """Returns the next frame and keeps it until `sent`. Parts of a history come after everything else."""
        if self.frames:
            return self.frames[0]
        if not self.history:
            return None
        at = self.history_sent
        part = HistoryBegins(len(self.history)) if at < 0 else HistoryPart(bytes(self.history[at : at + PART_BYTES]))
        self.part = wire.encode(part)
        return self.part

    def sent(self, frame: bytes) -> None:
        if self.frames and self.frames[0] is frame:
            self.frames.popleft()
            self.size -= len(frame)
            return
        if frame is not self.part:
            return  # it was dropped while being sent
        self.history_sent = 0 if self.history_sent < 0 else self.history_sent + PART_BYTES
        if self.history_sent >= len(self.history):
            self.drop_history()

    def drop_history(self) -> None:
        self.history, self.history_sent, self.part = b"", -1, b""


def _parts_of(frame: Frame | None) -> list[Frame]:
    """Cuts a frame into what is handed on at once. A stranger pays for each part as for a frame."""
    if not isinstance(frame, Deliver):
        return [] if frame is None else [frame]
    starts = range(0, len(frame.envelopes), ENVELOPES_AT_ONCE)
    return [Deliver(frame.envelopes[start : start + ENVELOPES_AT_ONCE]) for start in starts]


class PendingHistory:
    def __init__(self, now: float) -> None:
        self.until = now + QUESTION_SECONDS  # put off by each part that arrives
        self.end = now + ANSWER_SECONDS
        self.size = 0  # of the answer in bytes, once it has begun
        self.parts = bytearray()
        self.stream: Stream | None = None  # the stream that brings the answer
        self.moved = asyncio.Event()  # a part has come, or the request is over


class Mailboxes:
    """A node's mailboxes for the peers of one run. Used with `async with`."""

    def __init__(  # noqa: PLR0913  # what it hears goes three ways
        self,
        transport: Transport,
        run_id: bytes,
        hear: Callable[[bytes, Mail], None],
        *,
        malformed: Callable[[bytes, str], None],
        history: Callable[[bytes, bytes], None],
        no_history: Callable[[bytes, str], None],
        upload: TokenBucket | None = None,
        download: TokenBucket | None = None,
        is_admitted: IsAdmitted,
        strangers: PeerLimits,
    ) -> None:
        """Histories are charged to both limits without waiting: they stay in time, and pieces wait instead. `strangers`
        limits the messages of who is not admitted."""
        self.protocol = f"/p2ptrain/2/{run_id.hex()}/line"
        self._transport, self._boundary = transport, transport.boundary
        self._hear, self._malformed, self._history, self._no_history = hear, malformed, history, no_history
        self._upload, self._download = upload or TokenBucket(0), download or TokenBucket(0)
        self._is_admitted, self._strangers, where = is_admitted, strangers, transport.range_of
        self._history_limits = PeerLimits(
            is_admitted, where, strangers=STRANGERS_HISTORY_BYTES_PER_SECOND, upload=self._upload, parts=HISTORY_SHARES
        )
        self._long_limits = PeerLimits(is_admitted, where, each=LONG_RATES[0], strangers=LONG_RATES[1])
        self.outgoing: dict[bytes, Outgoing] = {}
        self.incoming: list[Stream] = []  # the oldest first
        self._questions: dict[bytes, PendingHistory] = {}
        self.counters: Counter[str] = Counter()
        self.history_bytes: Counter[str] = Counter()  # bytes of histories, "sent" and "received"
        self._tasks = Tasks(report_crash)
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        await self._transport.serve(self.protocol, self._listen)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        for stream in self.incoming:
            stream.abort()
        await self._tasks.cancel()

    def post(self, peer: bytes, message: Mail) -> bool:
        """Queues a message for a connected peer. False if it was dropped because the queue is full."""
        frames, outgoing = list(frames_of(message)), self._to(peer)
        size = sum(map(len, frames))
        if (
            outgoing is None
            or len(outgoing.frames) + len(frames) > QUEUED_MAX
            or outgoing.size + size > (QUEUED_BYTES_MAX if self._is_admitted(peer) else STRANGER_QUEUED_BYTES_MAX)
            or not self._has_room(peer, size, lambda each: each.size)
        ):
            return self._drop()
        outgoing.frames.extend(frames)
        outgoing.size += size
        outgoing.wake.set()
        return True

    def may_tell(self, peer: bytes) -> bool:
        """Whether a short history for a peer would be taken: asked before one is made, which may take long."""
        has_room = self._has_room(peer, HISTORY_BYTES_LEAST, lambda each: len(each.history))
        is_free = not (peer in self.outgoing and self.outgoing[peer].history)
        return has_room and is_free and self._history_limits.seconds_until(peer, HISTORY_BYTES_LEAST) <= 0.0

    def tell_history(self, peer: bytes, history: bytes | bytearray) -> bool:
        """Answers a `HistoryQuery` likewise, with a `HistoryBegins` and its parts."""
        assert 1 <= len(history) <= HISTORY_BYTES_MAX, "the limits on its content keep a history below that"
        outgoing = self._to(peer)
        has_room = self._has_room(peer, len(history), lambda each: len(each.history))
        self._history_limits.spend(peer, min(len(history), HISTORY_BYTES_LEAST) if has_room else len(history))
        if outgoing is None or outgoing.history or not has_room:
            return self._drop()
        outgoing.history = history
        outgoing.wake.set()
        return True

    def ask_history(self, peer: bytes, branch: bytes, number: int) -> None:
        """Asks for a history. Always calls back: with the history, or with the reason why there is none."""
        if peer in self._questions:
            return  # its answer is on the way; core/catchup.py knows that it may be to an earlier request
        if len(self._questions) >= QUESTIONS_MAX:
            asyncio.get_running_loop().call_soon(self._no_history, peer, "too many requests are open already")
            return
        question = PendingHistory(asyncio.get_running_loop().time())
        self._start(peer, lambda why: self._give_up(peer, why), self._await_answer, question)
        self._questions[peer] = question
        self.post(peer, HistoryQuery(branch, number))

    def forget(self, peer: bytes) -> None:
        if (outgoing := self.outgoing.get(peer)) is not None:
            self._clear(outgoing)

    async def is_spoken_by(self, peer: bytes) -> bool:
        """Returns whether a connected peer takes part in this run."""
        try:
            with self._boundary.guard("a look at a peer's protocol", peer):
                stream = await self._transport.open(peer, self.protocol)
        except TransportError:
            return False
        stream.abort()
        return True

    @property
    def queued_frames(self) -> int:
        return sum(len(each.frames) for each in self.outgoing.values())

    # -- Outgoing ---------------------------------------------------------------------------------------

    def _to(self, peer: bytes) -> Outgoing | None:
        assert self._is_open
        outgoing = self.outgoing.get(peer)
        if outgoing is None:
            if len(self.outgoing) >= PEERS_MAX // (1 if self._is_admitted(peer) else 2):
                return None
            outgoing = Outgoing()
            self._start(peer, lambda _: self.outgoing.pop(peer, None), self._talk, outgoing)
            self.outgoing[peer] = outgoing  # once there is a task that sends it: else the peer would never be told more
        return outgoing

    def _has_room(self, peer: bytes, size: int, size_of: Callable[[Outgoing], int]) -> bool:
        """Whether so much more fits what waits for admitted peers, or what waits for strangers."""
        is_admitted = self._is_admitted(peer)
        waiting = [(other, waits) for other, each in self.outgoing.items() if (waits := size_of(each))]
        total = sum(waits for other, waits in waiting if self._is_admitted(other) == is_admitted)
        return total + size <= QUEUED_TOTAL_BYTES_MAX // (1 if is_admitted else STRANGERS_ROOM)

    def _drop(self) -> bool:
        self.counters["dropped"] += 1
        return False

    def _clear(self, outgoing: Outgoing) -> None:
        self.counters["dropped"] += len(outgoing.frames) + bool(outgoing.history)
        outgoing.frames.clear()
        outgoing.size = 0
        outgoing.drop_history()

    async def _talk(self, peer: bytes, outgoing: Outgoing) -> None:
        """Sends a peer's queue, reopening broken streams, until the queue has been empty for a while."""
        tries = 0
        while outgoing.next() is not None:
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    stream = await self._transport.open(peer, self.protocol)
                try:
                    while await self._send_next(peer, stream, outgoing):
                        tries = 0
                    await stream.close()
                finally:
                    stream.abort()
            except (TransportError, TimeoutError):
                self.counters["broken"] += 1
                outgoing.drop_history()  # half a history is useless, and the request will have expired
                tries += 1
                if tries >= TRIES_MAX:
                    self._clear(outgoing)
                else:
                    await asyncio.sleep(BACKOFF_SECONDS * 2 ** (tries - 1))
        del self.outgoing[peer]  # no await since the queue was found empty, so nothing is lost

    async def _send_next(self, peer: bytes, stream: Stream, outgoing: Outgoing) -> bool:
        """Sends the next frame, or waits for one. False if none came for a long time."""
        if (frame := outgoing.next()) is None:
            outgoing.wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    await outgoing.wake.wait()
            return outgoing.next() is not None
        async with asyncio.timeout(SEND_SECONDS):
            await stream.send(frame)
        if frame is outgoing.part:
            paid = HISTORY_BYTES_LEAST if outgoing.history_sent <= 0 else 0
            self._history_limits.spend(peer, max(0, len(frame) - paid))
            self._upload.charge(len(frame))
            self.history_bytes["sent"] += len(frame)
        outgoing.sent(frame)
        self.counters["sent"] += 1
        return True

    # -- Incoming ---------------------------------------------------------------------------------------

    async def _listen(self, stream: Stream) -> None:
        peer = stream.peer
        if not self._is_open or len(self.incoming) >= PEERS_MAX:
            stream.abort()
            return
        self.incoming.append(stream)
        for old in [each for each in self.incoming if each.peer == peer][:-INCOMING_MAX]:
            old.abort()  # the newest win; the task of the old one removes it from the list
        try:
            while True:
                frame = await self._receive(stream)
                for place, part in enumerate(_parts_of(frame)):
                    if place and not self._is_admitted(peer):
                        await self._strangers.take(stream, 1)
                    self._take(peer, stream, part)
                    await asyncio.sleep(0)  # so that one peer's flood does not starve the others
        except RemoteProtocolError as error:
            if self._is_open:
                self._malformed(peer, error.why)
        except (TransportError, TimeoutError):
            pass
        finally:
            stream.abort()
            if (question := self._questions.get(peer)) is not None and question.stream is stream:
                question.end = 0.0
                question.moved.set()
            self.incoming.remove(stream)

    async def _receive(self, stream: Stream) -> Frame | None:
        """Returns the next frame; one of a stranger when its budget allows, and None if it was too long."""
        is_admitted, peer = self._is_admitted(stream.peer), stream.peer
        async with asyncio.timeout(2 * IDLE_SECONDS if is_admitted else STRANGER_IDLE_SECONDS):
            size = await stream.coming()
        question = self._questions.get(peer)
        is_asked = question is not None and question.stream in (None, stream)  # then a history may come
        is_too_long = not is_admitted and STRANGER_FRAME_BYTES_MAX < size <= FRAME_BYTES_MAX
        if not is_admitted and not is_asked:
            await self._pay(stream, size)
        async with asyncio.timeout(BODY_SECONDS):
            if is_too_long and not is_asked:
                await stream.skip()
                return None
            frame = decode_frame(await stream.receive(FRAME_BYTES_MAX))
        self.counters["received"] += 1
        if isinstance(frame, HistoryBegins | HistoryPart):
            self.history_bytes["received"] += size
        elif not is_admitted and is_asked:  # what it says besides costs the same: who is asked has no other rights
            await self._pay(stream, size)
            return None if is_too_long else frame
        return frame

    async def _pay(self, stream: Stream, size: int) -> None:
        """Waits until a stranger may send another frame of this size."""
        await self._strangers.take(stream, 1)
        if STRANGER_FRAME_BYTES_MAX < size <= FRAME_BYTES_MAX:
            self.counters["long messages of strangers"] += 1
            await self._long_limits.take(stream, size)

    def _take(self, peer: bytes, stream: Stream, frame: Frame) -> None:
        if not self._is_open:
            return
        match frame:
            case HistoryBegins(size):
                self._begin_history(peer, stream, size)
            case HistoryPart(data):
                self._go_on_with_history(peer, stream, data)
            case HistoryQuery() if not self.may_tell(peer):
                self.counters["history requests dropped"] += 1
            case _:
                self._hear(peer, frame)

    def _begin_history(self, peer: bytes, stream: Stream, size: int) -> None:
        question = self._questions.get(peer)
        if question is not None and question.stream is stream:
            raise RemoteProtocolError("a history that begins inside another one")
        if question is None or question.stream is not None:
            self.counters["unasked"] += 1
            raise TransportError("a history that was not asked for, or long ago")  # of 64 MiB, to be read for nothing
        question.stream, question.size = stream, size
        self._progress(question)

    def _go_on_with_history(self, peer: bytes, stream: Stream, data: bytes) -> None:
        question = self._questions.get(peer)
        if stream.is_gone:  # it was too late
            return
        if question is None or question.stream is not stream:
            raise RemoteProtocolError("a history part without a history")
        missing = question.size - len(question.parts)
        if len(data) != min(PART_BYTES, missing):
            raise RemoteProtocolError(f"a history part of {len(data)} bytes, but {missing} are missing")
        question.parts += data
        self._download.charge(len(data))
        self._progress(question)
        if len(data) == missing:
            self._history(peer, bytes(question.parts))
            del self._questions[peer]

    def _give_up(self, peer: bytes, why: str) -> None:
        if self._questions.pop(peer, None) is not None:
            self._no_history(peer, why)

    def _progress(self, question: PendingHistory) -> None:
        question.until = asyncio.get_running_loop().time() + QUESTION_SECONDS
        question.moved.set()

    async def _await_answer(self, peer: bytes, question: PendingHistory) -> None:
        """Waits until the answer is complete or too late."""
        loop = asyncio.get_running_loop()
        while self._questions.get(peer) is question:
            question.moved.clear()
            if (deadline := min(question.until, question.end)) <= loop.time():
                break
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await question.moved.wait()
        if self._questions.get(peer) is question:
            if question.stream is not None and question.end > 0:
                question.stream.abort()  # the rest would be read for nothing
            so_far = f"after {len(question.parts)} of {question.size} bytes" if question.size else "at all"
            self._give_up(peer, f"no answer {so_far}")

    def _start(
        self, peer: bytes, failed: Callable[[str], object], work: Callable[..., Awaitable[None]], of: Any
    ) -> None:
        self._tasks.spawn(self._boundary.contained("mail to a peer", peer, work, peer, of, failed=failed))
