"""The ranks of a node, as its learner sees them: processes that take a round's steps.

A group is started with the learner, and waited for when its first round begins. When a rank has died, hangs or cannot
begin, that round's training is lost and a new group is started at once: with one rank less if its device is gone. All
that a round depends on is the learner's, and changed by `bring_back` alone.

With other machines of the same owner, a group is started when all have come, or after a while with those that have;
one that comes later takes part from the next round on."""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import NoReturn

import msgspec
import numpy as np
import psutil
import torch

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.data.assignment import Positions
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import DataError, DeviceError, MemoryShortError, RanksLostError, StoppedError, TrainingError
from p2ptrain.ranks import channel
from p2ptrain.ranks.channel import RankAnswer, RankFailed, RankStarted, StepTaken, StoreValue
from p2ptrain.ranks.devices import kind_of
from p2ptrain.ranks.machines import NAP_SECONDS, Machines, begin, has_ended
from p2ptrain.train.devices import find_device
from p2ptrain.train.learner import RankFigures
from p2ptrain.train.live import LiveModel, StepResult
from p2ptrain.train.recipes import LocalRecipe, Recipe

TEMPORARY_BYTES_MAX = 60  # with a longer path the socket in it would have no address
WORD_SECONDS = 10.0  # for a message that has begun, or for a process to say who it is
END_SECONDS = 10.0  # for the agent to end its ranks

log = logging.getLogger("p2ptrain.ranks")


