"""Differential privacy for own data: DP-SGD (Abadi et al. 2016, arXiv 1607.00133) inside a node's local steps.

Each step draws every sequence of the data by itself, with one probability (Poisson sampling), limits the norm of each
one's gradient to `clip`, and adds Gaussian noise of `noise` times that to their sum. Whatever is made of these
gradients afterwards, the contributions above all, tells at most epsilon of any one sequence, but for a chance of delta.

Each step costs a part of epsilon, which Google's dp-accounting works out (Rényi differential privacy; adding or
removing a sequence). The steps of all runs add up in one ledger in the data directory. They are written there before
they are taken, so that a crash cannot make one free. Noise is new in each training, from the system's random numbers:
a training that was lost in a crash is not repeated but taken anew, and paid for again. The same noise on different
gradients would give their difference away.

The loss of a step is not protected, so it is never announced.
"""

from __future__ import annotations

import logging
import secrets
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from p2ptrain.config import PrivacyConfig, RunConfig
from p2ptrain.errors import ConfigError, DataError, PrivacySpentError
from p2ptrain.files import trouble, write_atomically
from p2ptrain.learn.assignment import Positions

LEDGER_NAME = "privacy.json"
LEDGER_BYTES_MAX = 2**20
ENTRIES_MAX = 1_000  # different settings on one node; each takes 0.1 s at a start
NORM_MARGIN = 1 + 1e-4  # a norm of millions of squares in fp32 is off by less
INSTALL = "Run: pip install 'p2ptrain[privacy]'"

log = logging.getLogger("p2ptrain.learn")


class Spent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of one kind that were paid for."""

    expected: int  # sequences that a step draws on average, of
    sequences: int  # this many
    noise: float
    steps: int

    @property
    def kind(self) -> tuple[int, int, float]:
        return self.expected, self.sequences, self.noise


class SpentSteps:
    """The steps that this node has taken on its owner's data, in a file that is on the disk before a step is taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._steps = {entry.kind: entry.steps for entry in _read(path)}

    @property
    def steps(self) -> int:
        return sum(self._steps.values())

    def with_steps(self, kind: tuple[int, int, float], steps: int) -> dict[tuple[int, int, float], int]:
        """Returns all steps by their kind, with so many more."""
        return self._steps | {kind: self._steps.get(kind, 0) + steps}

    def add(self, kind: tuple[int, int, float], steps: int) -> None:
        if kind not in self._steps and len(self._steps) >= ENTRIES_MAX:
            raise DataError(f"{self.path}: {ENTRIES_MAX} kinds of steps are noted, more than can be added up")
        self._steps = self.with_steps(kind, steps)
        entries = [Spent(*kind, steps) for kind, steps in sorted(self._steps.items())]
        write_atomically(self.path, msgspec.json.format(msgspec.json.encode(entries)))


def _read(path: Path) -> list[Spent]:
    try:
        with trouble(path, "cannot be read"):
            encoded = path.read_bytes() if path.exists() else b"[]"
        entries = msgspec.json.decode(encoded[:LEDGER_BYTES_MAX], type=list[Spent])
        if not all(0 < each.expected <= each.sequences and each.noise > 0 <= each.steps for each in entries):
            raise msgspec.ValidationError("a number is not possible")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        what = f"{path}: what was told of this machine's data so far cannot be read ({str(error)[:100]})"
        raise DataError(f"{what}. Restore the file from a copy; if you delete it, the budget begins anew") from error
    return entries


def epsilon_of(steps: dict[tuple[int, int, float], int], delta: float) -> float:
    """Returns the epsilon of all these steps together."""
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon  # noqa: PLC0415

    total = sum((count * _divergence(*kind) for kind, count in steps.items() if count), np.zeros(1))
    return float(compute_epsilon(DEFAULT_RDP_ORDERS, total, delta)[0]) if total.any() else 0.0


