"""The other machines of a node's owner, some of whose processes are its ranks: how they and the node find each other.

The node listens at one address, which its owner has named, and nowhere else. Whoever connects has some seconds for a
greeting of 192 bytes: both sides send their releases and a random number, and prove by an HMAC over all of that that
they have the token; so neither reads a message of a stranger. Only so many are greeted at a time. What follows is not
encrypted: it belongs on a network of the owner's own.

A machine that lends its devices starts a rank on each, again and again, by torch's agent. It has no data, no identity.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait as ready
from pathlib import Path
from threading import Lock, Thread
from time import monotonic, sleep
from typing import NamedTuple, NoReturn

import msgspec
import torch
from msgspec.structs import replace

from p2ptrain import __version__
from p2ptrain.address import parse
from p2ptrain.capacity import cores
from p2ptrain.config import DeviceConfig, NodeConfig
from p2ptrain.errors import ConfigError
from p2ptrain.files import make_directory, read, write_atomically
from p2ptrain.ranks.channel import RankDone, RankFailed, RankStarted, exactly, hear_answer, hear_order, say
from p2ptrain.ranks.devices import kind_of, own_devices
from p2ptrain.system import KEEP_ALIVE
from p2ptrain.visible import few, one_line

RELEASES = f"p2ptrain {__version__}, torch {torch.__version__}".encode()[:128].ljust(128)
NUMBER_BYTES = PROOF_BYTES = 32
GREETING_SECONDS, GREETED_AT_ONCE = 10.0, 16  # others wait
TOLD_MAX = 100  # connections that the log says were refused, since anybody may open some
NAP_SECONDS, RETRY_SECONDS = 0.2, 5.0
LENDING = "P2PTRAIN_LENDING"  # in the environment of lent ranks, which others do not see as they see a command

log = logging.getLogger("p2ptrain.ranks")


def token_in(directory: Path, settings: DeviceConfig) -> bytes:
    """Returns a node's token, which is made when it is first asked for, and says what its other machines are to run."""
    path = directory / "rendezvous.token"
    if (token := read(path)) is None:
        make_directory(directory)
        write_atomically(path, token := secrets.token_urlsafe(NUMBER_BYTES).encode() + b"\n")
    what = "on your %d other machine(s) run: p2ptrain lend %s (it asks for the token in %s)"
    log.info(what, settings.nnodes - 1, settings.rendezvous, path)
    return token.strip()