@dataclass(frozen=True, slots=True)
class RankWork:
    """The run, settings and data that a node gives to its ranks."""

    run: RunConfig
    settings: DeviceConfig
    data: TokenDataset  # read by the thread that trains
    base: Path | None = None  # the frozen weights, if adapters train
    plugins: tuple[str, ...] = ()
    token: bytes = b""  # that other machines have to have; empty: there are none


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a group is waited for; guesses."""

    machines_seconds: float = 300.0  # until all machines are there, at the start
    again_seconds: float = 60.0  # until those are there again that took part before all ranks were started again
    start_seconds: float = 300.0  # until all ranks are there
    first_step_seconds: float = 900.0  # a model may be compiled in it
    step_seconds_min: float = 60.0
    step_times: float = 10.0  # the slowest step so far


class _Launch:
    """One start of the ranks: their agent, the directory where they meet, and the connections."""

    def __init__(self, ranks: int) -> None:
        usual = Path(tempfile.gettempdir())
        place = usual if len(os.fsencode(usual)) <= TEMPORARY_BYTES_MAX else Path("/tmp")  # noqa: S108
        self.directory = Path(tempfile.mkdtemp(prefix="p2ptrain-ranks-", dir=place))  # for this user alone
        self.connections, self.processes = dict[int, socket.socket](), list[psutil.Process]()
        self.values = dict[str, bytes]()  # by which ranks meet
        with ExitStack() as failed:
            failed.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self.listener = failed.enter_context(socket.socket(socket.AF_UNIX))
            self.listener.bind(str(self.directory / channel.SOCKET_NAME))
            self.listener.listen(ranks)
            self.listener.settimeout(NAP_SECONDS)
            self.agent = begin(self.directory, ranks)  # or the one rank itself
            failed.pop_all()

    def end(self) -> None:
        """Ends all of its processes, also those that hang."""
        for process in self.processes:
            with suppress(psutil.Error):
                process.kill()
        for each in (self.listener, *self.connections.values()):
            each.close()
        self.connections.clear()
        try:
            self.agent.communicate(timeout=END_SECONDS)  # closes what it lives by
        except subprocess.TimeoutExpired:
            self.agent.kill()
            self.agent.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class RankGroup:
    """Takes a learner's steps in processes of their own, one for each of these devices, and of other machines'."""

    def __init__(
        self, work: RankWork, devices: Sequence[str], live: LiveModel, recipe: Recipe, patience: Patience = Patience()
    ) -> None:
        self._work, self._live, self._recipe, self._patience, self._own = work, live, recipe, patience, [*devices]
        _, is_half = find_device(work.settings.model_copy(update={"name": devices[0]}))
        self._settings = work.settings.model_copy(update={"autocast": "bf16" if is_half else "off"})  # alike in all
        self._memory = channel.RoundMemory(live, recipe.inner if isinstance(recipe, LocalRecipe) else None)
        self._begun: channel.BeginSteps | None = None  # the round; None: its steps were lost
        self._steps = self.kept = 0
        self._is_stopped = self._is_closed = False
        self._ending = Lock()  # of a launch: the node may end while a round is trained
        self.machines: Machines | None = None
        if work.token:
            self.machines = Machines(work.settings, work.token, kind_of(devices[0]), work.run.model.plugin)
        self._start(patience.machines_seconds)

    def _start(self, patience_seconds: float) -> None:
        """Starts the ranks on this machine."""
        self._slowest_seconds, self._waits_until = 0.0, monotonic() + patience_seconds
        self.figures = [RankFigures(each, 0, 0, 0, 0.0) for each in self._own]
        try:
            self._launch = _Launch(len(self._own))
        except OSError as error:  # no room, memory or process is left: the next round tries again
            raise RanksLostError(f"ranks cannot be started: {error}") from error

    def wait(self) -> bool:
        self._begun, self._steps, self.kept = None, 0, 0
        there, machines = self._launch.connections, self.machines
        has_come = machines is not None and machines.missing > 0 and bool(machines.waiting())
        if len(there) == len(self.figures) and not has_come and not any(map(has_ended, [*there.values()])):
            return False
        if there:  # one has died since the last round, or a machine has come
            self._start_again()
        with self._lost_if_it_fails():
            self._meet()
        return True

    def begin(self, number: int, place: int) -> None:
        rate = self._recipe.rate if isinstance(self._recipe, LocalRecipe) else 0.0
        threads = max(1, torch.get_num_threads() // len(self._own))
        self._begun = channel.BeginSteps(number, place, rate, threads, self._live.sequences_per_pass)
        for each in self.figures:
            each.tokens, each.seconds = 0, 0.0
        self.hand_out()

    def hand_out(self) -> None:
        assert self._begun is not None, "a round has begun"
        for place, own in self._memory.given:
            place.copy_(own)
        is_spread, patience = len(self.figures) > len(self._own), self._patience
        self._ask([self._begun], patience.first_step_seconds if is_spread else patience.step_seconds_min)

    def step(self, step: int, positions: Positions) -> StepResult:
        patience, live, began = self._patience, self._live, monotonic()
        usual = max(patience.step_seconds_min, patience.step_times * self._slowest_seconds)
        seconds = usual if self._slowest_seconds else patience.first_step_seconds
        rows = self._work.data.batch(positions, self._work.run.model.sequence_length).astype(np.int32)
        parts = np.array_split(rows, len(self.figures))
        answers = self._ask([channel.TakeStep(step, positions.tolist(), each.tobytes()) for each in parts], seconds)
        if failed := [each for each in answers if isinstance(each, RankFailed)]:
            self._fail(next((each for each in failed if each.kind), failed[0]), step, positions)
        self._steps += 1
        self._slowest_seconds = max(self._slowest_seconds, monotonic() - began)
        taken = [each for each in answers if isinstance(each, StepTaken)]
        for rank, each in zip(self.figures, taken, strict=True):
            rank.memory_bytes = each.memory_bytes
            rank.tokens += each.own_tokens
            rank.seconds += each.own_seconds
        live.set_sequences_per_pass(min(filter(None, (each.sequences_per_pass for each in taken)), default=0))
        return StepResult(taken[0].loss, taken[0].tokens, taken[0].gradient_norm, taken[0].learned)

    def _fail(self, failed: RankFailed, step: int, positions: Positions) -> NoReturn:
        """Raises the error that a learner sees; starts all ranks again where they cannot go on."""
        if (is_short := failed.kind == MemoryShortError.__name__) and failed.sequences_per_pass:
            log.warning("a rank ran out of memory: going on with %d sequences per pass", failed.sequences_per_pass)
            self._live.set_sequences_per_pass(failed.sequences_per_pass)
        if failed.leaves_others or failed.kind == DeviceError.__name__:
            with self._lost_if_it_fails():
                raise RanksLostError(failed.text)
        if failed.kind == TrainingError.__name__:
            raise TrainingError(failed.text, step=step, positions=positions.tolist())
        raise (MemoryShortError if is_short else DataError)(failed.text)

    def bring_back(self) -> None:
        if self._begun is not None:
            self._ask([channel.BringBack()], self._patience.step_seconds_min)
            for place, own in self._memory.made:
                own.copy_(place)
            self.kept = self._steps

    @property
    def pids(self) -> list[int]:
        """The processes of its agent and of all ranks on this machine that have begun."""
        return [self._launch.agent.pid, *(each.pid for each in self._launch.processes)]

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        self._is_stopped = self._is_closed = True
        if self.machines is not None:
            self.machines.close()  # first: the run that follows may listen at the same port
        with self._ending:
            self._launch.end()

    def _start_again(self) -> None:
        with self._ending:
            self._launch.end()
            if self._is_stopped:
                raise StoppedError("the node ends")
            self._start(self._patience.again_seconds)

    @contextmanager
    def _lost_if_it_fails(self) -> Iterator[None]:
        """Starts the ranks again if they are lost inside the block."""
        try:
            yield
        except (OSError, EOFError, psutil.Error, RanksLostError) as error:
            self._begun = None
            self._start_again()
            how_many = "all" if self.machines else len(self.figures)
            raise RanksLostError(f"{error}; {how_many} ranks are started again") from error

    def _meet(self) -> None:
        """Waits for all ranks, and gives them their work."""
        launch = self._launch
        if self.machines is not None:
            guests = self.machines.come(self._waits_until, lambda: self._check(inf, is_starting=True))
            self.figures += [RankFigures(f"{it.devices[it.rank]} at {host}", 0, 0, 0, 0.0) for it, host, _ in guests]
            for rank, (lent, _, connection) in enumerate(guests, start=len(self._own)):
                self._welcome(connection, rank, lent.pid)
        is_near, patience = len(self.figures) == len(self._own), self._patience  # weights travel to other machines
        until = monotonic() + (patience.start_seconds if is_near else patience.first_step_seconds)
        while len(launch.connections) < len(self.figures):
            self._check(until, launch.connections, is_starting=True)
            with suppress(TimeoutError):
                connection, _ = launch.listener.accept()
                connection.settimeout(WORD_SECONDS)
                started = channel.hear_answer(connection)
                assert isinstance(started, RankStarted), "our own process"
                launch.processes.append(psutil.Process(started.pid))
                socket.send_fds(connection, [b"\0"], [self._memory.descriptor])
                self._welcome(connection, started.rank, started.pid)
        for rank, each in self._gather(until, is_starting=True).items():
            if isinstance(each, RankFailed):
                why = f"{self._name(rank)} cannot begin: {each.text}"
                if each.kind == DeviceError.__name__ and rank < len(self._own) > 1:
                    log.warning("%s. Going on without it", why)
                    del self._own[rank]
                raise RanksLostError(why)

    def _welcome(self, connection: socket.socket, rank: int, pid: int) -> None:
        """Gives a rank its work."""
        connection.settimeout(WORD_SECONDS)
        self._launch.connections[rank], self.figures[rank].pid = connection, pid
        work, ranks = self._work, len(self.figures)
        address = self.machines.address if self.machines and ranks > len(self._own) else ""
        settings, base = self._settings.model_dump_json(exclude_defaults=True).encode(), str(work.base or "")
        where = rank, ranks, address, work.run.canonical(), settings, self.figures[rank].device
        channel.say(connection, channel.RankJob(*where, self._live.packing, base, work.plugins))

    def _ask(self, orders: Sequence[channel.Order], seconds: float) -> list[RankAnswer]:
        """Asks all ranks, with one order or one for each, and returns their answers in their order."""
        with self._lost_if_it_fails():
            for rank, each in list(self._launch.connections.items()):
                try:
                    channel.say(each, orders[rank % len(orders)])
                except OSError as error:
                    raise RanksLostError(f"{self._name(rank)} has ended") from error
            return [answer for _, answer in sorted(self._gather(monotonic() + seconds).items())]

    def _gather(self, until: float, *, is_starting: bool = False) -> dict[int, RankAnswer]:
        """Returns the answers of all ranks; while they start, those until the first that cannot."""
        answers, values = dict[int, RankAnswer](), self._launch.values
        with selectors.DefaultSelector() as selector:
            with self._ending:  # which another thread may do from now on
                there = {**self._launch.connections}
                for rank, connection in there.items():
                    selector.register(connection, selectors.EVENT_READ, rank)
            while len(answers) < len(there):
                self._check(until, answers, is_starting=is_starting)
                for key, _ in selector.select(NAP_SECONDS):
                    rank, connection = key.data, there[key.data]
                    try:
                        if isinstance(answer := channel.hear_answer(connection), StoreValue):
                            if answer.value is not None:
                                values[answer.key] = answer.value
                            channel.say(connection, StoreValue(answer.key, values.get(answer.key)))
                            continue
                    except (OSError, EOFError, msgspec.MsgspecError) as error:
                        raise RanksLostError(f"{self._name(rank)} has ended") from error
                    selector.unregister(connection)
                    answers[rank] = answer
                    if isinstance(answer, RankFailed) and (is_starting or answer.leaves_others):
                        return answers
        self._check(inf, is_starting=is_starting)  # if it has been closed, none was there
        return answers

    def _check(self, until: float, heard: Collection[int] = (), *, is_starting: bool) -> None:
        """Raises an error if ranks are not to be waited for any longer."""
        if self._is_closed or (is_starting and self._is_stopped):
            raise StoppedError("the node ends")
        if is_starting and self._launch.agent.poll() is not None:
            raise RanksLostError("the ranks have ended before they began")
        if monotonic() > until:
            silent = ", ".join(self._name(rank) for rank in range(len(self.figures)) if rank not in heard)
            raise RanksLostError(f"no answer in time from {silent}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.figures[rank].device}, process {self.figures[rank].pid})"
