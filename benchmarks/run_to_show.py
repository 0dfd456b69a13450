"""A run to show: real daemons that come and go train 10M parameters on real text, for a day or more.

    python benchmarks/run_to_show.py [--directory out/show] [--seed 1] [--hours 1000]
    python benchmarks/run_to_show.py --stop
    python benchmarks/run_to_show.py --figures benchmarks/figures/show.json [--directory out/show]
    python benchmarks/run_to_show.py --check benchmarks/figures/show.json

Four to seven nodes, each `p2ptrain start` or `p2ptrain join` in a process of its own on loopback, train the preset of
10M parameters (`local` with Muon) on the text that every Python carries. Which node is killed, joins, leaves or lies in
which round, and what is moved about the run's future, is planned beforehand from a seed (`plan`). A liar is the daemon
of the package, of which Python was told something else before it began (LIE): it trains, and sends something else.

Everything is in one directory. Whoever ends this program ends its daemons with it, as a power cut would; started again
it goes on with the same nodes, from their disks. Each event is a line of events.jsonl at once, and each minute is one
of figures.jsonl. With --figures the records of all nodes are compared, the history of the first node is audited from
its first round on, and the picture is drawn beside docs/show.md. All runs at the lowest priority.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import show_figures
from show_nodes import ROOT, Member, command, environment, free_port, memory_of
from show_plan import FOUNDERS, K_MAX, KEEPER, LIE, LIES, NOTICE, RUN, TOO_HIGH, Planned, digest_of, plan, planned_of

from p2ptrain.errors import P2ptrainError
from p2ptrain.node.control import ask
from p2ptrain.system import Tie, tied_to_us

OF_KEEPER = {"P2PTRAIN_STORAGE__CHECKPOINTS_KEPT": "8"}  # as far back as a roll-back goes
LOOK_SECONDS, LINE_SECONDS, ANSWER_SECONDS = 5.0, 60.0, 5.0
WAIT_SECONDS = 1_800.0  # for a node to come back or up, on two cores that have other work
SLEPT_SECONDS = 180.0  # without a look: the machine, or this program, was not there
STUCK_SECONDS = 2_400.0
RESTART_SECONDS, FAILURES_MAX = 30.0, 6  # of a node that ended by itself, each time twice as long
DISK_BYTES_MAX, FREE_BYTES_MIN = 30 * 10**9, 8 * 10**9
KEPT_EVERY = 256  # rounds between states that are kept for the audit, beside the first of a run


# ---------------------------------------------------------------------------------------------------
# The show


class Show:
    """The daemons of a directory, and what happens to them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        (directory / "nodes").mkdir(parents=True, exist_ok=True)
        self.state_file, self.plan_file = directory / "state.json", directory / "plan.json"
        if not self.plan_file.exists():
            planned = {"seed": seed, "digest": digest_of(plan(seed)), "events": plan(seed)}
            replace(self.plan_file, json.dumps(planned, indent=0))
            replace(self.state_file, json.dumps({"begun": time.time(), "offset": -1, "done": 0, "members": []}))
        kept = json.loads(self.plan_file.read_text())
        self.seed = int(kept["seed"])
        self.planned = list(map(planned_of, kept["events"]))
        state = json.loads(self.state_file.read_text())
        self.begun, self.done = float(state["begun"]), int(state["done"])
        self.offset = int(state["offset"])  # the round in which all founders were there; -1: not yet
        self.members = [Member(**each) for each in state["members"]]
        self.last_look = float(state.get("last_look", 0.0))
        self.run_id = str(state.get("run_id", ""))
        self.standings: dict[str, str] = state.get("standings", {})
        self.slept, self.compared, self.differing = (
            float(state.get("slept", 0.0)), int(state.get("compared", 0)), list(state.get("differing", [])),
        )  # fmt: skip
        self.memory_max = int(state.get("memory_max", 0))
        self.branch, self.said = "", Counter[str]()
        self.roots: dict[tuple[str, str, int], dict[str, str]] = {}
        self.down: tuple[Member, float, int] | None = None  # who was killed, when, and the round of the others then
        self.motion: tuple[Planned, str, int] | None = None  # in which run it was made, and its last round
        if state.get("motion"):
            each, run, last = state["motion"]
            self.motion = planned_of(each), run, last
        self.line_at = 0.0
        self.measuring: subprocess.Popen[bytes] | None = None
        self.measured = "", -1  # the run and the round of the last state whose held-out loss was measured
        self.newest, self.newest_at = int(state.get("newest", 0)), time.monotonic()

    def save(self) -> None:
        replace(self.state_file, json.dumps({
            "begun": self.begun, "offset": self.offset, "done": self.done,
            "members": [each.saved for each in self.members],
            "last_look": self.last_look, "run_id": self.run_id, "standings": self.standings, "slept": self.slept,
            "compared": self.compared, "differing": self.differing, "memory_max": self.memory_max,
            "newest": self.newest, "motion": self.motion,
        }, indent=1))  # fmt: skip

    def tell(self, what: str, node: str = "", **more: Any) -> None:
        """Writes an event, at once."""
        row = {"round": self.newest, "at": round(time.time(), 1), "what": what, "node": node, **more}
        append(self.directory / "events.jsonl", row)
        print(json.dumps(row), flush=True)
        self.save()

    # -----------------------------------------------------------------------------------------------
    # Nodes

    def member(self, name: str) -> Member | None:
        return next((each for each in self.members if each.name == name and each.is_in), None)

    def place(self, name: str) -> Path:
        return self.directory / "nodes" / name

    def bring_up(self, each: Member) -> None:
        """Starts a daemon, which ends when this program does."""
        listen = f"/ip4/127.0.0.1/tcp/{each.port}"
        if each.name == KEEPER:
            run = self.directory / "show.toml"
            if not run.exists():
                run.write_text(RUN)
            arguments: list[str | Path] = ["start", run]
        else:
            others = [other.address for other in self.members if other.address and other is not each and other.is_in]
            arguments = ["join", "--yes", *(part for other in others[:4] for part in ("--bootstrap", other))]
        arguments += ["--data-dir", self.place(each.name), "--listen", listen, "--log-format", "text"]
        own = dict(OF_KEEPER) if each.name == KEEPER else {}
        own["P2PTRAIN_LIMITS__K_MAX"] = str(each.k_max)
        if each.lie:
            patch = self.directory / "lie"
            patch.mkdir(exist_ok=True)
            (patch / "sitecustomize.py").write_text(LIE)
            own |= {"before": str(patch), "SHOW_LIE": each.lie}
        ours, theirs = socket.socketpair()
        with (self.directory / "nodes" / f"{each.name}.log").open("ab") as log, theirs:
            each.process = subprocess.Popen(  # noqa: S603
                ["nice", "-n", "19", *tied_to_us(Tie.KILL_WITHOUT_INPUT, command(*arguments))],  # noqa: S607
                stdin=theirs, stdout=log, stderr=log, env=environment(**own), start_new_session=True,
            )  # fmt: skip
        each.tie, each.status, each.start_at = ours, {}, 0.0

    def add(self, name: str, lie: str = "") -> Member:
        made = Member(name, free_port(), lie=lie, k_max=K_MAX[len(self.members) % len(K_MAX)])
        self.members.append(made)
        self.bring_up(made)
        return made

    def look(self) -> None:
        """Asks all nodes, compares the roots that they tell, and starts who has ended by itself."""
        for each in (each for each in self.members if each.is_in):
            if each.is_up:
                with suppress(P2ptrainError):
                    each.status = ask(self.place(each.name), {"do": "status"}, seconds=ANSWER_SECONDS)
                    self._note(each)
            elif each.start_at and time.monotonic() >= each.start_at:
                self.bring_up(each)
            elif not each.start_at and (self.down is None or self.down[0] is not each):
                self._ended(each)
        newest = max((each.applied for each in self.members if each.is_in), default=0)
        if newest > self.newest:
            self.newest, self.newest_at, self.said["stuck"] = newest, time.monotonic(), 0
        if time.monotonic() > self.newest_at + STUCK_SECONDS and not self.said["stuck"]:
            self.said["stuck"] = 1
            self.tell("stuck", seconds=round(time.monotonic() - self.newest_at))

    def _ended(self, each: Member) -> None:
        code = each.process.returncode if each.process is not None else None
        each.failures += each.process is not None
        if each.failures > FAILURES_MAX and each.name != KEEPER:
            each.is_in = False
            self.tell("given up", each.name, status=code)
            return
        each.start_at = time.monotonic() + RESTART_SECONDS * 2 ** min(each.failures, 5)
        if each.process is not None:
            self.tell("ended by itself", each.name, status=code)

    def _note(self, each: Member) -> None:
        status = each.status
        each.count()
        if each.applied > 0 and status["uptime_seconds"] > WAIT_SECONDS:
            each.failures = 0
        each.peer_id = status["peer_id"]
        each.address = next(iter(status["addresses"]), each.address)
        for number, root in status["roots"].items():
            place = status["run_id"], status["branch"], int(number)
            told = self.roots.setdefault(place, {})
            self.compared += bool(told) and len(told) == 1 and each.name not in told
            told[each.name] = root
            if len(set(told.values())) > 1 and list(place) not in self.differing:
                self.differing.append(list(place))
                self.tell("roots differ", each.name, place=place, roots=told)
        while len(self.roots) > 5_000:
            del self.roots[next(iter(self.roots))]
        if wrong := status["counters"].get("root mismatches", 0):
            self._once(f"{each.name} {each.process and each.process.pid} wrong {wrong}", "wrong state", each.name)
        if each.name == KEEPER:
            self._note_run(status)

    def _note_run(self, status: dict[str, Any]) -> None:
        if status["run_id"] != self.run_id:
            before, self.run_id = self.run_id, status["run_id"]
            self.branch = status["branch"]
            self.newest = max(self.newest, status["applied_round"])
            self.tell("run" if not before else "succession", KEEPER, run=self.run_id)
        elif status["branch"] != self.branch:
            before, self.branch = self.branch, status["branch"]
            if before:
                self.tell("regrouped", KEEPER, branch=self.branch)
        for complaint in status["complaints"]:
            if complaint["code"] in ("spike", "halted", "quarantined", "suspended"):
                self._once(f"{self.run_id} {complaint['code']}", "complaint", KEEPER, text=complaint["text"])

    def _once(self, key: str, what: str, node: str, **more: Any) -> None:
        self.said[key] += 1
        if self.said[key] == 1:
            self.tell(what, node, **more)

    # -----------------------------------------------------------------------------------------------
    # Events

    def go_on(self) -> None:
        """Begins what is due: one node is down at a time, and one motion is under way."""
        self._watch_down()
        self._watch_motion()
        while self.done < len(self.planned) and self.planned[self.done].round + self.offset <= self.newest:
            each = self.planned[self.done]
            if not self._begin(each):
                return
            self.done += 1
            self.save()

    def _begin(self, each: Planned) -> bool:
        """Begins an event; returns whether it can be."""
        found = self.member(each.node)
        match each.what:
            case "kill":
                if self.down is not None:
                    return False
                if found is not None and found.is_up and found.applied > 0:
                    self._kill(found, each.seconds)
            case "leave":
                if self.down is not None and self.down[0] is found:
                    return False
                if found is not None:
                    self._leave(found)
            case "join" | "liar":
                if found is None:
                    self.add(each.node, each.lie)
                    self.tell("joins", each.node, lie=each.lie)
            case _:
                if self.motion is not None:
                    return False
                return self._move(each)
        return True

    def _kill(self, victim: Member, seconds: int) -> None:
        assert victim.process is not None
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        victim.start_at = time.monotonic() + seconds
        victim.count()
        others = max((each.applied for each in self.members if each is not victim), default=0)
        self.down = victim, time.monotonic(), others
        self.tell("killed", victim.name, away=seconds)

    def _watch_down(self) -> None:
        if self.down is None:
            return
        victim, since, was = self.down
        seconds = round(time.monotonic() - since, 1)
        if victim.is_up and victim.applied > was and victim.status.get("is_admitted"):
            self.down = None
            self.tell("back", victim.name, seconds=seconds, member=bool(victim.status.get("is_member")))
        elif seconds > WAIT_SECONDS or (not victim.is_up and not victim.start_at):
            self.down = None
            self.tell("not back yet", victim.name, seconds=seconds)

    def _leave(self, each: Member) -> None:
        with suppress(P2ptrainError):
            ask(self.place(each.name), {"do": "leave"}, seconds=ANSWER_SECONDS)
        each.is_in = False
        self.tell("leaves", each.name)

    def _clear(self) -> None:
        """Frees the disk of who has left: only its records stay."""
        for each in (each for each in self.members if not each.is_in and each.process is not None):
            if each.is_up:
                continue
            for run in (self.place(each.name) / "runs").glob("*"):
                for part in ("payloads", "checkpoints"):
                    shutil.rmtree(run / part, ignore_errors=True)
            shutil.rmtree(self.place(each.name) / "data", ignore_errors=True)
            each.process = None

    def _move(self, each: Planned) -> bool:
        """Moves that the run go on otherwise, by the command that a person types."""
        keeper = self.member(KEEPER)
        assert keeper is not None
        mover = self.member(each.node) or keeper
        if not mover.is_up or not mover.status.get("is_member"):
            mover = keeper
        if not mover.is_up or not mover.status.get("is_member"):
            return False
        last = self.newest + NOTICE
        more = ["--after", str(last)]
        if each.what == "back":
            if self._recipe("inner_learning_rate") != TOO_HIGH:
                self.tell("nothing to undo", each.node)
                return True
            more += ["--back-to", str(self._run()["predecessor"]["round"])]
        for name, value in each.settings:
            more += ["--set", f"{name}={value:g}"]
        done = subprocess.run(  # noqa: S603
            ["nice", "-n", "19", *command("propose", "--data-dir", self.place(mover.name), *more)],  # noqa: S607
            capture_output=True, text=True, check=False, env=environment(), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        text = (done.stdout + done.stderr).strip()
        self.tell("moves" if done.returncode == 0 else "refused", mover.name, arguments=more, text=text[-500:])
        if done.returncode == 0:
            self.motion = each, self.run_id, last
        elif self.said[f"refused {each.round}"] < 3:
            self.said[f"refused {each.round}"] += 1
            return False  # once more, at the next look
        return True

    def _run(self) -> dict[str, Any]:
        """Returns the config of the run that is under way."""
        found: dict[str, Any] = json.loads((self.place(KEEPER) / "runs" / self.run_id[:16] / "run.json").read_text())
        return found

    def _recipe(self, name: str) -> float:
        return float(Fraction(self._run()["recipe"][name]))

    def _watch_motion(self) -> None:
        if self.motion is None:
            return
        each, before, last = self.motion
        if self.run_id != before:
            self.motion = None
        elif self.newest > last + 4:
            self.motion = None
            self.tell("lapsed", each.node)
            self._move(each)

    # -----------------------------------------------------------------------------------------------
    # Figures

    def line(self) -> None:
        """Writes the figures of a minute, and what they show of others' standing."""
        keeper = self.member(KEEPER)
        if keeper is None or not keeper.status:
            return
        status, memory = keeper.status, 0
        for each in self.members:
            if each.is_up:
                assert each.process is not None
                memory += memory_of(each.process.pid)
        self.memory_max = max(self.memory_max, memory)
        append(self.directory / "figures.jsonl", {
            "at": round(time.time(), 1), "round": self.newest, "run": self.run_id[:16],
            "swarm_loss": status["swarm_loss"], "held_out_loss": status["held_out_loss"],
            "held_out_round": status["held_out_round"], "members": len(status["roster"]),
            "admitted": status["admitted"], "suspended": status["suspended"], "typical_z": status["typical_z"],
            "exchange_share": status["exchange_share"], "up": sum(each.is_up for each in self.members),
            "tokens": sum(each.total("tokens") for each in self.members),
            "sent": sum(each.total("sent") for each in self.members),
            "received": sum(each.total("received") for each in self.members),
            "memory": memory, "load": os.getloadavg()[0], "compared": self.compared,
            "complaints": sorted({one["code"] for one in status["complaints"]}),
        })  # fmt: skip
        self._note_standings()
        self._keep_states()
        self._measure()
        self._clear()
        self.save()

    def _note_standings(self) -> None:
        names = {each.peer_id: each.name for each in self.members}
        with suppress(P2ptrainError):
            for peer in ask(self.place(KEEPER), {"do": "peers"}, seconds=ANSWER_SECONDS)["peers"]:
                name, standing = names.get(peer["peer_id"]), peer["standing"]
                if name is None or not standing or self.standings.get(name) == standing:
                    continue
                before, self.standings[name] = self.standings.get(name, ""), standing
                if before or standing != "counted":
                    self.tell("standing", name, standing=standing, before=before)

    def _keep_states(self) -> None:
        """Keeps the first state of each run, and some later ones, from which an audit replays."""
        for run in sorted((self.place(KEEPER) / "runs").glob("*")):
            kept = self.directory / "states" / run.name
            for state in sorted((run / "checkpoints").glob("[0-9]*-round-*[0-9]")):
                with suppress(OSError, ValueError, KeyError):  # it was removed meanwhile
                    number = int(json.loads((state / "checkpoint.json").read_text())["round"])
                    have = [int(each.name) for each in kept.glob("[0-9]*")]
                    if not have or min(abs(number - each) for each in have) >= KEPT_EVERY:
                        shutil.copytree(state, kept / str(number) / state.name, copy_function=os.link)

    def _measure(self) -> None:
        """Measures the held-out loss of the newest state of the first node, one after the other."""
        if self.measuring is not None:
            if self.measuring.poll() is None:
                return
            told, _ = self.measuring.communicate()
            if self.measuring.returncode == 0:
                append(self.directory / "losses.jsonl", json.loads(told))
            self.measuring = None
        run = self.place(KEEPER) / "runs" / self.run_id[:16]
        rounds = [int(state.name.rpartition("-")[2]) for state in (run / "checkpoints").glob("[0-9]*-round-*[0-9]")]
        newest = max(rounds, default=-1)
        if (self.run_id, newest) != self.measured and newest >= 0:
            self.measured = self.run_id, newest
            program = ROOT / "benchmarks" / "show_loss.py"
            self.measuring = subprocess.Popen(  # noqa: S603
                ["nice", "-n", "19", sys.executable, str(program), str(self.place(KEEPER)), self.run_id[:16], str(newest)],  # noqa: S607, E501
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(),
            )  # fmt: skip

    # -----------------------------------------------------------------------------------------------
    # The loop

    def open(self) -> None:
        """Starts those who were there, or the first ones."""
        away = time.time() - self.last_look
        if not self.members:
            self.add(KEEPER)
        else:
            self.slept += away
            self.tell("slept", seconds=round(away))
            for each in (each for each in self.members if each.is_in):
                self.bring_up(each)
                self._pause(3.0)
        self.last_look = time.time()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def found(self) -> None:
        """Starts the founders: most at once, as soon as the first is up, and the last after the liar is admitted."""
        names = {each.name: each for each in self.members}
        if not names[KEEPER].address:
            return
        *first, liar, last = FOUNDERS[1:]
        for name in (*first, liar):
            if name not in names:
                self.add(name, LIES[0] if name == liar else "")
                self.tell("joins", name, lie=self.members[-1].lie)
        if last not in names and liar in names and names[liar].status.get("is_admitted"):
            self.add(last)
            self.tell("joins", last)
        if last in names and all(each.status.get("is_admitted") for each in self.members):
            self.offset = self.newest
            self.tell("all founders are there")

    def turn(self) -> None:
        gap = time.time() - self.last_look
        if gap > SLEPT_SECONDS:
            self.slept += gap
            self.newest_at = time.monotonic()
            self.tell("slept", seconds=round(gap))
        self.last_look = time.time()
        self.look()
        if self.offset < 0:
            self.found()
        else:
            self.go_on()
        if time.monotonic() >= self.line_at:
            self.line_at = time.monotonic() + LINE_SECONDS
            self.line()

    def is_full(self) -> bool:
        used = sum(file.stat().st_blocks * 512 for file in self.directory.rglob("*") if file.is_file())
        return used > DISK_BYTES_MAX or shutil.disk_usage(self.directory).free < FREE_BYTES_MIN

    def run(self, hours: float) -> None:
        until, full_at = time.monotonic() + 3_600 * hours, 0.0
        with ExitStack() as stack:
            stack.callback(self.close)
            self.open()
            while time.monotonic() < until:
                self.turn()
                if time.monotonic() > full_at:
                    full_at = time.monotonic() + 1_800
                    with suppress(FileNotFoundError):  # a file that was removed meanwhile
                        if self.is_full():
                            self.tell("the disk is full")
                            return
                self._pause(LOOK_SECONDS)

    def close(self) -> None:
        """Kills all daemons; their disks are as after a power cut."""
        for each in self.members:
            if each.is_up:
                assert each.process is not None
                each.process.kill()
                each.process.wait()
        self.save()


def replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def stop(directory: Path) -> None:
    """Ends the program of a directory, and with it its daemons."""
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        os.kill(int((directory / "pid").read_text()), signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=ROOT / "out" / "show")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=1_000.0)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--figures", type=Path, help="write them to this file, the picture and the report to docs")
    parser.add_argument("--check", type=Path, help="say whether this file of figures is whole, and as it was written")
    chosen = parser.parse_args()
    directory = chosen.directory.resolve()
    if chosen.stop:
        stop(directory)
        return 0
    if chosen.figures:
        show_figures.write(directory, chosen.figures)
        return 0
    if chosen.check:
        try:
            show_figures.read(chosen.check)
        except show_figures.WrongFileError as error:
            sys.exit(f"{chosen.check}: {error}")
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "pid").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.nice(19 - os.nice(0))
    with suppress(OSError):  # if memory runs out, other programs go on
        Path("/proc/self/oom_score_adj").write_text("800")
    Show(directory, chosen.seed).run(chosen.hours)
    return 0


if __name__ == "__main__":
    sys.exit(main())
