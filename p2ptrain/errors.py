"""The errors, sorted by who is to blame; this decides what happens next.

A peer broke the rules: `RemoteProtocolError`; it becomes evidence and life goes on. The user erred:
`ConfigError`, which names the key and the fix (exit status 2). The world failed: `DataError`,
`DeviceError`, `MemoryShortError` and `TrainingError`, which say what was found and where; or this machine itself is
broken: `HardwareError` (exit status 4). Of these `UnusableError` and `TooLargeError` end every start alike until the
owner has done what they say (exit status 5). We erred: `assert`, and the process ends.
"""

from __future__ import annotations


class P2ptrainError(Exception):
    """The base of all errors that this package raises on purpose."""


class RemoteProtocolError(P2ptrainError):
    """Bytes from a peer that no honest peer would have sent; `why` goes into the evidence."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class ConfigError(P2ptrainError):
    """A mistake in what the user wrote: where it stands, which key, what is wrong and how to mend it."""

    def __init__(self, problem: str, *, source: str = "", key: str = "", fix: str = "") -> None:
        self.problem, self.source, self.key, self.fix = problem, source, key, fix
        place = ": ".join(part for part in (source, key) if part)
        text = f"{place}: {problem}" if place else problem
        super().__init__(f"{text}. {fix}" if fix else text)


class DataError(P2ptrainError):
    """Data or saved state that is missing, damaged or not what its digest promises."""


class UnusableError(DataError):
    """What is kept here no start can go on with: it is damaged, of something else or of a later release."""


class DeviceError(P2ptrainError):
    """A device that cannot do what it is asked for, and what to do about it."""

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(f"{problem}. {fix}")


class TooLargeError(DeviceError):
    """This machine has never enough memory for the run."""


class HardwareError(P2ptrainError):
    """This machine computes otherwise than all others: what says so, and what its owner has to do."""


class TrainingError(P2ptrainError):
    """A loss or gradient that is not finite: never a contribution."""

    def __init__(self, what: str, *, step: int, positions: list[int]) -> None:
        super().__init__(f"{what} is not finite in step {step} (sequence positions {positions})")
        self.what, self.step, self.positions = what, step, positions


class MemoryShortError(P2ptrainError):
    """The device has no memory for it: what is taken of it, and which settings help."""


class NoDaemonError(P2ptrainError):
    """No daemon answers for this data directory."""


class SilentDaemonError(NoDaemonError):
    """There is one, as far as can be told: it may hang, or have broken off its answer."""
