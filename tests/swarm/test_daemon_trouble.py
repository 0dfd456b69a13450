"""Real daemons in trouble: a flood of messages, a read-only directory, ten minutes of sleep."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from p2ptrain.config.node import NetworkConfig
from p2ptrain.core.messages import Hello, encode, signed_bytes
from p2ptrain.identity import Identity, peer_id_of
from p2ptrain.net.connections import topic_of
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.mailbox import Deliver, frames_of
from p2ptrain.net.transport import TransportError
from p2ptrain.node.intake import DROPPED_OF_STRANGERS
from tests.helpers.daemons import LISTEN, SECONDS, TEST_SECONDS, DaemonSwarm, StartableDaemon, swarm_in

ROUNDS = 3  # that the others go on before something else happens
FLOOD = 4_096  # messages, in gossip and again to one peer: sixteen times that peer's share of the queue of events
SILENT_LOOKS = 20  # at a node that says nothing
ASLEEP_SECONDS = 600.0

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[DaemonSwarm]:
    with swarm_in(tmp_path) as swarm:
        yield swarm
        assert swarm.compared() > ROUNDS


def goes_on(*nodes: StartableDaemon) -> None:
    """Waits until all of them have applied some more rounds."""
    for node, number in [(node, node.applied + ROUNDS) for node in nodes]:
        node.until_applied(number)


def said(status: dict[str, Any]) -> int:
    """Returns how many messages a node has sent, by stream or by gossip."""
    return int(status["counters"].get("sent", 0) + status["bytes"].get("gossip sent", 0))


def is_silent(node: StartableDaemon) -> Callable[[], bool]:
    """Whether the node has sent nothing for a while."""
    seen: deque[int] = deque(maxlen=SILENT_LOOKS)

    def look() -> bool:
        seen.append(said(node.status()))
        return seen.count(seen[-1]) == SILENT_LOOKS

    return look


def dropped(node: StartableDaemon, what: str = DROPPED_OF_STRANGERS) -> int:
    return int(node.status().get("counters", {}).get(what, 0))


# ---------------------------------------------------------------------------------------------------
# A flood


class Flooder:
    """A peer outside the run that sends well-formed but useless messages as fast as it can."""

    def __init__(self, identity: Identity, transport: P2pd, run_id: bytes) -> None:
        self.identity, self.transport, self.run_id = identity, transport, run_id
        self.envelopes = [self.hello(number) for number in range(FLOOD)]

    def hello(self, number: int) -> bytes:
        at = Hello(self.run_id, number, 0, b"", b"", b"", b"", False, self.identity.key)
        return encode(at, self.identity.sign(signed_bytes(self.run_id, at)))

    async def gossip(self) -> None:
        for first in range(0, FLOOD, 8):
            await asyncio.gather(
                *(self.transport.publish(topic_of(self.run_id), each) for each in self.envelopes[first : first + 8])
            )

    async def deliver(self, peer: bytes) -> None:
        """Sends to one peer for as long as it listens."""
        try:
            stream = await self.transport.open(peer, f"/p2ptrain/2/{self.run_id.hex()}/line")
            for frame in frames_of(Deliver(tuple(self.envelopes))):
                await stream.send(frame)
            await stream.close()
        except TransportError:
            return  # the peer has had enough


@asynccontextmanager
async def flooder(swarm: DaemonSwarm, address: str, run_id: bytes) -> AsyncIterator[tuple[Flooder, bytes]]:
    """Connects a flooder to the node at this address. Yields it and the node's key."""
    key = swarm.directory / "flooder.key"
    with tempfile.TemporaryDirectory(prefix="p2p-") as runtime:
        identity = Identity.make(key)
        transport = await P2pd.start(key, NetworkConfig(listen=(LISTEN,), nat=False), Path(runtime))
        try:
            yield Flooder(identity, transport, run_id), await transport.connect(address)
        finally:
            await transport.close()


