"""Starts and stops the p2pd process and keeps its last output. p2pd never outlives us.

p2pd ends with its last persistent control connection. If we die, however early, the kernel kills it: its standard input
is a socket of ours, and it gets SIGKILL as soon as our end closes. The child has to request that signal itself, and
running Python in a fork of a process with threads may hang; so a small interpreter starts first, requests the signal,
and then executes p2pd. The kernel closes a dead process' files from the highest descriptor down, and p2pd says goodbye
to the meshes of topics whose subscriptions end; peers would then keep us out of these for a minute. So our end has a
higher descriptor than any subscription.

Ports are taken before p2pd gets them. p2pd sets SO_REUSEPORT, so a second p2pd of the same user would bind a port that
is taken, without an error, and each would receive half of the connections.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import importlib.util
import logging
import os
import re
import resource
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Self

from p2ptrain.address import parse
from p2ptrain.config import NetworkConfig
from p2ptrain.errors import ConfigError, PortTakenError
from p2ptrain.net.libp2p.unary import CONTROL_BYTES_MAX
from p2ptrain.net.transport import TransportError

logger = logging.getLogger("p2ptrain.net")

START_SECONDS = 15.0  # it takes 0.1 s, more on a busy machine
IDLE_SECONDS = 20  # longer than START_SECONDS
LIFELINE_DESCRIPTOR_MIN = 256  # subscriptions are opened at the start, when a node has a few dozen descriptors
STOP_SECONDS = 3.0  # from SIGTERM to SIGKILL
LINES_MAX, LINE_CHARACTERS_MAX = 5, 500  # kept of its output, for error messages
TELLING = re.compile(r"panic: |fatal error: |flag |.*\b(FATAL|failed)\b")  # worth showing; a stack or options follow
USUAL = ("Control socket:", "Peer ID:", "Peer Addrs:", "/ip4/", "/ip6/", "/dns", "/p2p/")
CONNECTIONS_LOW, CONNECTIONS_HIGH = 192, 256  # above the high mark p2pd prunes down to the low one
CONNECTIONS_GRACE_SECONDS = 20  # a new connection is not pruned this long
REQUEST = (  # SIGKILL, when the other end of the standard input closes
    "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid()); fcntl.fcntl(0, fcntl.F_SETSIG, 9);"
    "fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)"
)


class Process:
    """A running p2pd."""

    def __init__(self, child: asyncio.subprocess.Process, lifeline: socket.socket) -> None:
        self._child, self.lifeline = child, lifeline
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._telling: deque[str] = deque(maxlen=LINES_MAX)
        self._is_ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self.pid = child.pid

    @classmethod
    async def start(cls, arguments: list[str]) -> Self:
        """Starts p2pd; returns when it accepts connections. If it fails, TransportError quotes its output."""
        binary = find_binary()
        command = tied_to_us(REQUEST, [str(binary), *arguments])
        lifeline, its_end = _lifeline()
        async with AsyncExitStack() as stack:
            stack.callback(lifeline.close)
            try:
                with its_end:
                    child = await asyncio.create_subprocess_exec(
                        *command,
                        stdin=its_end.fileno(),
                        stdout=asyncio.subprocess.PIPE,
                        stderr=asyncio.subprocess.STDOUT,
                        start_new_session=True,  # so that Ctrl-C in the terminal reaches only us
                        env={**os.environ, "GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "nocolor"},
                    )
            except OSError as error:
                raise TransportError(f"cannot start {binary}: {error.strerror}") from error
            process = cls(child, lifeline)
            stack.push_async_callback(process.stop)
            try:
                async with asyncio.timeout(START_SECONDS):
                    await process._is_ready.wait()
            except TimeoutError as error:
                raise TransportError(f"p2pd did not start in {START_SECONDS:.0f} s: {process.last_words()}") from error
            if process._reading.done():  # its output is closed: it has ended
                raise TransportError(f"p2pd did not start: {process.last_words()}")
            stack.pop_all()
        return process

    async def _read(self) -> None:
        """Keeps the last lines of its output, truncated."""
        assert self._child.stdout is not None
        rest = ""
        while chunk := await self._child.stdout.read(4_096):
            *lines, rest = (rest + chunk.decode(errors="replace")).split("\n")
            rest = rest[:LINE_CHARACTERS_MAX]
            self._keep(lines)
            if any(line.startswith("Peer ID:") for line in lines):
                self._is_ready.set()
        self._keep([rest])
        self.lifeline.close()  # p2pd has ended
        asyncio.get_running_loop().call_soon(self._is_ready.set)  # after this task is done, which `start` checks

    def _keep(self, lines: list[str]) -> None:
        for line in lines:
            if line.strip() and not line.startswith(USUAL):
                kept = self._telling if TELLING.match(line) else self._lines
                kept.append(line.strip()[:LINE_CHARACTERS_MAX])

    def last_words(self) -> str:
        """Its last lines of output, without the routine ones."""
        return " | ".join(self._telling or self._lines) or "it said nothing"

    async def wait(self) -> int:
        return await self._child.wait()

    async def stop(self) -> None:
        """Sends SIGTERM, then SIGKILL. After this, even if cancelled, p2pd is gone or has been sent SIGKILL."""
        if self._child.returncode is None:
            self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._child.wait()
        except TimeoutError:
            pass
        finally:
            if self._child.returncode is None:
                self._signal(signal.SIGKILL)
        await self._child.wait()
        await self._reading

    def kill(self) -> None:
        """Sends SIGKILL; `wait` then returns."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            self._child.send_signal(number)


