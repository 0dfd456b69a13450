"""The exit statuses of all commands: why each, and what to do about it. The reference is made of these tables."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """How a command has ended."""

    DONE = 0
    FAILED = 1
    USER_ERRED = 2
    NO_DAEMON = 3
    HARDWARE = 4
    OWNER_NEEDED = 5
    INTERRUPTED = 130  # as a shell says it


# Why, and what to do.
MEANINGS: dict[ExitStatus, tuple[str, str]] = {
    ExitStatus.DONE: ("it is done; of `start` and `join`: the node has ended as it was asked to", "nothing"),
    ExitStatus.FAILED: (
        "it failed: the world, such as a disk, a device or a peer; or a mistake of p2ptrain's, with a traceback",
        "do what the message says, or try again; of a traceback, tell us with the log. Some commands say with it what "
        "they found: the next table",
    ),
    ExitStatus.USER_ERRED: (
        "what was typed, or stands in a file, cannot be: the message names the option, the key or the file",
        "mend it as the message says; the same again would end the same way, so a supervisor should not try",
    ),
    ExitStatus.NO_DAEMON: (
        "no daemon answers for this data directory",
        "start it, or name its `--data-dir`; if it does not answer, see its log, end it and start it again",
    ),
    ExitStatus.HARDWARE: (
        "of `start` and `join`: this machine has computed otherwise than all others, again and again",
        "test its memory, do not overclock it, then remove the file that the message names; no start goes on before",
    ),
    ExitStatus.OWNER_NEEDED: (
        "of `start` and `join`: what the node keeps is damaged or of a later release, or this machine has too little "
        "memory for the run",
        "do what the message says; the same again would end the same way, so a supervisor should not try",
    ),
    ExitStatus.INTERRUPTED: (
        "Ctrl-C, or a second SIGTERM before the node had left",
        "nothing; a node goes on from what is on its disk when it is started again",
    ),
}
# Why a command ends with status 1, and what to do about it.
FOUND: dict[str, tuple[str, str]] = {
    "audit": ("something that the node kept is wrong", "it names the file; a node without it gets it from its peers"),
    "checkpoint verify": (
        "a checkpoint is damaged",
        "remove it: a start goes on from an older one, or asks others",
    ),
    "demo": ("a node failed, or the replicas differ", "see the logs, with `--keep DIR`"),
    "doctor": ("a node could not start here, or not take part", "each line that failed says what to do"),
    "replay": ("the core does not do what it did then", "run it with the release that wrote the log"),
    "simulate": ("a promise is broken, or the scenario does not come out as it says", "tell us, with the seed"),
}
