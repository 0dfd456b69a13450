"""Parses the documentation's pages, and follows them as a reader would.

A page's boxes begin with a word that says what they are:

    console           commands, each on a line that begins with `$ `, and what is seen below it; a line `^C` is Ctrl-C
    console WORD      the same in another terminal; those in FRIENDS are on a machine of their own
    toml NAME         a file that the reader writes; so are `python NAME`, `json NAME` and `jinja NAME`
    text              nothing to type
    text WORD         something to type that no test runs, and why: see EXCEPTIONS in test_docs.py

The reader has a folder, and p2ptrain: this checkout's, or the program that P2PTRAIN names in the environment, which
`make test-release` has installed from the wheel; or else a wheel that is yet to be installed. The run of `config
example tiny` is made smaller, because tests share their cores. Ports, addresses, keys and digests in the pages are
replaced: `Reader.said` has them all.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import gmtime, monotonic
from typing import Any

import psutil

from p2ptrain.errors import P2ptrainError
from p2ptrain.identity import Identity
from p2ptrain.node.control import ask
from tests.helpers.daemons import LISTEN, OWN, RUN, p2pds

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECONDS = 240.0  # within which anything happens, where many others want the cores; seconds are usual
INSTALLED = os.environ.get("P2PTRAIN", "")  # the program from the wheel
PIP_CACHE = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
INSTALL_SECONDS = 1_200.0  # for a pip that fetches torch; one minute is usual
LOOK_SECONDS = 120.0  # within which a look sees what the page says
STARTS = re.compile(r"p2ptrain (start|join)\b|python train\.py (?P<directory>\w+)")
EXAMPLE = "p2ptrain config example tiny > tiny.toml"
DIGESTS = ("digest", "manifest")  # of a tokenizer and of data, as `data prepare` prints them
# What only looks, and so may look again until it sees what the page says.
LOOKS = re.compile(r"p2ptrain (status|peers|runs|generate|checkpoint list)\b|curl\b")
FRIENDS = {"friend": "friend", "friend2": "friend"}  # terminals that are on another machine, and on which
# Files of the reader's own that pages take for granted.
HAS = {
    "book.txt": "Once upon a time.\n" * 400,
    "more.jsonl": '{"text": "And they lived happily ever after."}\n' * 400,
    "my-run.toml": 'name = "my-run"\n[recipe]\nname = "distro"\nk = "many"\nlearning_rte = 0.001\n',
}
FILES = ("toml", "python", "json", "jinja")
FENCE = re.compile(r"^```(.*)$")


# ---------------------------------------------------------------------------------------------------
# Pages


@dataclass(frozen=True, slots=True)
class Box:
    """A fenced block."""

    page: str  # from the root of the project
    line: int
    kind: str
    word: str
    lines: tuple[str, ...]

    @property
    def commands(self) -> list[str]:
        """Returns the commands without their comments."""
        return [line[2:].partition("  #")[0].rstrip() for line in self.lines if line.startswith("$ ")]


@dataclass(frozen=True, slots=True)
class Step:
    """A command, or Ctrl-C, and its expected output."""

    command: str
    seen: tuple[str, ...]


def boxes_of(page: Path) -> list[Box]:
    found, opened, lines = [], None, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line.strip())
        if fence is None:
            lines.append(line)
        elif opened is None:
            opened, lines = (number, fence[1].strip()), []
        else:
            kind, _, word = opened[1].partition(" ")
            found.append(Box(str(page.relative_to(ROOT)), opened[0], kind, word.strip(), tuple(lines)))
            opened = None
    assert opened is None, f"{page}: a box that does not end"
    return found


def outside_boxes(page: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines outside fenced blocks, with their numbers."""
    is_inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if FENCE.match(line.strip()):
            is_inside = not is_inside
        elif not is_inside:
            yield number, line


def steps_of(box: Box) -> list[Step]:
    steps: list[Step] = []
    for line in box.lines:
        if line.startswith("$ ") or line == "^C":
            steps.append(Step(line.removeprefix("$ "), ()))
        elif line.strip():
            assert steps, f"{box.page}:{box.line}: begins with no command"
            steps[-1] = Step(steps[-1].command, (*steps[-1].seen, line))
    return steps


def is_seen(wanted: tuple[str, ...], text: str) -> bool:
    """True if the text has these lines in order, perhaps with others between; `...` matches anything in a line."""
    lines = iter(text.splitlines())
    return all(any(_pattern(each).fullmatch(line) for line in lines) for each in wanted)


def _pattern(wanted: str) -> re.Pattern[str]:
    """Makes the pattern of a line; runs of spaces match each other, because columns vary in width."""
    parts = [r"\s+".join(re.escape(word) for word in part.split()) for part in wanted.split("...")]
    return re.compile(r"\s*" + ".*".join(parts) + r"\s*")


