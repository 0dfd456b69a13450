"""Fuzzing of all decoders of foreign bytes: what a target is, and how one input is tried."""

from __future__ import annotations

import gc
import re
import resource
import signal
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

TRIES = 4  # of an input that took longest so far, of which the shortest counts
HANG_SECONDS = 5.0  # of the processor, or twice as much, after which an input is given up
FAILURES_MAX = 5  # of a target that are kept
ROOM_BYTES = 2**31  # of addresses, on top of what the process has: a bomb is then a MemoryError


def nothing() -> None:
    """Forgets nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder, the errors that it may raise, and what it may cost."""

    name: str
    kind: str  # the format, by which inputs are altered (alter.py)
    seeds: tuple[bytes, ...]  # all accepted
    decode: Callable[[bytes], object]
    errors: tuple[type[BaseException], ...]  # these and no subclasses of those that are not the package's
    encode: Callable[[object], bytes] | None = None  # where a content has one encoding: of what was decoded
    seconds: float = 0.003  # for any input, and then
    seconds_a_byte: float = 5e-6
    memory: int = 2**17
    memory_a_byte: float = 64.0
    forget: Callable[[], None] = nothing  # empties caches before an input is tried again
    every: int = 1  # turns of the others: more for a slow one


class HangError(BaseException):
    """An input takes too long to wait for its end; no decoder catches this."""


class Watch:
    """Gives up an input that is still the same after HANG_SECONDS: a timer for each would take as long as most do."""

    def __init__(self) -> None:
        self.inputs, self.is_trying, self._seen = 0, False, -1

    def look(self, signal_number: int, frame: FrameType | None) -> None:
        if self.is_trying and self._seen == self.inputs:
            raise HangError(f"more than {HANG_SECONDS:.0f} s of the processor")
        self._seen = self.inputs


WATCH = Watch()


class _Caught:
    """Keeps what is raised in the context, whatever it is: it is judged afterwards."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> _Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error
        return not isinstance(error, KeyboardInterrupt | SystemExit)


@dataclass(frozen=True, slots=True)
class Failure:
    """An input after which something happened that must not."""

    target: str
    what: str
    details: str  # the traceback, if there is one
    data: bytes

    @property
    def key(self) -> str:
        """The same for inputs that fail alike."""
        places = re.findall(r'File ".*?(p2ptrain/.*?)", line (\d+)', self.details)
        return f"{self.target}: {re.sub(r'[0-9]+', '#', self.what)[:60]} {places[-1:]}"


@dataclass(slots=True)
class Tally:
    """The figures of a target."""

    inputs: int = 0
    accepted: int = 0
    bytes: int = 0
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, 0)  # seconds, and bytes of that input
    worst_seconds_a_kb: float = 0.0  # of inputs of a KB and more; shorter ones count as one
    worst_memory_a_byte: float = 0.0  # likewise
    failed: int = 0
    failures: list[Failure] = field(default_factory=list)  # the first of each kind


class Trial:
    """Tries the inputs of one target, and keeps its tally."""

    def __init__(self, target: Target) -> None:
        self.target, self.tally = target, Tally()

    def run(self, data: bytes, *, weighs: bool = False) -> str:
        """Decodes an input and returns what came of it, in words without numbers: equal for inputs that go one way.

        weighs: also measure its memory, which takes some times as long
        """
        target, tally = self.target, self.tally
        target.forget()
        seconds, found, error = self._timed(data)
        tally.inputs, tally.bytes, tally.seconds = tally.inputs + 1, tally.bytes + len(data), tally.seconds + seconds
        if error is not None and not is_own(error, target.errors):
            self._fail(type(error).__name__, data, error)
            return f"failed {type(error).__name__}"
        limit = target.seconds + target.seconds_a_byte * len(data)
        is_worst = seconds > min(tally.slowest[0], tally.worst_seconds_a_kb * max(1.0, len(data) / 1_024))
        for _ in range(TRIES if seconds > limit or is_worst else 0):
            target.forget()
            seconds = min(seconds, self._timed(data)[0])
        if seconds > limit:
            self._fail(f"{1e3 * seconds:.1f} ms for {len(data):,} bytes; the limit is {1e3 * limit:.1f}", data)
        if weighs or seconds > tally.slowest[0]:
            self._weigh(data)
        tally.slowest = max(tally.slowest, (seconds, len(data)))
        tally.worst_seconds_a_kb = max(tally.worst_seconds_a_kb, seconds / max(1.0, len(data) / 1_024))
        if error is not None:
            return f"{type(error).__name__} {re.sub(r'[0-9]+|0x[0-9a-f]+', '', str(error))[:60]}"
        tally.accepted += 1
        if target.encode is not None:
            with _Caught() as caught:
                again = target.encode(found)
            if caught.error is not None:
                self._fail(f"encoding what was accepted: {type(caught.error).__name__}", data, caught.error)
            elif again != data:
                self._fail(f"a second encoding was accepted of what is encoded as {again[:64].hex()}...", data)
        return "accepted"

    def _timed(self, data: bytes) -> tuple[float, object, BaseException | None]:
        found: object = None
        WATCH.inputs += 1
        before = time.thread_time()  # of the processor: another process may have it meanwhile
        with _Caught() as caught:
            WATCH.is_trying = True
            found = self.target.decode(data)
        WATCH.is_trying = False
        return time.thread_time() - before, found, caught.error

    def _weigh(self, data: bytes) -> None:
        limit = self.target.memory + self.target.memory_a_byte * len(data)
        peak = self._peak(data)
        for _ in range(TRIES if peak > limit else 0):  # asyncio's set of all tasks may grow in one: 128 KiB at once
            peak = min(peak, self._peak(data))
        self.tally.worst_memory_a_byte = max(self.tally.worst_memory_a_byte, peak / max(1_024, len(data)))
        if peak > limit:
            self._fail(f"{peak:,} bytes of memory for {len(data):,} bytes; the limit is {limit:,.0f}", data)

    def _peak(self, data: bytes) -> int:
        self.target.forget()
        tracemalloc.start()
        with _Caught():
            self.target.decode(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    def _fail(self, what: str, data: bytes, error: BaseException | None = None) -> None:
        details = "" if error is None else "".join(traceback.format_exception(error, limit=-12))[-6_000:]
        failure, tally = Failure(self.target.name, what, details, data), self.tally
        tally.failed += 1
        if len(tally.failures) < FAILURES_MAX and failure.key not in {each.key for each in tally.failures}:
            tally.failures.append(failure)


def is_own(error: BaseException, errors: tuple[type[BaseException], ...]) -> bool:
    """Whether a decoder may raise this. A subclass of a builtin error, as UnicodeDecodeError of ValueError, is another
    error; one of the package's own says more of the same."""
    return any(
        type(error) is each or (isinstance(error, each) and each.__module__.startswith("p2ptrain")) for each in errors
    )


@contextmanager
def limits() -> Iterator[None]:
    """Bounds the memory of this process and the time of an input, and keeps the collection of garbage out of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1_024 for line in lines if line.startswith("VmSize:"))
    before = signal.signal(signal.SIGVTALRM, WATCH.look)
    was_collecting = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_SECONDS, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
        gc.unfreeze()
        if was_collecting:
            gc.enable()
