"""Runs daemons as processes on loopback, each with its own p2pd.

They are started with the commands that a person types and asked as `p2ptrain status` asks. Whatever they say about a
round's root is collected, and has to be the same of all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from p2ptrain.errors import P2ptrainError
from p2ptrain.node.control import ask
from tests.helpers.nursery import Born, born

TINY_MODEL = """\
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 1
ffn_dim = 64
sequence_length = 64
"""
# A round takes a sixth of a second of one core; three nodes are a swarm that goes on when one is missing. What comes
# late may still be taken: the cores are shared, and a newcomer's seat should not be a matter of luck.
RUN = f"""\
name = "{{name}}"

{TINY_MODEL}
[recipe]
name = "distro"
k = 8
sequences_per_pass = 8
passes_per_step = 8
learning_rate = 0.002

[agreement]
staleness_rounds_max = 1
stall_seconds = 10
settle_seconds = 2

[admission]
probation_rounds = 1
"""
# Likewise, for other runs than that.
AGREEMENT = """\
[agreement]
staleness_rounds_max = 1

[admission]
probation_rounds = 1
"""
MANY_STEPS = f"""\
name = "many-steps"

{TINY_MODEL}
[recipe]
local_steps = 24
sequences_per_pass = 8
k = 16

{AGREEMENT}
"""
LISTEN = "/ip4/127.0.0.1/tcp/0"
SECONDS = 180.0  # within which everything happens, also where twenty others want the cores; seconds are usual
LOOK_SECONDS = 0.1  # between looks: those who are looked at need the cores
STOP_SECONDS = 90.0  # for a node to leave, and for one that cannot start to say so
TEST_SECONDS = 900.0
ANSWER_SECONDS = 20.0
OWN = {
    "OMP_NUM_THREADS": "1",
    "P2PTRAIN_DEVICE__NAME": "cpu",
    "P2PTRAIN_DEVICE__THREADS": "1",
    "P2PTRAIN_NETWORK__NAT": "false",  # there is no router on loopback
    "P2PTRAIN_HTTP__PORT": "0",
}


class StartableDaemon:
    """One node, with its directory and command, that a test can start repeatedly."""

    def __init__(self, swarm: DaemonSwarm, name: str, *arguments: str | Path, listen: str = LISTEN, **own: str) -> None:
        self.swarm, self.name, self.own = swarm, name, own
        self.directory, self.log = swarm.directory / name, swarm.directory / f"{name}.log"
        self.arguments, self.listen = [str(each) for each in arguments], listen
        self.prefix: tuple[str, ...] = ()  # before its command, which it has to become
        self.imports_itself = swarm.imports_itself
        self.process: subprocess.Popen[bytes] | Born | None = None
        self.started_at = 0.0

    def start(self) -> StartableDaemon:
        assert self.process is None or self.process.poll() is not None, "one process at a time"
        options = [] if "--data-dir" in self.arguments else ["--data-dir", str(self.directory)]
        options += ["--listen", self.listen] if self.listen else []
        arguments, environment = [*self.arguments, *options, "--log-format", "text"], {**os.environ, **OWN, **self.own}
        with self.log.open("ab") as log:
            if self.prefix or self.imports_itself or "PYTHONPATH" in self.own:
                self.process = subprocess.Popen(
                    [*self.prefix, sys.executable, "-m", "p2ptrain", *arguments],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
                )  # fmt: skip
            else:
                self.process = born(arguments, environment, log)
        self.started_at = monotonic()
        return self

    # -----------------------------------------------------------------------------------------------
    # Looking

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, what: str = "status") -> dict[str, Any]:
        return ask(self.directory, {"do": what}, seconds=ANSWER_SECONDS)

    def status(self) -> dict[str, Any]:
        """Returns the status, empty if it does not answer, and compares its roots with those of the others."""
        try:
            status = self.ask()
        except P2ptrainError:
            return {}
        self.swarm.compare(self.name, status)
        return status

    @property
    def applied(self) -> int:
        return int(self.status().get("applied_round", -1))

    @property
    def is_member(self) -> bool:
        return bool(self.status().get("is_member"))

    @property
    def peers(self) -> int:
        return len(self.status().get("peers", ()))

    @property
    def address(self) -> str:
        address: str = self.ask()["addresses"][0]
        return address

    @property
    def p2pd(self) -> psutil.Process:
        (found,) = (each for each in p2pds(self.directory) if each.ppid() == self.pid)
        return found

    def events(self) -> list[Path]:
        return sorted(self.directory.glob("runs/*/events/*.jsonl"))

    # -----------------------------------------------------------------------------------------------
    # Waiting

    def pause(self, seconds: float) -> None:
        """Sleeps, but no longer than the daemon runs."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def until(self, condition: Callable[[], object], seconds: float = SECONDS, look: float = LOOK_SECONDS) -> float:
        """Waits until a condition holds while this daemon runs. Returns the seconds it took."""
        began = monotonic()
        while not condition():
            assert self.is_running, f"{self.name} has ended:\n{self.text[-3_000:]}"
            took = monotonic() - began
            assert took < seconds, f"{self.name} after {took:.0f} s:\n{self.text[-3_000:]}\n{self.status()}"
            self.pause(look)
        return monotonic() - began

    def until_up(self) -> StartableDaemon:
        self.until(lambda: self.status().get("addresses"))
        return self

    def until_member(self) -> float:
        """Waits until it is a member. Returns the seconds since it was started."""
        self.until(lambda: self.is_member)
        return monotonic() - self.started_at

    def until_applied(self, number: int) -> float:
        return self.until(lambda: self.applied >= number)

    def until_says(self, text: str, seconds: float = SECONDS) -> float:
        return self.until(lambda: text in self.text, seconds)

    def until_ended(self, seconds: float = STOP_SECONDS) -> int:
        """Waits until it has ended. Returns the exit status."""
        assert self.process is not None
        return self.process.wait(seconds)

    # -----------------------------------------------------------------------------------------------
    # Trouble

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the daemon with SIGKILL; its p2pd ends with it."""
        left = p2pds(self.directory)
        self.signal(signal.SIGKILL)
        assert self.until_ended() == -signal.SIGKILL
        _, alive = psutil.wait_procs(left, STOP_SECONDS)
        assert alive == [], "a p2pd without its daemon"

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)

    def cont(self) -> None:
        self.signal(signal.SIGCONT)

    def leave(self) -> None:
        self.ask("leave")
        assert self.until_ended() == 0, self.text[-3_000:]


class DaemonSwarm:
    """The daemons of a test, and the roots that they have reported."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.daemons: list[StartableDaemon] = []
        self.imports_itself = False  # whether each node imports everything, which takes it two seconds
        self.roots: dict[str, dict[str, str]] = defaultdict(dict)  # by round, and by the node that told it
        self.began = monotonic()
        self.notes: list[str] = []

    def run_file(self, name: str = "test") -> Path:
        path = self.directory / f"{name}.toml"
        path.write_text(RUN.format(name=name))
        return path

    def first(self, name: str = "first", run: str = "test", **own: str) -> StartableDaemon:
        """Makes the first node, which starts the run."""
        return self.add(name, "start", self.run_file(run), **own)

    def joiner(self, name: str, *addresses: str, **own: str) -> StartableDaemon:
        return self.add(name, "join", *(part for each in addresses for part in ("--bootstrap", each)), **own)

    def add(self, name: str, *arguments: str | Path, listen: str = LISTEN, **own: str) -> StartableDaemon:
        self.daemons.append(StartableDaemon(self, name, *arguments, listen=listen, **own))
        return self.daemons[-1]

    def of(self, size: int) -> list[StartableDaemon]:
        """Makes that many nodes, and waits until all are members."""
        nodes = [self.first().start().until_up()]
        nodes += [self.joiner(f"node{n}", nodes[0].address).start() for n in range(2, size + 1)]
        for node in nodes:
            node.until(lambda node=node: len(node.status().get("roster", ())) == size)
        return nodes

    def kill_while_it_trains(self, first: StartableDaemon, second: StartableDaemon) -> None:
        """Kills the second of two members, which has to repeat its round as it was; both go on."""
        for node in (first, second):
            node.until(lambda node=node: len(node.status().get("roster", ())) == 2)
        number = first.applied + 3
        second.until_applied(number)
        second.kill()
        second.start()
        second.until_applied(number + 3)
        first.until_applied(number + 3)
        assert self.compared() > 3

    def train(self, first: StartableDaemon, names: Sequence[str], rounds: int, seconds: float) -> list[StartableDaemon]:
        """Lets nodes of these names join the first; all train so many rounds, and leave. Returns all of them.

        seconds: within which each of these steps is done
        """
        first.until(lambda: first.status().get("addresses"), seconds)
        nodes = [first, *(self.joiner(name, first.address).start() for name in names)]
        for node in nodes:
            node.until(lambda node=node: len(node.status().get("roster", ())) == len(nodes), seconds, look=2.0)
        number = first.applied + rounds
        for node in nodes:
            node.until(lambda node=node: node.applied >= number, seconds, look=2.0)
        assert self.compared() >= rounds
        for node in nodes:
            node.ask("leave")
            assert node.until_ended(seconds) == 0, node.text[-3_000:]
        return nodes

    def compare(self, name: str, status: dict[str, Any]) -> None:
        """Asserts that a node has the roots of the others. A wrong one heals before it is told, but it is counted."""
        assert not status["counters"].get("root mismatches"), f"{name} came to a wrong state"
        for number, root in status["roots"].items():
            told = self.roots[f"{status['run_id']} {number}"]
            told[name] = root
            assert len(set(told.values())) == 1, f"round {number} has another root with {name}: {told}"

    def compared(self) -> int:
        """Returns the rounds whose root at least two nodes have reported."""
        return sum(len(told) > 1 for told in self.roots.values())

    def note(self, what: str, seconds: float) -> None:
        self.notes.append(f"{what}: {seconds:.1f} s")

    def close(self) -> None:
        """Ends all daemons at once, and asserts that no process is left."""
        for each in self.daemons:
            if each.is_running:
                each.signal(signal.SIGKILL)
        for each in self.daemons:
            if each.process is not None:
                each.process.wait()
        psutil.wait_procs(p2pds(self.directory), STOP_SECONDS)
        left = p2pds(self.directory)
        for process in left:
            process.kill()
        sys.stderr.write(f"{monotonic() - self.began:.1f} s; " + "; ".join(self.notes) + "\n")
        assert left == [], "a p2pd without its daemon"

    def look_at_logs(self) -> None:
        for each in self.daemons:
            if each.log.exists():
                for bad in "Traceback", "never retrieved":
                    before, found, after = each.text.partition(bad)
                    assert not found, f"in the log of {each.name}:\n{before[-2_000:]}{bad}{after[:5_000]}"