# ---------------------------------------------------------------------------------------------------
# The reader


def midnight() -> str:
    """Returns a time zone in which the day begins now: a page's node trains only at night."""
    return f"NIGHT{gmtime().tm_hour}"


class ReaderNode:
    """A daemon that the reader has started in a terminal."""

    def __init__(
        self, command: str, terminal: str, directory: Path, log: Path, process: subprocess.Popen[bytes]
    ) -> None:
        self.command, self.terminal, self.directory, self.log, self.process = command, terminal, directory, log, process

    @property
    def status(self) -> dict[str, Any]:
        """Returns the output of `p2ptrain status --json`; empty while the node does not answer."""
        try:
            return ask(self.directory, {"do": "status"}, seconds=SECONDS)
        except P2ptrainError:
            return {}

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, condition: Any, what: str) -> None:
        began = monotonic()
        while not condition():
            assert self.process.poll() is None, f"{self.command} has ended:\n{self.text[-3_000:]}"
            assert monotonic() - began < SECONDS, f"{self.command}: not yet {what}:\n{self.text[-3_000:]}"
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)

    @property
    def is_script(self) -> bool:
        return "python" in self.command

    def until_ended(self) -> None:
        status = self.process.wait(SECONDS)
        assert status == (-signal.SIGINT if self.is_script else 0), (
            f"{self.command} has ended with {status}:\n{self.text[-3_000:]}"
        )


