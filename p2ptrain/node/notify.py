"""Notifies the supervisor that started the node: ready, status, watchdog, stopping.

The protocol is systemd's (sd_notify(3)), which other supervisors also speak: a datagram of KEY=value lines to the
socket in NOTIFY_SOCKET, a path or, after an @, an abstract name. Without that variable, nothing is sent. If the
supervisor expects watchdog beats (WATCHDOG_USEC), they come from the event loop, so that they stop if it hangs. They
also stop when the node has halted: it will not recover by itself, and people look for failed units.

Sending never blocks: a notification that the supervisor does not accept is repeated later, or does not matter."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from time import monotonic

TELL_SECONDS = 5.0  # between status updates, which people read
BEATS = 4  # per watchdog interval: systemd recommends two, and one may be late
GOING_OVER_SECONDS = 6 * 3600.0  # from a run to the next: the state is saved twice, and data may be fetched
TEXT_MAX = 500  # characters of a status: about one line in a terminal, and far below the size of a datagram

log = logging.getLogger("p2ptrain.node")


def notify(**said: str) -> bool:
    """Sends fields to the supervisor in one datagram. Returns whether it was accepted; False if there is none."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return False
    lines = [f"{key}={' '.join(value.split())[:TEXT_MAX]}" for key, value in said.items()]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.connect("\0" + name[1:] if name.startswith("@") else name)
            sender.send("\n".join(lines).encode("utf-8", "replace"))
    except OSError as error:
        log.debug("cannot notify the supervisor at %s: %s", name, error)
        return False
    return True


class SystemdNotifier:
    """Sends status and watchdog beats of a running node. `look` is called about once a second, in the event loop."""

    def __init__(self) -> None:
        self._is_wanted = "NOTIFY_SOCKET" in os.environ
        self._seconds = min(TELL_SECONDS, _patience_seconds() / BEATS)
        self._is_known = False  # whether READY has been sent
        self._next_at = 0.0

    def look(self, status: Callable[[], str], is_halted: bool) -> None:
        now = monotonic()
        if not self._is_wanted or now < self._next_at:
            return
        said = {"STATUS": status()}
        if not self._is_known:
            said |= {"READY": "1"} | watchdog(_patience_seconds())  # which may have been put off
        if not is_halted:
            said["WATCHDOG"] = "1"
        if notify(**said):
            self._is_known, self._next_at = True, now + self._seconds


def watchdog(seconds: float) -> dict[str, str]:
    """Returns the field that sets the watchdog to another interval, if there is one."""
    return {"WATCHDOG_USEC": f"{seconds * 1e6:.0f}"} if _patience_seconds() < float("inf") else {}


def _patience_seconds() -> float:
    """Returns the watchdog interval, or infinity if the supervisor sets none for this process."""
    interval, whose = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or int(interval) == 0 or whose not in ("", str(os.getpid())):
        return float("inf")
    return int(interval) / 1e6
