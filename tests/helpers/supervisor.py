"""A supervisor's end of the socket to which a node sends its notifications."""

from __future__ import annotations

import socket

DATAGRAM_MAX = 4_096


class SupervisorEnd:
    """The supervisor's end of the socket."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self.socket.settimeout(0)
        self.heard: list[dict[str, str]] = []

    def listen(self) -> list[dict[str, str]]:
        """Reads everything received so far."""
        while True:
            try:
                text = self.socket.recv(DATAGRAM_MAX).decode()
            except BlockingIOError:
                return self.heard
            self.heard.append(dict(line.split("=", 1) for line in text.split("\n")))

    def was_told(self, key: str) -> list[str]:
        return [each[key] for each in self.listen() if key in each]