class Reader:
    """Follows pages in its own folder."""

    def __init__(self, folder: Path, bootstrap: str = "", wheel: Path | None = None) -> None:
        self.folder, self.bootstrap = folder, bootstrap
        self.nodes: list[ReaderNode] = []
        self.ports: dict[str, int] = {}
        self.printed: dict[str, str] = {}  # the newest of DIGESTS
        self.took: list[tuple[float, str]] = []  # seconds and command
        folder.mkdir()
        for name, content in HAS.items():
            (folder / name).write_text(content)
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = f"{folder / '.venv' / 'bin'}:{self._system(wheel)}:{os.environ['PATH']}"
        self.environment = {**own, **OWN, "PATH": path, "COLUMNS": "200", "TZ": midnight()}
        self.environment |= {
            "P2PTRAIN_NETWORK__LISTEN": LISTEN,
            "P2PTRAIN_LIMITS__DEVICE_PERCENT": "40",  # the commands need the cores, too
            "P2PTRAIN_LOGGING__FORMAT": "text",
        }
        if wheel is None:
            self.environment |= {"PIP_NO_INDEX": "1"} if INSTALLED else {"PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1"}
        else:
            self.environment |= {"PIP_CONSTRAINT": str(_locked(folder / "locked.txt")), "PIP_CACHE_DIR": PIP_CACHE}

    def _system(self, wheel: Path | None) -> Path:
        """Makes the folder with the programs that the reader has before the first page."""
        python = str(Path(INSTALLED).absolute().with_name("python")) if INSTALLED else sys.executable
        made = {"python3": [python], "python": [python], "pip": [python, "-m", "pip"]}
        made["p2ptrain"] = [str(Path(INSTALLED).absolute())] if INSTALLED else [python, "-m", "p2ptrain"]
        if wheel is not None:
            shutil.copy(wheel, self.folder)
            made = {"python3": [sys.executable]}
        system = self.folder / "system"
        system.mkdir()
        for name, command in made.items():
            (system / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (system / name).chmod(0o755)
        return system

    # -----------------------------------------------------------------------------------------------
    # Reading

    def read(self, page: Path) -> None:
        for box in boxes_of(page):
            if box.kind in FILES and box.word:
                (self.folder / box.word).write_text(self.said("\n".join(box.lines) + "\n"))
            elif box.kind == "console":
                for step in steps_of(box):
                    began = monotonic()
                    self.do(step, box)
                    self.took.append((monotonic() - began, f"{box.page}: {step.command}"))

    def said(self, text: str, machine: str = "") -> str:
        """Replaces the placeholders in a page's text."""
        first = next((node.status for node in self.nodes if node.process.poll() is None), {})
        if "8420" in text:
            text = text.replace("http://127.0.0.1:8420/", first["http"])
        if "PUBLIC_KEY" in text:
            text = text.replace("PUBLIC_KEY", Identity.load(self.kept(machine) / "identity.key").key.hex())
        address = self.bootstrap or (first.get("addresses") or [""])[0]
        text = re.sub(r"\bADDR\b|/ip4/203\.0\.113\.7/tcp/4001/p2p/12D3KooW\.\.\.", address or "ADDR", text)
        for port in ("4001", "4002"):
            text = re.sub(rf"(--listen /ip4/127\.0\.0\.1/tcp/){port}\b", rf"\g<1>{self.port(port)}", text)
        for name, digest in self.printed.items():
            text = text.replace(f'{name} = "..."', f'{name} = "{digest}"')
        return text

    def port(self, name: str) -> int:
        """Returns a free port, always the same for a name."""
        if name not in self.ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports[name] = probe.getsockname()[1]
        return self.ports[name]

    def home(self, machine: str) -> Path:
        """The reader's own directory on a machine."""
        return self.folder / f"user{machine}"

    def kept(self, machine: str) -> Path:
        """Returns the default data directory there."""
        return self.home(machine) / ".local" / "share" / "p2ptrain"

    # -----------------------------------------------------------------------------------------------
    # Doing

    def do(self, step: Step, box: Box) -> None:
        where, machine = f"{box.page}:{box.line}: {step.command}", FRIENDS.get(box.word, "")
        if step.command == "^C":
            node = next(each for each in reversed(self.nodes) if each.terminal == box.word)
            node.process.send_signal(signal.SIGINT)
            node.until_ended()
            return
        command = self.said(step.command, machine)
        assert "ADDR" not in command, f"{where}: no node has an address"
        environment = {**self.environment, "HOME": str(self.home(machine))}
        directory = self._directory(command, machine)
        if STARTS.search(command):
            self._start(command, environment, directory, step, box)
            return
        began = monotonic()
        while True:
            done = subprocess.run(
                ["bash", "-c", command], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, check=False,
                timeout=INSTALL_SECONDS if "pip install" in command else SECONDS,
            )  # fmt: skip
            is_well = done.returncode == 0 and is_seen(step.seen, done.stdout + done.stderr)
            if is_well or not LOOKS.search(command) or monotonic() - began > LOOK_SECONDS:
                break
        told = f"{done.stdout}{done.stderr}"
        assert done.returncode == (2 if box.word == "refused" else 0), f"{where}: {done.returncode}:\n{told}"
        assert is_seen(step.seen, told), f"{where}: not what is said:\n{told}\n{self._logs()}"
        self.printed |= dict(re.findall(rf'^({"|".join(DIGESTS)}) = "(\w+)"', done.stdout, re.MULTILINE))
        if command == EXAMPLE:
            run = self.folder / "tiny.toml"
            assert run.read_bytes() == (ROOT / "examples" / "tiny.toml").read_bytes()
            run.write_text(RUN.format(name="tiny"))
        if "p2ptrain leave" in command:
            next(each for each in reversed(self.nodes) if each.directory == directory).until_ended()

    def _start(self, command: str, environment: dict[str, str], directory: Path, step: Step, box: Box) -> None:
        log = self.folder / f"{len(self.nodes)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        node = ReaderNode(command, box.word, directory, log, process)
        self.nodes.append(node)
        node.until(lambda: node.status.get("addresses"), "up")
        node.until(lambda: is_seen(step.seen, node.text), "seen")

    def _directory(self, command: str, machine: str) -> Path:
        words = shlex.split(command)
        if (script := STARTS.search(command)) and script["directory"]:
            return self.folder / script["directory"]
        return self.folder / words[words.index("--data-dir") + 1] if "--data-dir" in words else self.kept(machine)

    def _logs(self) -> str:
        return "\n".join(f"{node.command}:\n{node.text[-2_000:]}" for node in self.nodes)

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.kill()
                node.process.wait()
        psutil.wait_procs(p2pds(self.folder), 30)
        sys.stderr.write("".join(f"{took:5.1f} s  {what}\n" for took, what in self.took))
        for node in self.nodes:
            was_interrupted = node.is_script and node.text.endswith("\nKeyboardInterrupt\n")
            assert was_interrupted or "Traceback" not in node.text, node.text[-5_000:]


def _locked(file: Path) -> Path:
    """Writes the versions of constraints.txt, without hashes, which a wheel built here has not."""
    found = re.findall(r"^[\w.-]+==[^\s;]+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    file.write_text("\n".join(found))
    return file


def wheel_in(folder: Path) -> Path:
    """Returns the wheel that was installed, or builds it."""
    if INSTALLED:
        return Path(shutil.copy(max((ROOT / "dist").glob("*.whl"), key=os.path.getmtime), folder))
    options = ("--quiet", "--no-deps", "--build-constraint", ROOT / "constraints.txt", "--wheel-dir", folder)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, ROOT], check=True)
    (wheel,) = folder.glob("p2ptrain-*.whl")
    return wheel


@contextmanager
def reader_in(folder: Path, bootstrap: str = "", wheel: Path | None = None) -> Iterator[Reader]:
    reader = Reader(folder, bootstrap, wheel)
    try:
        yield reader
    finally:
        reader.close()