def greet(connection: socket.socket, token: bytes, *, is_node: bool) -> None:
    """Raises ConfigError if the other side has another token or release, OSError or EOFError if it gives up."""
    until, ours = monotonic() + GREETING_SECONDS, RELEASES + secrets.token_bytes(NUMBER_BYTES)
    connection.settimeout(GREETING_SECONDS)
    connection.sendall(ours)
    theirs = exactly(connection, len(ours), until)
    said = ours + theirs if is_node else theirs + ours
    proofs = [hmac.digest(token, side + said, "sha256") for side in (b"node", b"lender")]
    connection.sendall(proofs[not is_node])
    if not hmac.compare_digest(exactly(connection, PROOF_BYTES, until), proofs[is_node]):
        raise ConfigError("the other machine has another token", fix="Give `p2ptrain lend` the token of that node")
    if (other := theirs[: len(RELEASES)]) != RELEASES:
        found, own = (each.decode("ascii", "replace").strip() for each in (other, RELEASES))
        raise ConfigError(f"the other machine has {found}, this one {own}", fix="Install the same on both")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def begin(directory: Path, ranks: int, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts ranks, several of them by an agent. They live as long as its standard input."""
    what = ["agent", str(directory), str(ranks)] if ranks > 1 or environment else ["rank", str(directory)]
    own = {name: value for name, value in os.environ.items() if name != "RANK"}  # an agent sets it
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", f"p2ptrain.ranks.{what[0]}", *what[1:]],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment or own, start_new_session=True,
    )  # fmt: skip


def lend_devices(config: NodeConfig, token: bytes) -> NoReturn:
    """Lends this machine's devices until it is interrupted. Raises ConfigError if the node does not take them."""
    devices, place, said = own_devices(config.device), config.device.rendezvous, ""
    threads = max(1, (config.device.threads or cores() - 1) // len(devices))
    lent = RankStarted(0, 0, secrets.token_hex(8), tuple(devices), kind_of(devices[0]), config.plugins.allow, threads)
    environment = {**os.environ, LENDING: msgspec.json.encode((place, token, lent)).decode()}
    while True:
        try:
            _offer(place, token, lent).close()
        except (OSError, EOFError) as error:
            if (why := str(error) or "it ends the connection") != said:
                log.warning("no node takes this machine's devices at %s (%s): trying again", place, why)
            said = why
        else:
            log.info("lending %s to the node at %s", ", ".join(devices), place)
            with tempfile.TemporaryDirectory(prefix="p2ptrain-ranks-") as directory:
                begin(Path(directory), len(devices), environment).wait()
        sleep(RETRY_SECONDS)


def lent_here(rank: int) -> tuple[RankStarted, socket.socket] | None:
    """Connects this process to a node on another machine, if it is a rank that was started for that."""
    if (found := os.environ.get(LENDING)) is None:
        return None
    place, token, lent = msgspec.json.decode(found, type=tuple[str, bytes, RankStarted])
    return lent, _offer(place, token, replace(lent, rank=rank, pid=os.getpid()))


def _offer(place: str, token: bytes, lent: RankStarted) -> socket.socket:
    at = parse(place)
    with ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((str(at.host), at.port), GREETING_SECONDS))
        greet(connection, token, is_node=False)
        say(connection, lent)
        if isinstance(answer := hear_order(connection), RankFailed):
            raise ConfigError(f"the node does not take this machine: {one_line(answer.text, 300)}")
        connection.settimeout(None)
        stack.pop_all()
    return connection


class Guest(NamedTuple):
    """A rank on another machine."""

    lent: RankStarted
    host: str
    connection: socket.socket


class Machines:
    """Those who have come, and wait to take part."""

    def __init__(self, settings: DeviceConfig, token: bytes, kind: str, plugin: str = "") -> None:
        """kind: of devices that can take part; plugin: that their machines' owners have to allow"""
        at, self.others, self._token = parse(settings.rendezvous), settings.nnodes - 1, token
        self._kind, self._plugin = kind, plugin
        family = socket.AF_INET6 if at.family == "ip6" else socket.AF_INET
        self.address = str(at.host)
        try:
            self._listener = socket.create_server((self.address, at.port), family=family)
        except OSError as error:
            fix = "Name an address of this machine, and a port that is free"
            what = f"cannot listen at {at}: {error.strerror}"
            raise ConfigError(what, key="device.rendezvous", fix=fix) from error
        self.place = at.at_port(self._listener.getsockname()[1])
        self._come, self._lock, self._told, self._is_closed = dict[tuple[str, int], Guest](), Lock(), 0, False
        self.missing, self._hosts = 0, set[str]()  # machines that are not there, and where there ever were some
        self._last: set[str] | None = None  # those that took part last; None: before they do for the first time
        for _ in range(GREETED_AT_ONCE):
            Thread(target=self._accept, daemon=True).start()

    def come(self, until: float, check: Callable[[], None]) -> list[Guest]:
        """Waits for all, those of last time, or so long; who is there takes part. It calls `check` between looks."""
        said: bool | None = None
        while True:
            there = self.waiting()
            hosts, names = {each.host for each in there}, {each.lent.machine for each in there}
            is_over = monotonic() > until or (self._last is not None and self._last <= names)
            self.missing = self.others - len(names)
            if self.missing and said is not is_over:
                said, lost = is_over, ", ".join(sorted(self._hosts - hosts))
                what = "%d of %d other machines are not there%s: %s. On each run: p2ptrain lend %s"
                then = "going on without" if is_over else "waiting"
                log.warning(what, self.missing, self.others, lost and f" ({lost})", then, self.place)
            if is_over or not self.missing:
                self._hosts, self._last = self._hosts | hosts, names
                return self.waiting(takes=True)
            check()
            sleep(NAP_SECONDS)

    def waiting(self, *, takes: bool = False) -> list[Guest]:
        """Returns the ranks of those machines of which all have come, and of no more machines than there are to be;
        takes: to take part, so that whoever asks closes their connections"""
        with self._lock:
            for key, each in list(self._come.items()):
                if has_ended(each.connection):
                    self._come.pop(key).connection.close()
            counts = Counter(machine for machine, _ in self._come)
            whole = sorted(it for it, each in self._come.items() if counts[it[0]] == len(each.lent.devices))
            taken = sorted({machine for machine, _ in whole})[: self.others]
            given = self._come.pop if takes else self._come.__getitem__
            return [given(each) for each in whole if each[0] in taken]

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits there
        self._listener.close()
        with self._lock:
            for each in self._come.values():
                each.connection.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:  # it is closed, or too many files are open
                sleep(NAP_SECONDS)
            else:
                self._greet(connection, host)

    def _greet(self, connection: socket.socket, host: str) -> None:
        try:
            greet(connection, self._token, is_node=True)
            lent = hear_answer(connection)
            if not isinstance(lent, RankStarted) or lent.rank not in range(len(lent.devices)):
                raise ConfigError("it names no device of its own")
            why = ""
            if lent.kind != self._kind:
                why = f"its devices ({lent.kind}) are of another kind than the node's ({self._kind})"
            elif self._plugin not in (*lent.plugins, ""):
                why = f"its owner does not allow {self._plugin} there (plugins.allow)"
            if why:
                say(connection, RankFailed(text=why))
                raise ConfigError(why)
            say(connection, RankDone())
            if not lent.pid:
                log.info("%s lends %s", host, few(len(lent.devices), "device", "devices"))
            with self._lock:
                if lent.pid and not self._is_closed:
                    self._come[lent.machine, lent.rank] = Guest(lent, host, connection)
                else:
                    connection.close()
        except (OSError, EOFError, msgspec.MsgspecError, ConfigError) as error:
            connection.close()
            if (count := self._told) < TOLD_MAX:
                self._told = count + 1
                log.warning("refused a connection from %s: %s", host, str(error) or "it did not end its greeting")


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end is closed, where it has nothing to say."""
    try:
        return bool(ready([connection], 0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):  # or it has been closed here
        return True
