"""Starts and stops the p2pd process, keeps its last output, and keeps it running. p2pd never outlives us.

p2pd ends with its last persistent control connection. If we die, however early, the kernel kills it: its standard input
is a socket of ours, and it gets SIGKILL as soon as our end closes. The child has to request that signal itself, and
running Python in a fork of a process with threads may hang; so a small interpreter starts first, requests the signal,
and then executes p2pd. The kernel closes a dead process' files from the highest descriptor down, and peers keep us out
of topics that p2pd leaves for a minute. So our end has a higher descriptor than any subscription.

Ports are taken before p2pd gets them. p2pd sets SO_REUSEPORT, so a second p2pd of the same user would bind a port that
is taken, without an error, and each would receive half of the connections.

It is restarted whenever it ends, however long that takes, and killed if it hangs or if a new one would work better."""

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
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Self

from p2ptrain.address import AddressError, parse
from p2ptrain.config import NetworkConfig
from p2ptrain.errors import ConfigError, DataError, P2ptrainError, PortTakenError
from p2ptrain.files import read, write_atomically
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.control import CONTROL_BYTES_MAX
from p2ptrain.net.tasks import pauses
from p2ptrain.net.transport import TransportError, in_time
from p2ptrain.system import HOLDS_PORTS, Tie, tied_to_us

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
WAIT_SECONDS = 10.0  # for p2pd to come back before a request fails
STEADY_SECONDS = 60.0  # a p2pd that ran this long is restarted without growing pauses
LAUNCH_SECONDS = 60.0  # it takes half a second; requests to p2pd have their own limits, but the DHT's start has none
LOOK_SECONDS = 10.0  # between checks of a p2pd
LOOKS_MAX = 3  # failed checks in a row, of 16 s each: even a busy machine answers within a minute