def tied_to_us(request: str, command: Sequence[str]) -> list[str]:
    """Returns the command of a small interpreter that asks for a signal when we end, and then becomes `command`."""
    code = (
        f"import os, sys; {request};"
        "os.getppid() == int(sys.argv[1]) or sys.exit(1);"  # we have gone already: the signal would never come
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, str(os.getpid()), *command]


def _lifeline() -> tuple[socket.socket, socket.socket]:
    """Makes our end and p2pd's end of the socket that tells the kernel that we are alive."""
    high = min(LIFELINE_DESCRIPTOR_MIN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    low, its = socket.socketpair()
    with low:
        return socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, high)), its


def find_binary() -> Path:
    """Finds the p2pd in hivemind's wheel without importing hivemind, which takes seconds."""
    found = importlib.util.find_spec("hivemind")
    binary = Path(found.origin or "").parent / "hivemind_cli" / "p2pd" if found else Path("p2pd")
    if not binary.is_file():
        raise TransportError("p2pd is missing: install hivemind's wheel for Linux on x86-64, which contains it")
    return binary


def make_arguments(
    control: Path, identity_file: Path, listen: tuple[str, ...], network: NetworkConfig, relays: Sequence[str]
) -> list[str]:
    """Returns p2pd's command-line options. Never -b: with it, p2pd does not start while a bootstrap node is down."""
    options: dict[str, object] = {
        "listen": f"/unix{control}",
        "id": identity_file.absolute(),
        "idleTimeout": f"{IDLE_SECONDS}s",
        "hostAddrs": ",".join(listen),
        "announceAddrs": ",".join(network.announce),
        "trustedRelays": ",".join(relays),
        "connLo": CONNECTIONS_LOW,
        "connHi": CONNECTIONS_HIGH,
        "connGrace": f"{CONNECTIONS_GRACE_SECONDS}s",
        "persistentConnMaxMsgSize": CONTROL_BYTES_MAX,
    }
    switches = {
        "pubsub": True,
        # With libp2p's own DHT p2pd dials whatever addresses its peers tell, private ones too: nothing filters them.
        # But autoRelay does not start without it, and two nodes behind routers do not connect through a relay without.
        "dhtServer": bool(relays) or (network.relay and network.relay_for_others),
        "connManager": True,
        "noListenAddrs": not listen,
        "relay": network.relay,
        "relayService": network.relay and network.relay_for_others,
        "autonat": network.nat,  # and hole punching
        "natPortMap": network.nat,
        "autoRelay": bool(relays),  # without trusted relays it would use those of IPFS
        "relayDiscovery": False,  # with it, trusted relays wait three minutes for discovery
    }
    values = [f"-{name}={value}" for name, value in options.items() if value]
    return values + [f"-{name}={str(value).lower()}" for name, value in switches.items()]


class Ports:
    """The addresses that p2pd listens on; their TCP ports are held, so that no other program can take one meanwhile.

    p2pd may share a held port, because both allow it (SO_REUSEPORT) and belong to one user; another node's test binds
    without it, and fails. A UDP port is not held: our socket would get half of its packets.
    """

    def __init__(self, listen: tuple[str, ...], *, gives_way: bool = False) -> None:
        """Replaces port 0 by a free port, to be kept over restarts; also a port in use, if it `gives_way`: there may be
        several nodes on a machine. ConfigError if we cannot listen on an address."""
        self._held: list[socket.socket] = []
        try:
            self.listen = tuple(self._take(address, gives_way) for address in listen)
        except ConfigError:
            self.close()
            raise

    def take_again(self) -> None:
        """Raises ConfigError if another program has got in: p2pd would share its port."""
        self.close()
        for address in self.listen:
            self._take(address, gives_way=False)

    def close(self) -> None:
        for each in self._held:
            each.close()
        self._held.clear()

    def _take(self, address: str, gives_way: bool) -> str:
        wanted = parse(address)
        is_tcp, is_six = wanted.transport == "tcp", wanted.family == "ip6"
        with ExitStack() as stack:
            family, kind = (socket.AF_INET, socket.AF_INET6)[is_six], (socket.SOCK_DGRAM, socket.SOCK_STREAM)[is_tcp]
            taken = stack.enter_context(socket.socket(family, kind))
            try:
                if is_six:
                    taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as p2pd does
                if is_tcp:
                    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore old connections in TIME_WAIT
                taken.bind((str(wanted.host), wanted.port))
            except OSError as error:
                if gives_way and getattr(error, "errno", 0) == errno.EADDRINUSE:
                    other = self._take(wanted.at_port(0), gives_way=False)
                    logger.info(
                        "port %s is taken, perhaps by another node: this node listens on %s", wanted.port, other
                    )
                    return other
                raise _cannot_listen(address, error) from error
            port = taken.getsockname()[1]
            if is_tcp:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # or another test would succeed
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                stack.pop_all()
                self._held.append(taken)
        return wanted.at_port(port)


def _cannot_listen(address: str, error: Exception) -> ConfigError:
    number, key = getattr(error, "errno", 0) or 0, "network.listen"
    if number == errno.EADDRINUSE:
        fix = "Stop it (perhaps another node of yours), or choose another port"
        return PortTakenError(f"{address} is in use by another program", key=key, fix=fix)
    what, fix = {
        errno.EADDRNOTAVAIL: ("is not an address of this machine", "Use one of its own, or /ip4/0.0.0.0 for all"),
        errno.EACCES: ("needs a port that this user may not open", "Choose a port from 1024 up"),
    }.get(number, (f"cannot be listened on: {error}", "Choose another address"))
    return ConfigError(f"{address} {what}", key=key, fix=fix)