@cache
def _divergence(expected: int, sequences: int, noise: float) -> NDArray[np.float64]:  # [orders]
    """Returns the Rényi divergence of one step, for each of the library's orders; those of several steps add up."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent  # noqa: PLC0415
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415

    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(expected / sequences, GaussianDpEvent(noise)))
    divergence: NDArray[np.float64] = accountant.rdp
    return divergence


class Privacy:
    """The privacy of a node's own data in one run: what a step draws, what is added to its gradient, what it costs.

    expected: sequences that a step draws on average, of so many
    """

    def __init__(self, config: PrivacyConfig, expected: int, sequences: int, ledger: SpentSteps) -> None:
        self.expected, self.sequences, self.ledger = expected, sequences, ledger
        self.budget, self.delta = float(config.epsilon), float(config.delta)
        self._clip, self._noise = float(config.clip), float(config.noise)
        self._kind = expected, sequences, self._noise
        self.spent = self.epsilon()  # of the budget, by all steps so far

    def __str__(self) -> str:
        return f"epsilon {self.spent:.2f} of {self.budget:g} is spent (delta {self.delta:g})"

    def epsilon(self, steps: int = 0) -> float:
        """Returns the epsilon of all steps so far, and of so many more."""
        return epsilon_of(self.ledger.with_steps(self._kind, steps), self.delta)

    def steps_left(self, most: int = 2**40) -> int:
        """Returns how many more steps the budget allows."""
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.epsilon(middle) <= self.budget else (least, middle - 1)
        return least

    def spend(self, steps: int) -> None:
        """Pays for steps that are about to be taken. PrivacySpentError if the budget does not allow all of them."""
        if self.epsilon(steps) > self.budget:
            raise PrivacySpentError(self.spent, self.budget)
        self._pay(steps)

    def refund(self, steps: int) -> None:
        """Takes back what was paid for steps that were not begun."""
        if steps:
            self._pay(-steps)

    def _pay(self, steps: int) -> None:
        self.ledger.add(self._kind, steps)
        self.spent = self.epsilon()

    def draw(self) -> Positions:
        """Draws each sequence by itself, with the same probability."""
        generator = np.random.default_rng(secrets.randbits(256))
        count = generator.binomial(self.sequences, self.expected / self.sequences)
        return generator.choice(self.sequences, count, replace=False, shuffle=False).astype(np.int64)

    def clip(self, norm: float) -> float:
        """Returns what a gradient of this norm is multiplied by; one that is not finite counts as nothing."""
        return min(1.0, self._clip / max(norm * NORM_MARGIN, 1e-30)) if np.isfinite(norm) else 0.0

    def noise(self, count: int) -> NDArray[np.float64]:
        """Returns what is added to so many numbers of the sum of a step's gradients."""
        return gaussian(count) * (self._clip * self._noise)


def gaussian(count: int) -> NDArray[np.float64]:
    """Draws normal numbers (Box and Muller's way) that nobody can guess: torch's generator has 2**32 beginnings."""
    pairs = -(-count // 2)
    stream = Cipher(ChaCha20(secrets.token_bytes(32), bytes(16)), mode=None).encryptor().update(bytes(16 * pairs))
    uniform = ((np.frombuffer(stream, "<u8") >> 11) + 0.5) * 2.0**-53  # never 0 or 1
    radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def open_privacy(run: RunConfig, config: PrivacyConfig, directory: Path, sequences: int) -> Privacy | None:
    """Opens the ledger in a data directory; None without privacy. ConfigError if not one round fits the budget."""
    if not config.is_on:
        return None
    refuse_without_own_steps(run, config, has_loop=False)
    try:
        import dp_accounting  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigError("needs dp-accounting", key="privacy", fix=INSTALL) from error
    if float(config.delta) * sequences >= 1:
        what = f"{float(config.delta):g} would allow to give away one of {sequences} sequences whole"
        raise ConfigError(what, key="privacy.delta", fix=f"Set it to {1 / (10 * sequences):.1g} or less")
    expected = min(run.recipe.passes_per_step * run.recipe.sequences_per_pass, sequences)
    privacy = Privacy(config, expected, sequences, SpentSteps(directory / LEDGER_NAME))
    steps, left = run.recipe.local_steps, privacy.steps_left()
    if not privacy.ledger.steps and left < steps:
        what = f"{privacy.budget:g} allows no round: {steps} steps with noise {float(config.noise):g} on {sequences} "
        what += f"sequences, {expected} of them in a step, take {privacy.epsilon(steps):.2f}"
        raise ConfigError(what, key="privacy.epsilon", fix="Raise it or privacy.noise, or prepare more data")
    log.info("privacy: epsilon %.2f of %g is spent; %d more rounds fit", privacy.spent, privacy.budget, left // steps)
    return privacy


def refuse_without_own_steps(run: RunConfig, config: PrivacyConfig, *, has_loop: bool) -> None:
    """Refuses privacy where this node's own steps on its own data are not all that it sends."""
    if not config.is_on:
        return
    if run.data.source != "own":
        what = f"the training data of run {run.name} is shared, and has no privacy to keep"
        raise ConfigError(what, key="privacy", fix="Remove the section, or join a run whose nodes bring their own data")
    if has_loop:
        what = "a script takes its own steps, which get no noise here"
        raise ConfigError(what, key="privacy", fix="Remove the section, or take part without a script")
    if run.recipe.plugin:
        what = f"the recipe of plug-in {run.recipe.plugin} may send more than this section covers"
        raise ConfigError(what, key="privacy", fix="Remove the section, or join a run without such a recipe")
