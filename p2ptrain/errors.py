"""The package's errors, by who is at fault, which decides what happens next.

A peer broke the rules: `RemoteProtocolError`; it becomes evidence and the node goes on. The user made a mistake:
`ConfigError`, which names the key and the fix (exit status 2). Something outside failed: `DataError`, `DeviceError`,
`MemoryShortError` and `TrainingError`, which say what was found and where; or this machine itself is broken:
`HardwareError` (exit status 4). `UnusableError` and `TooLargeError` end every start alike until the owner has done what
they say (exit status 5). Our own bug: `assert`, and the process ends."""

from __future__ import annotations

from pathlib import Path

INTERRUPTED = 130  # the exit status after Ctrl-C: 128 + SIGINT, as shells report it


class P2ptrainError(Exception):
    """The base class of all errors that this package raises on purpose."""


class RemoteProtocolError(P2ptrainError):
    """A message that no honest peer would send; `why` goes into the evidence."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class ConfigError(P2ptrainError):
    """A mistake by the user: names the file, the key, the problem and the fix."""

    def __init__(self, problem: str, *, source: str = "", key: str = "", fix: str = "") -> None:
        self.problem, self.source, self.key, self.fix = problem, source, key, fix
        place = ": ".join(part for part in (source, key) if part)
        text = f"{place}: {problem}" if place else problem
        super().__init__(f"{text}. {fix}" if fix else text)


class PortTakenError(ConfigError):
    """Another program listens on a port that this node is to listen on."""


class SettingError(P2ptrainError, ValueError):
    """Settings that do not go together; pydantic collects these, and `ConfigError` says where they stand."""

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem, self.fix = problem, fix
        super().__init__(f"{problem}: {fix}" if fix else problem)


class DataError(P2ptrainError):
    """Data or saved state that is missing, damaged or does not match its digest, with its file and a fix."""

    def __init__(self, problem: str, *, path: Path | None = None, fix: str = "") -> None:
        self.problem, self.path, self.fix = problem, path, fix
        text = f"{path}: {problem}" if path else problem
        super().__init__(f"{text}. {fix}" if fix else text)


class UnusableError(DataError):
    """Saved state from which no node can start: it is damaged, foreign, or from a later release."""


class DeviceError(P2ptrainError):
    """A device that cannot do its job, with a fix."""

    def __init__(self, problem: str, *, fix: str) -> None:
        self.problem, self.fix = problem, fix
        super().__init__(f"{problem}. {fix}")


class TooLargeError(DeviceError):
    """This machine will never have enough memory for the run."""


class HardwareError(P2ptrainError):
    """This machine computes different results from all others; says how we know and what its owner can do."""


class TrainingError(P2ptrainError):
    """A loss or gradient that is not finite, which must never be contributed."""

    def __init__(self, what: str, *, step: int, positions: list[int]) -> None:
        super().__init__(f"{what} is not finite in step {step} (sequence positions {positions})")
        self.what, self.step, self.positions = what, step, positions


class PassedError(P2ptrainError):
    """A round passed without this node's contribution, which is nobody's fault."""


class StoppedError(P2ptrainError):
    """Training was interrupted because the node is ending."""


class PrivacySpentError(P2ptrainError):
    """The next steps would tell more of the owner's data than its budget allows."""

    def __init__(self, spent: float, budget: float) -> None:
        super().__init__(f"the privacy budget is spent: epsilon {spent:.2f} of {budget:g}")
        self.spent, self.budget = spent, budget


class MemoryShortError(P2ptrainError):
    """The device ran out of memory; says what is in use and which settings help."""


class RanksLostError(P2ptrainError):
    """The processes that take a node's steps have ended, hang or cannot begin; a round is lost with them."""


class NoDaemonError(P2ptrainError):
    """No daemon answers for this data directory."""


class SilentDaemonError(NoDaemonError):
    """A daemon seems to run for this data directory, but hangs or did not finish its answer."""


class NodeEndedError(P2ptrainError):
    """A script's node is gone; says how its log ends."""
