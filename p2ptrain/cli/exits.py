"""The exit statuses of all commands, with causes and remedies. The reference is generated from these tables."""

from __future__ import annotations

from enum import IntEnum

from p2ptrain import errors


class ExitStatus(IntEnum):
    DONE = 0
    FAILED = 1
    USER_ERRED = 2
    NO_DAEMON = 3
    HARDWARE = 4
    OWNER_NEEDED = 5
    INTERRUPTED = errors.INTERRUPTED


# The cause of each status, and the remedy.
MEANINGS: dict[ExitStatus, tuple[str, str]] = {
    ExitStatus.DONE: ("success; for `start` and `join`: the node was asked to stop, and did", "nothing"),
    ExitStatus.FAILED: (
        "failure of a disk, a device or a peer; for `join` without all of the run's id: what the bootstrap nodes offer "
        "cannot be joined here; or a bug in p2ptrain, with a traceback",
        "do what the message says, or try again; report a traceback together with the log. Some commands use this "
        "status for what they found: see the next table",
    ),
    ExitStatus.USER_ERRED: (
        "an invalid option or config: the message names the option, the key or the file",
        "fix it as the message says; a retry would fail in the same way, so a supervisor should not restart it",
    ),
    ExitStatus.NO_DAEMON: (
        "no daemon answers for this data directory",
        "start it, or give its `--data-dir`; if it runs but does not answer, read its log, and restart it",
    ),
    ExitStatus.HARDWARE: (
        "for `start` and `join`: this machine repeatedly computed different results from all others",
        "test its memory and turn off overclocking, then remove the file that the message names; until then the node "
        "does not start",
    ),
    ExitStatus.OWNER_NEEDED: (
        "for `start` and `join`: the node's data is damaged or from a later release, this machine has too little "
        "memory for the run, or the run went on as another without its owner's assent",
        "do what the message says; a retry would fail in the same way, so a supervisor should not restart it",
    ),
    ExitStatus.INTERRUPTED: (
        "Ctrl-C, or a second SIGTERM before the node had left",
        "nothing; a node continues from its disk when it is started again",
    ),
}
# For each command that can end with status 1: the cause, and the remedy.
FOUND: dict[str, tuple[str, str]] = {
    "audit": (
        "some of the node's data is wrong, or cannot be checked",
        "remove the file that the audit names; the node then fetches it from its peers",
    ),
    "demo": ("a node failed, or the replicas differ", "see the logs, with `--keep DIR`"),
    "doctor": ("a node could not start or take part here", "each failed line says what to do"),
    "replay": ("the core does not behave as recorded", "replay with the release that wrote the log"),
    "simulate": ("a guarantee was broken, or the scenario did not end as expected", "report it with the seed"),
}