async def test_who_is_flooded_drops_and_counts_and_goes_on_with_the_others(swarm: DaemonSwarm) -> None:
    first, second, third = swarm.of(3)
    run_id = bytes.fromhex(third.ask()["run_id"])
    before = dropped(first), dropped(second)  # a newcomer may speak before it is known here to be admitted
    async with flooder(swarm, third.address, run_id) as (source, peer):
        third.stop()  # so that much of it comes at once
        flood = asyncio.gather(source.gossip(), source.deliver(peer))
        await asyncio.to_thread(goes_on, first, second)
        third.cont()
        woke_at, number = monotonic(), first.applied
        await asyncio.to_thread(third.until, lambda: dropped(third) > 0)
        await flood
        await asyncio.to_thread(third.until_applied, number)
        swarm.note("caught up after a flood", monotonic() - woke_at)
        await asyncio.to_thread(goes_on, first, second, third)
    name = peer_id_of(source.identity.key)
    status = third.status()
    assert (status["is_member"], len(status["peers"]), status["bytes"]["p2pd restarts"]) == (True, 2, 0)
    assert name not in status["peers"]
    assert "flooding" not in status["observed"]  # points on throw-away keys are worth nothing
    assert (dropped(third, "events dropped"), name in third.text) == (0, False)
    assert {each for each in ("root mismatches", "lies proved") if status["counters"].get(each)} == set()
    assert (dropped(first), dropped(second)) == before


# ---------------------------------------------------------------------------------------------------
# A directory that takes nothing


class ReadOnly:
    """Makes a directory read-only for a daemon, except for files already open, and writable again.

    By its mode; where that stops nobody, as with root, the daemon gets a mount namespace, in which the directory is
    mounted over itself.
    """

    def __init__(self, place: Path) -> None:
        place.mkdir(mode=0o500)
        self.is_by_mode = not _takes_files(place)
        self.prefix = () if self.is_by_mode else ("unshare", "--mount", "--propagation", "private")
        self.why_impossible = ""
        if not self.is_by_mode:
            try:
                done = subprocess.run([*self.prefix, *_over(place)], capture_output=True, text=True, check=False)
                self.why_impossible = done.stderr.strip()
            except OSError as error:
                self.why_impossible = str(error)

    def at_start(self, node: StartableDaemon) -> None:
        node.directory.mkdir(exist_ok=True)
        if self.is_by_mode:
            node.directory.chmod(0o500)
        else:
            node.prefix = (*self.prefix, *_over(node.directory, 'exec "$@"'))

    def close(self, node: StartableDaemon) -> None:
        """Makes the directory read-only while the daemon runs."""
        if self.is_by_mode:
            self._chmod(node, 0o500)
        else:
            self._inside(node, *_over(node.directory))

    def open(self, node: StartableDaemon) -> None:
        if self.is_by_mode:
            self._chmod(node, 0o700)
        else:
            self._inside(node, "umount", str(node.directory))

    def _inside(self, node: StartableDaemon, *command: str) -> None:
        subprocess.run(["nsenter", "--mount", "--target", str(node.pid), *command], check=True)

    def _chmod(self, node: StartableDaemon, mode: int) -> None:
        for each in (node.directory, *(path for path in node.directory.rglob("*") if path.is_dir())):
            each.chmod(mode)

    @property
    def reason(self) -> str:
        return os.strerror(errno.EACCES if self.is_by_mode else errno.EROFS)