class Process:
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
        command = tied_to_us(Tie.KILL_WITHOUT_INPUT, [str(binary), *arguments])
        lifeline, its_end = _lifeline()
        async with AsyncExitStack() as stack:
            stack.callback(lifeline.close)
            try:
                with its_end:
                    child = await asyncio.create_subprocess_exec(
                        *command, stdin=its_end.fileno(),
                        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                        start_new_session=True,  # so that Ctrl-C in the terminal reaches only us
                        env={**os.environ, "GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "nocolor"},
                    )  # fmt: skip
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
        systems = "Linux on x86-64 or Arm, or macOS on Arm"
        raise TransportError(f"p2pd is missing: install hivemind's wheel for {systems}, which contains it")
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
    without it, and fails. A UDP port is not held: our socket would get half of its packets. On macOS no port is held.
    """

    def __init__(self, listen: tuple[str, ...], *, gives_way: bool = False, file: Path | None = None) -> None:
        """Replaces port 0 by the port that it had last, by the file, or a free one; also a port in use, if it
        `gives_way`: there may be several nodes on a machine. ConfigError if we cannot listen on an address."""
        self._held: list[socket.socket] = []
        last = _noted(file)
        try:
            self.listen = tuple(self._choose(address, last, gives_way) for address in listen)
        except ConfigError:
            self.close()
            raise
        if file is not None and [*self.listen] != last:
            try:
                write_atomically(file, "".join(f"{each}\n" for each in self.listen).encode())
            except DataError as error:
                logger.warning("%s: the next start may listen on other ports", error)

    def take_again(self) -> None:
        """Raises ConfigError if another program has got in: p2pd would share its port."""
        self.close()
        for address in self.listen:
            self._take(address)

    def close(self) -> None:
        for each in self._held:
            each.close()
        self._held.clear()

    def _choose(self, address: str, last: list[str], gives_way: bool) -> str:
        """Takes the configured port, else the last one, at which its peers look for it, else a free one."""
        wanted = parse(address)
        free = wanted.at_port(0)
        had = [each for each in last if parse(each).at_port(0) == free and each != address]
        tries = [*([address] if wanted.port else []), *had, free]
        for each in tries:
            try:
                taken = self._take(each)
            except PortTakenError:
                if each == free or (wanted.port and not gives_way):
                    raise
                continue
            if each != tries[0]:
                what = "port %s is taken, perhaps by another node: this node listens on %s%s"
                logger.info(what, parse(tries[0]).port, taken, ", as it did last" if each in had else "")
            return taken
        raise AssertionError("the last try takes any port")

    def _take(self, address: str) -> str:
        """Returns the address with the port that was taken. PortTakenError if another program has it."""
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
                raise _cannot_listen(address, error) from error
            port = taken.getsockname()[1]
            if is_tcp:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # or another test would succeed
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if HOLDS_PORTS:
                    stack.pop_all()
                    self._held.append(taken)
        return wanted.at_port(port)


def _noted(file: Path | None) -> list[str]:
    """Returns the addresses that a node listened on last; none of a file that cannot be read."""
    try:
        noted = (read(file) or b"").decode().split() if file is not None else []
        return [str(parse(each)) for each in noted]
    except (DataError, AddressError, UnicodeDecodeError) as error:
        logger.warning("%s: does not tell the ports of the last start: %s", file, error)
        return []


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


class Supervisor:
    """Restarts p2pd forever. `launch` starts and sets up a p2pd, and pushes the cleanup onto the stack."""

    def __init__(
        self, launch: Callable[[AsyncExitStack], Awaitable[Process]], counters: Counter[str], boundary: Boundary
    ) -> None:
        self._launch, self._counters, self._boundary = launch, counters, boundary
        self._session = AsyncExitStack()
        self._is_up = asyncio.Event()
        self._is_closed = False
        self._is_ended = False  # killed by us, and already logged

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    async def start(self) -> None:
        async with AsyncExitStack() as stack:
            async with in_time(LAUNCH_SECONDS, f"p2pd was not ready in {LAUNCH_SECONDS:.0f} s"):
                self.process = await self._launch(stack)
            self._is_up.set()
            stack.callback(self._is_up.clear)
            self._session = stack.pop_all()

    async def run(self) -> None:
        waits, started_at = pauses(), time.monotonic()
        while True:
            status = await self.process.wait()
            if not self._is_ended:
                logger.warning("p2pd ended (status %d) and is being restarted: %s", status, self.process.last_words())
            self._is_ended = False
            with self._boundary.contain("the end of p2pd"):
                await self._session.aclose()
            if time.monotonic() - started_at > STEADY_SECONDS:
                waits = pauses()
            for pause in waits:
                await asyncio.sleep(pause)
                try:
                    with self._boundary.guard("another start of p2pd"):
                        await self.start()
                    break
                except (P2ptrainError, TimeoutError) as error:
                    logger.warning("p2pd cannot be started, will retry: %s", error)
            started_at = time.monotonic()
            self._counters["p2pd restarts"] += 1

    async def watch(self, look: Callable[[], Awaitable[None]], why_end: Callable[[], str]) -> None:
        """Kills a p2pd that hangs, or one for whose end `why_end` gives a reason; `run` then restarts it.

        `look` sends it a request; only a p2pd that hangs leaves several in a row unanswered."""
        failed = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            process, was_up, why = self.process, self.is_up, ""
            with self._boundary.contain("a watch over p2pd"):
                try:
                    await look()
                    failed = 0
                except TransportError as error:
                    logger.debug("cannot ask p2pd for addresses: %s", error)
                    failed, why = failed + 1, f"no answer to {LOOKS_MAX} requests in a row; the last: {error}"
                if not (was_up and self.is_up and process is self.process):
                    failed = 0  # it has ended on its own
                elif reason := why_end() or (why if failed >= LOOKS_MAX else ""):
                    failed = 0
                    self._end(reason)

    def _end(self, why: str) -> None:
        logger.warning("killing p2pd to restart it: %s", why)
        self._is_ended = True
        self.process.kill()

    async def up(self) -> None:
        """Waits for p2pd, though not for long."""
        why = "the network was closed" if self._is_closed else "p2pd is not running; it is being restarted"
        async with in_time(0 if self._is_closed else WAIT_SECONDS, why):
            await self._is_up.wait()

    async def close(self) -> None:
        """Ends p2pd. Call it after `run` has been cancelled."""
        self._is_closed = True
        await self._session.aclose()