def contributed(node: StartableDaemon) -> int:
    """Returns how many contributions of this node rounds have taken."""
    return int(node.status().get("mine", {}).get("applied", 0))


@contextmanager
def lending(node: StartableDaemon, place: str, *prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yields another machine of a node's owner, which lends the node its processor."""
    token = node.directory / "rendezvous.token"
    node.until(token.exists)
    command, environment = [*prefix, sys.executable, "-m", "p2ptrain", "lend", place], {**os.environ, **OWN}
    with token.open() as file, (node.directory / "lend.log").open("ab") as log:
        lender = subprocess.Popen(command, stdin=file, stdout=log, stderr=log, env=environment)
        try:
            yield lender
        finally:
            lender.kill()
            lender.wait()


@contextmanager
def swarm_in(directory: Path) -> Iterator[DaemonSwarm]:
    swarm = DaemonSwarm(directory)
    try:
        yield swarm
        swarm.look_at_logs()
    finally:
        swarm.close()


def p2pds(directory: Path) -> list[psutil.Process]:
    """Returns the p2pd processes that run with a key under this directory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(part.startswith(f"-id={directory}/") for part in process.cmdline()):
                found.append(process)
    return found


def p2ptrain(*arguments: str | Path, seconds: float = SECONDS, **own: str) -> tuple[int, str, str]:
    """Runs a command that ends by itself. Returns exit status, stdout and stderr."""
    command = [sys.executable, "-m", "p2ptrain", *map(str, arguments)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=seconds,
        env={**os.environ, **OWN, **own},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def as_json(*arguments: str | Path) -> Any:
    status, out, err = p2ptrain(*arguments, "--json")
    assert status == 0, err
    return json.loads(out)
