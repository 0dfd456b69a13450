"""Scripts with a training loop of their own as nodes of a test's swarm: the examples, as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import monotonic

import psutil

from tests.helpers.daemons import LISTEN, OWN, DaemonSwarm, StartableDaemon

EXAMPLES = Path(__file__).parents[2] / "examples"


class ExampleScript(StartableDaemon):
    """An example, whose node lives in a process of its own."""

    example = "own_loop.py"

    def start(self) -> StartableDaemon:
        environment = {**os.environ, **OWN, "P2PTRAIN_NETWORK__LISTEN": LISTEN, **self.own}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLES / self.example), str(self.directory), *self.arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self.started_at = monotonic()
        return self

    @property
    def text(self) -> str:
        """What its node has logged; a script that is interrupted prints a traceback."""
        own = self.directory / "node.log"
        return (own if own.exists() else self.log).read_text(errors="replace")

    @property
    def node(self) -> psutil.Process:
        (found,) = (each for each in psutil.Process(self.pid).children() if "p2ptrain.daemon.script" in each.cmdline())
        return found

    def until_left(self) -> None:
        """Waits until script and node have ended, and expects that the node left."""
        self.until_ended()
        assert "left: ended" in self.text.splitlines()[-1]


def script(swarm: DaemonSwarm, name: str, *arguments: str, example: str = "own_loop.py", **own: str) -> ExampleScript:
    made = ExampleScript(swarm, name, *arguments, **own)
    made.example = example
    swarm.daemons.append(made)
    return made


def until_both_contributed(swarm: DaemonSwarm, *nodes: StartableDaemon) -> None:
    """Waits until both are members that have contributed to rounds, and expects that their roots are the same."""
    for node in nodes:
        node.until(lambda node=node: node.is_member and int(node.status()["mine"]["applied"]) > 8)
    assert len(nodes[0].status()["roster"]) == 2
    assert swarm.compared() > 4
