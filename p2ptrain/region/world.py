"""A region's node in two runs: a worker that trains from what the world has agreed on (shift.py) and says so, and the
link to its world node: a second node, in a process of its own as a script's is, which takes part in the world's run.

The world node votes, checks and applies as all of that run's do, whoever contributes for the region. This side hears
from it what the world has agreed on, and has it contribute the region's movement when it is this node's turn. While it
cannot take part there, the region goes on by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import sample
from subprocess import Popen, TimeoutExpired
from time import monotonic, perf_counter

import msgspec
from torch import Tensor

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.core.messages import author_of
from p2ptrain.errors import DataError, PassedError, RemoteProtocolError
from p2ptrain.exact.outer import Tail
from p2ptrain.loop import channel
from p2ptrain.loop.channel import Begin, Memory, NodeAnswer, ScriptRequest
from p2ptrain.models.kinds import NamedShapes, named_shapes
from p2ptrain.net import questions
from p2ptrain.net.addresses import Reach, is_within, name_in, split
from p2ptrain.net.transport import TransportError
from p2ptrain.node.edges import Edges
from p2ptrain.node.home import Home
from p2ptrain.node.local_worker import LearnerThread, LocalWorker, Note
from p2ptrain.node.work import Base, Done, Task, Upstream
from p2ptrain.region.shift import Region, World

AWAY_SECONDS = 60.0  # without the world's run, until the node says so
DIRECTORY = "world"  # of the world node, within this one's
ASKED, TOLD = 8, 4  # members of the region that are asked for addresses of the world's run; addresses of each
ASK_SECONDS, LOOK_SECONDS = 30.0, 0.5  # for one of them to be there and to know one; between looks
JOIN_SECONDS, SILENT_SECONDS = 600.0, 90.0  # without a word of the world node, until it is started again; guesses
RETRY_SECONDS, RETRY_SECONDS_MAX = 5.0, 300.0  # between tries to take part there, each twice the last; a guess
LIMITS = ("upload_bytes_per_second", "download_bytes_per_second", "memory_bytes", "disk_bytes", "nice")


class RegionWorker(LocalWorker):
    """A worker whose run is a region; `contribute` passes a movement on to the world's run."""

    def __init__(
        self,
        thread: LearnerThread,
        me: bytes,
        note: Note,
        region: Region,
        world_run: str,
        contribute: Callable[[Tensor], None],
    ) -> None:
        super().__init__(thread, me, note)
        self.can_overlap = False
        self.region, self._world_run, self._contribute = region, world_run, contribute
        self.contributions = 0  # to the world, by this node
        self.addresses: tuple[str, ...] = ()  # at which this node takes part in the world's run
        self._lost = monotonic(), "not joined yet"  # the world's run
        self._is_known = asyncio.Event()  # the world; a region that begins would train in vain before

    def hear(self, world: World) -> None:
        self.region.hear(world)
        self._is_known.set()

    def lose(self, why: str) -> None:
        self._lost = monotonic() if self.region.is_followed else self._lost[0], why
        self.region.lose()

    def meet(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses

    def contributed(self) -> None:
        self.contributions += 1

    @property
    def upstream(self) -> Upstream:  # type: ignore[override]  # nothing sets that of a worker
        return Upstream(self._world_run, self.region.world_round, self.contributions, self.addresses)

    @property
    def complaints(self) -> list[Complaint]:
        """The world's absence, once it has lasted."""
        since, why = self._lost
        is_told = not self.region.is_followed and monotonic() - since >= AWAY_SECONDS
        return [complaint(Code.WORLD_AWAY, why=why)] if is_told else []

    async def train(self, task: Task) -> Done:
        if not self.replica.round:
            await self._is_known.wait()
            if self.replica.round + 1 != task.round:  # rounds have passed that let others in
                raise PassedError("the world was not known yet")
        return await super().train(replace(task, shift=self))

    def begin(self, number: int, weights: Tensor) -> Tensor | None:
        return self.region.begin(number, weights)

    def end(self, number: int) -> bytes:
        with self.replica.lock:  # as `begin` and `moved` do
            self.region.offer(number)
            return self.region.tail.encoded()

    def moved(self, base: Base) -> None:
        if base.payloads is None:
            self.region.forget()
        else:
            tails = {author_of(payload): Tail.of(payload) for payload in base.payloads}
            shift = self.region.applied(base.round, tails, base.weights)
            if shift is not None:
                self._contribute(shift)
        super().moved(base)


log = logging.getLogger("p2ptrain.daemon")
_DECODER = msgspec.msgpack.Decoder(NodeAnswer)


@dataclass(slots=True)
class Session:
    writer: asyncio.StreamWriter
    memory: Memory
    steps: int = 0  # of a round of the world; 0: it takes no part yet
    round: int = 0  # of the world, which it trains or trained last
    since: float | None = None  # when that was heard of; None: it trains none
    has_heard: bool = False  # of the world's weights
    sent: tuple[int, Tensor] | None = None  # the request that contributes, and what; None: it has been carried out
    asked: int = 0

    def ask(self, request: channel.Request) -> int:
        self.asked += 1
        self.writer.write(channel.framed(ScriptRequest(self.asked, request)))
        return self.asked


class WorldLink:
    def __init__(self, run: RunConfig, config: NodeConfig, me: bytes) -> None:
        self._run, self._config = run, config
        self._shapes = named_shapes(run.model)
        round_reach = run.recipe.local_steps * float(run.recipe.inner_learning_rate)
        self._region = Region(me, run.world.rounds, round_reach)
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._made: RegionWorker | None = None
        self._unsent: Tensor | None = None  # what the region has moved, and could not be contributed yet
        self._given: tuple[int, Tensor] | None = None  # what was contributed last, and to which round of the world

    @asynccontextmanager
    async def attached(self, edges: Edges) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._live(edges), name="the world's run")
            yield
            task.cancel()

    def worker(self, thread: LearnerThread, me: bytes, note: Note) -> RegionWorker:
        def moved(by: Tensor) -> None:  # in the replica's thread
            self._loop.call_soon_threadsafe(self.contribute, by)

        self._made = RegionWorker(thread, me, note, self._region, self._run.world.run, moved)
        return self._made

    @property
    def _worker(self) -> RegionWorker:
        assert self._made is not None, "it is made before the node is"
        return self._made

    def contribute(self, moved: Tensor | None = None) -> None:
        """Has the world node contribute what the region has moved: now, or to the next round that it trains."""
        if moved is not None:
            self._keep(moved)
        session = self._session
        if self._unsent is None or session is None or session.since is None:
            return
        session.memory.moved.copy_(self._unsent)
        trained = channel.RoundTrained(session.steps, self._worker.figures.loss, 0, perf_counter() - session.since)
        session.sent, session.since, self._unsent = (session.ask(trained), self._unsent), None, None

    def _keep(self, moved: Tensor) -> None:
        self._unsent = moved if self._unsent is None else self._unsent + moved

    # -- The world node -----------------------------------------------------------------------------

    async def _live(self, edges: Edges) -> None:
        wait = RETRY_SECONDS
        while True:
            try:
                await self._take_part(edges)
            except (DataError, OSError, msgspec.DecodeError) as error:
                wait = RETRY_SECONDS if self._region.is_followed else wait
                log.warning("not in the world's run; trying again in %.0f s: %s", wait, error)
                self._worker.lose(str(error))
            await asyncio.sleep(wait)
            wait = min(2 * wait, RETRY_SECONDS_MAX)

    async def _take_part(self, edges: Edges) -> None:
        """Runs the world node, and listens to it until it ends, which raises DataError."""
        directory = Home(self._config).directory / DIRECTORY
        met = self._config.region.bootstrap or await self._ask_around(edges)
        until = perf_counter() + ASK_SECONDS
        while not met and not directory.exists():
            if perf_counter() > until:
                raise DataError("no node of the region has told an address of the world's run; set region.bootstrap")
            await asyncio.sleep(LOOK_SECONDS)
            met = await self._ask_around(edges)
        process, ours, memory = channel.spawn_node(self._shapes, directory)
        reader, writer = await asyncio.open_connection(sock=ours)
        self._session = session = Session(writer, memory)
        try:
            first = _begin(self._run, self._config, self._shapes, directory, met)
            writer.write(channel.framed(ScriptRequest(0, first)))
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    async with asyncio.timeout(SILENT_SECONDS if session.steps else JOIN_SECONDS):
                        answered = _DECODER.decode(await channel.read_frame(reader))
                    self.hear(answered, session)
            raise DataError(f"the world node has ended; {directory / channel.LOG_NAME} says why")
        except TimeoutError as error:
            what = "the world node does not answer, or finds nobody at the addresses that it was told"
            raise DataError(what) from error
        finally:
            if session.sent is not None:
                self._keep(session.sent[1])
            self._session = None
            writer.close()
            await asyncio.shield(asyncio.to_thread(_end, process))

    async def _ask_around(self, edges: Edges) -> tuple[str, ...]:
        """Asks some of the region's members for addresses of the world's run."""
        found: dict[str, None] = {}
        members = [peer for peer in edges.connections.linked if edges.view.is_in(peer)]
        for peer in sample(members, min(ASKED, len(members))):
            with suppress(TransportError, RemoteProtocolError), edges.transport.boundary.guard("the world's run", peer):
                told = await questions.ask_peers(edges.transport, peer, bytes.fromhex(self._run.world.run))
                met = edges.connections.met.get(peer, Reach.PUBLIC)
                numbers = [each for each in told.addresses if not name_in(each)]  # names are not even read
                found |= dict.fromkeys([each for each in numbers if _is_address(each) and is_within(each, met)][:TOLD])
        return tuple(found)

    def hear(self, answered: NodeAnswer, session: Session) -> None:
        contributed = session.sent is not None and answered.number == session.sent[0]
        match answered.body:
            case channel.NodeReady(steps=steps, addresses=addresses):
                session.steps = steps
                session.ask(channel.NextRound())
                self._worker.meet(addresses[:TOLD])
                self._worker.lose("the world node has joined, and waits for others")
            case channel.NodeNote(text=text, is_trouble=is_trouble):
                if is_trouble or not session.has_heard:
                    self._worker.lose(text)
                else:
                    self._region.follow()
            case channel.RoundToTrain(number, base):
                is_another = not session.round  # than the process that took what was given last
                session.round, session.since, session.has_heard = number, perf_counter(), True
                if is_another and self._given is not None and number <= self._given[0]:  # which ended before it was out
                    self._keep(self._given[1])
                self._given = None
                self._worker.hear(World(base, session.memory.base.clone()))
                session.ask(channel.NextRound(base))
                self.contribute()
            case channel.CarriedOut() if contributed and session.sent is not None:
                self._given, session.sent = (session.round, session.sent[1]), None
                self._worker.contributed()
                log.info("contributed to the world for the region")
            case channel.NodeFailed() if contributed and session.sent is not None:  # the round has passed
                self._keep(session.sent[1])
                session.sent = None
            case channel.NodeFailed(text=text):
                raise DataError(text)


