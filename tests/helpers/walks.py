"""A newcomer at some terminals, who types what the pages say, and also what they do not: wrong options, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.docs import SECONDS, Box, Reader, ReaderNode, Step, is_seen, reader_in

WRONG = 2  # the exit status of a command that was typed wrongly


class Walk:
    """What one person does, in a folder with nothing but some texts."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    @property
    def folder(self) -> Path:
        return self.reader.folder

    def types(self, command: str, *seen: str, at: str = "") -> None:
        """Types a command that does well, and sees these lines; in a terminal, as pages have it."""
        self.reader.do(Step(command, seen), Box("the walk", 0, "console", at, ()))

    def starts(self, command: str, *seen: str, at: str = "") -> ReaderNode:
        """Starts a node, and waits until it answers."""
        self.types(command, *seen, at=at)
        return self.reader.nodes[-1]

    def interrupts(self, at: str = "") -> None:
        self.types("^C", at=at)

    def says(self, command: str, status: int = 0) -> str:
        """Types a command that ends with this status. Returns all that it prints."""
        done = subprocess.run(
            ["bash", "-c", self.reader.said(command)],
            cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL, timeout=SECONDS, check=False,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == status, f"{command}: {done.returncode}:\n{done.stdout}"
        assert "Traceback" not in done.stdout, f"{command}:\n{done.stdout}"
        return done.stdout

    def is_refused(self, command: str, *seen: str, status: int = WRONG) -> None:
        """Types a command that does not do well, and sees why."""
        said = self.says(command, status)
        assert is_seen(seen, said), f"{command}: not what is said:\n{said}"

    def asks(self, command: str) -> Any:
        return json.loads(self.says(f"{command} --json"))

    def loses_patience(self, command: str, *, when: str) -> int:
        """Presses Ctrl-C as soon as a command has printed this, or as it begins. Returns the exit status."""
        with subprocess.Popen(
            ["bash", "-c", f"exec {self.reader.said(command)}"],
            cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            lines = list[str]()
            while when not in "".join(lines) and (line := process.stdout.readline()):
                lines.append(line)
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=SECONDS)
        assert "Traceback" not in rest, f"{command}:\n{rest}"
        return process.returncode

    def until(self, node: ReaderNode, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """Waits until a node's status is such. Returns it."""
        found: dict[str, Any] = {}

        def holds() -> bool:
            found.clear()
            found.update(node.status)
            return bool(found and condition(found))

        node.until(holds, what)
        return found

    def _environment(self) -> dict[str, str]:
        return {**self.reader.environment, "HOME": str(self.reader.home(""))}


@contextmanager
def walk_in(folder: Path, bootstrap: str = "") -> Iterator[Walk]:
    with reader_in(folder, bootstrap) as reader:
        yield Walk(reader)