def _takes_files(directory: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _over(directory: Path, then: str = "true") -> tuple[str, ...]:
    """Mounts the directory over itself, read-only from the start: a file that is opened for writing in between
    would keep it writable ("mount point is busy")."""
    aside = directory.with_name(f"{directory.name} read-only")
    mounts = (
        f'mkdir -p "{aside}"',
        f'mount --bind "{directory}" "{aside}"',
        f'mount -o remount,bind,ro "{aside}"',
        f'mount --bind "{aside}" "{directory}"',
        f'umount "{aside}"',
    )
    return ("sh", "-c", " && ".join([*mounts, then]), "sh")


@pytest.fixture
def read_only(tmp_path: Path) -> ReadOnly:
    read_only = ReadOnly(tmp_path / "try")
    if read_only.why_impossible:
        pytest.skip(f"no directory can be made read-only here: {read_only.why_impossible}")
    return read_only


def test_a_read_only_directory_is_named_at_the_start(tmp_path: Path, read_only: ReadOnly) -> None:
    with swarm_in(tmp_path) as swarm:
        used, new = swarm.first(), swarm.first("new")
        used.start().until_up().kill()
        for node in (used, new):
            read_only.at_start(node)
            before = len(node.text) if node.log.exists() else 0
            assert node.start().until_ended() == 2
            fix = "Choose another with --data-dir"
            told = f"{node.directory}: storage.directory: cannot be written: {read_only.reason}. {fix}"
            assert node.text[before:] == f"{told}\n"


def test_a_directory_that_becomes_read_only_degrades_one_node_and_stops_no_other(
    swarm: DaemonSwarm, read_only: ReadOnly
) -> None:
    first = swarm.first().start().until_up()
    second, victim = (swarm.joiner(name, first.address) for name in ("second", "victim"))
    victim.prefix = read_only.prefix
    for node in (second.start(), victim.start(), first):
        node.until(lambda node=node: len(node.status().get("roster", ())) == 3)

    read_only.close(victim)
    victim.until(lambda: is_degraded(victim))
    victim.until_says(f"({read_only.reason}). Let this user write there, or choose another place; the node sends and")
    victim.until(is_silent(victim))  # what was saved before may be on its way
    before = victim.status()
    goes_on(first, second)
    after = victim.status()
    assert after["applied_round"] == before["applied_round"] <= first.applied - ROUNDS
    assert said(after) == said(before)
    assert len(after["peers"]) == 2
    assert not any(map(is_degraded, (first, second)))

    read_only.open(victim)
    opened_at, number = monotonic(), first.applied
    victim.until(lambda: victim.applied >= number and victim.is_member)
    swarm.note("caught up after its directory could be written again", monotonic() - opened_at)
    victim.until_says("the disk can be written again")
    goes_on(first, second, victim)
    victim.until(lambda: not is_degraded(victim))


def is_degraded(node: StartableDaemon) -> bool:
    return any(complaint.startswith("degraded: ") for complaint in node.status()["health"])


# ---------------------------------------------------------------------------------------------------
# Sleep


@pytest.mark.slow
@pytest.mark.timeout(ASLEEP_SECONDS + TEST_SECONDS)
def test_a_laptop_asleep_for_ten_minutes_catches_up(swarm: DaemonSwarm) -> None:
    first, second, laptop = swarm.of(3)
    network = laptop.p2pd  # which sleeps as well
    laptop.stop()
    network.suspend()
    asleep_since, number = monotonic(), first.applied
    first.until(lambda: len(first.status()["roster"]) == 2)
    first.until(lambda: monotonic() > asleep_since + ASLEEP_SECONDS, ASLEEP_SECONDS + SECONDS, look=1.0)
    slept, number = first.applied - number, first.applied
    network.resume()
    laptop.cont()
    woke_at = monotonic()
    laptop.until(lambda: laptop.applied >= number and laptop.is_member)
    swarm.note(f"caught up with {slept} rounds after {ASLEEP_SECONDS:.0f} s of sleep", monotonic() - woke_at)
    goes_on(first, second, laptop)
    name = laptop.ask()["peer_id"]
    for node, said in (
        (laptop, ("nothing ran for ", "adopted the state of round ")),
        # The log compares what was agreed once a second: of itself it may say nothing, and here it comes later.
        (first, (f"{name} lost a seat or left: 2 members", f"{name} got a seat: 3 members")),
    ):
        node.until(lambda node=node, said=said: 0 < node.text.rfind(said[0]) < node.text.rfind(said[1]))