def _is_address(text: str) -> bool:
    try:
        split(text)
    except TransportError:
        return False
    return True


def _begin(run: RunConfig, config: NodeConfig, shapes: NamedShapes, directory: Path, met: Sequence[str]) -> Begin:
    """Returns what the world node is to do: it has this node's limits, and a key, an address and a log of its own."""
    own = config.region
    options = {f"limits.{name}": getattr(config.limits, name) for name in LIMITS}
    options |= {f"network.{name}": getattr(config.network, name) for name in ("nat", "relay", "relay_for_others")}
    options |= {
        "network.listen": list(own.listen), "network.announce": [], "network.bootstrap": list(met),
        "network.trusted_relays": [], "network.run": "", "identity.file": "", "http.enabled": False,
        "storage.directory": str(directory), "storage.own_data": "", "tracking.tensorboard": "", "tracking.wandb": "",
        "logging.level": config.logging.level, "device.threads": 1,
    }  # fmt: skip
    return Begin(
        joins=True, run={}, options=options, parameters=shapes, wanted=run.world.run, invitation=own.invitation,
        reads_data=False,
    )  # fmt: skip


def _end(process: Popen[bytes]) -> None:
    """Waits until the world node has left and saved, and kills it if it does not."""
    try:
        process.wait(channel.LEAVE_SECONDS)
    except TimeoutExpired:
        process.kill()
        process.wait()
