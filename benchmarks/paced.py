"""Local steps at a card's pace on a machine that has none: a step lasts as long as it is said to, and some are real.

Of every `real_every` steps the first is a real step of the inner optimizer on one small batch; the rest of their time
is slept. What a real step takes more than its own time is taken from the sleep of those that follow it, and from
nothing else: whatever an exchange takes from training lies between steps, and counts.

`Paced` is `local` with such steps, a plug-in that benchmarks/frontier.py offers to its own nodes alone. Until there is
a file `go`, its steps learn nothing and take next to no time, so that all join before anything is learned. Each process
notes in a file of its own when it had taken each round's steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep

import torch
from pydantic import Field
from torch import Tensor

from p2ptrain.config import Rational, RecipeConfig, Section
from p2ptrain.exact.transform import Layout
from p2ptrain.train.live import LiveModel, StepResult
from p2ptrain.train.recipes import LocalRecipe

PACKAGE, VERSION, GROUP = "p2ptrain-paced", "0.1.0", "p2ptrain.recipes"
NOTES = "FRONTIER_NOTES"  # in the environment: the folder of the notes
IDLE_SECONDS, IDLE_MOVE = 0.01, 1e-7  # of a step that learns nothing: no two rounds may have the same contribution


class Pace:
    """Lets steps last `seconds` each."""

    def __init__(self, seconds: float, real_every: int) -> None:
        self.seconds, self.real_every = seconds, real_every
        self.steps = 0
        self.owed = 0.0  # what real steps took beyond their time

    def step(self, real: Callable[[], object]) -> None:
        """Takes a step, for which `real` is called if it is a real one."""
        began = monotonic()
        if self.steps % self.real_every == 0:
            real()
        self.steps += 1
        due = self.seconds - self.owed
        if (left := due - (monotonic() - began)) > 0:
            sleep(left)
        self.owed = max(0.0, monotonic() - began - due)


class Notes:
    """When a process had taken how many steps, one line a round."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, steps: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([monotonic(), steps]) + "\n")


def read_notes(path: Path) -> list[tuple[float, int]]:
    """Returns the times and steps; the last line may be being written."""
    whole = path.read_text().rpartition("\n")[0]
    return [(at, steps) for at, steps in map(json.loads, whole.splitlines())]


def offer(folder: Path) -> None:
    """Makes the plug-in an installed package, for processes that have the folder in their path."""
    about = folder / f"{PACKAGE.replace('-', '_')}-{VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{PACKAGE} = paced:Paced\n")


class Paced(LocalRecipe):
    """`local`, whose steps last as long as they are said to."""

    class Settings(Section):
        """The keys of `[recipe] settings`."""

        seconds: Rational = Field(ge=0, le=60)
        real_every: int = Field(1, ge=1, le=65_536)

    def __init__(self, config: RecipeConfig, live: LiveModel, layouts: Sequence[Layout], settings: Settings) -> None:
        super().__init__(config, live, layouts)
        self.pace = Pace(float(settings.seconds), settings.real_every)
        self.folder = Path(os.environ[NOTES])
        self.notes = Notes(self.folder / f"{os.getpid()}.notes")
        self.result: StepResult | None = None

    def local_step(self, step: int, batch: Tensor, positions: Sequence[int]) -> StepResult:
        if not self.pace.steps:
            if not (self.folder / "go").exists():
                sleep(IDLE_SECONDS)
                if step == 0:
                    self.live.weights.add_(torch.randn_like(self.live.weights), alpha=IDLE_MOVE)
                return StepResult(0.0, 0, 0.0, 0)
            self.notes.add(0)

        def real() -> None:
            self.result = super(Paced, self).local_step(step, batch, positions)

        self.pace.step(real)
        if self.pace.steps % self.config.local_steps == 0:
            self.notes.add(self.pace.steps)
        assert self.result is not None, "the first step is a real one"
        return self.result
