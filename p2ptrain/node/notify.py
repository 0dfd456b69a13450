"""What the node tells the supervisor that started it: that it takes part, how it goes, that it lives, that it ends.

The protocol is systemd's (sd_notify(3)), which others speak too: a datagram of KEY=value lines to the socket that
NOTIFY_SOCKET names, by its path or, after an @, by a name of the kernel's. Without that variable nothing is said. If
the supervisor wants beats (WATCHDOG_USEC), they come from the event loop, so that they end when it does; and they end
when the node has halted, because it will not go on by itself, and a unit that has failed is what a person looks for.

Nothing waits for the supervisor: what it does not take is said again later, or was not worth it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from time import monotonic

TELL_SECONDS = 5.0  # between two words on how it goes: people read them
BEATS = 4  # in the time after which a supervisor loses its patience: it asks for two, and one may come late
TEXT_MAX = 500  # letters of a status: one line in a terminal, and far below what a datagram holds

log = logging.getLogger("p2ptrain.daemon")


def notify(**said: str) -> bool:
    """Say all that to the supervisor in one go; whether it took it. There may be none."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return False
    lines = [f"{key}={' '.join(value.split())[:TEXT_MAX]}" for key, value in said.items()]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.connect("\0" + name[1:] if name.startswith("@") else name)
            sender.send("\n".join(lines).encode("utf-8", "replace"))
    except OSError as error:
        log.debug("the supervisor at %s did not take what it was told: %s", name, error)
        return False
    return True


class Beat:
    """Of a node that takes part. `look` is called about once a second, in the event loop."""

    def __init__(self) -> None:
        self._is_wanted = "NOTIFY_SOCKET" in os.environ
        self._seconds = min(TELL_SECONDS, _patience_seconds() / BEATS)
        self._is_known = False  # that the node takes part
        self._next_at = 0.0

    def look(self, status: Callable[[], str], is_halted: bool) -> None:
        now = monotonic()
        if not self._is_wanted or now < self._next_at:
            return
        said = {"STATUS": status()}
        if not self._is_known:
            said["READY"] = "1"
        if not is_halted:
            said["WATCHDOG"] = "1"
        if notify(**said):
            self._is_known, self._next_at = True, now + self._seconds


def _patience_seconds() -> float:
    """After which a supervisor that hears nothing ends this process; not what it asks of another's."""
    interval, whose = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or int(interval) == 0 or whose not in ("", str(os.getpid())):
        return float("inf")
    return int(interval) / 1e6
