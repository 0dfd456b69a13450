"""Differential privacy for own data: DP-SGD (Abadi et al. 2016, arXiv 1607.00133) inside a node's local steps.

Each step draws every sequence of the data by itself, with one probability (Poisson sampling), limits the norm of each
one's gradient to `clip`, and adds Gaussian noise of `noise` times that to their sum. Whatever is made of these
gradients afterwards, the contributions above all, tells at most epsilon of any one sequence, but for a chance of delta.

Each step costs a part of epsilon, which Google's dp-accounting works out (Rényi differential privacy; adding or
removing a sequence). The steps of all runs add up in one ledger in the data directory. They are written there before
they are taken, so that a crash cannot make one free. Noise is new in each training, from the system's random numbers:
a training that was lost in a crash is not repeated but taken anew, and paid for again. The same noise on different
gradients would give their difference away.

The loss of a step is not protected, so it is never announced."""

from __future__ import annotations

import logging
import secrets
from bisect import bisect_right
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from msgspec import Meta
from numpy.typing import NDArray

from p2ptrain.config import PrivacyConfig, RunConfig
from p2ptrain.data.assignment import Positions
from p2ptrain.errors import ConfigError, DataError, PrivacySpentError
from p2ptrain.files import trouble, write_atomically

LEDGER_NAME = "privacy.json"
LEDGER_BYTES_MAX = 2**20
COUNT_MAX = 2**53  # exact as floating-point numbers
ENTRIES_MAX = 1_000  # different settings on one node; each takes 0.1 s at a start
NORM_MARGIN = 1 + 1e-6  # scaling rounds to fp32
INSTALL = "Run: pip install 'p2ptrain[privacy]'"

log = logging.getLogger("p2ptrain.train")


class Spent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of one kind that were paid for."""

    expected: Annotated[int, Meta(ge=1)]  # sequences that a step draws on average, of
    sequences: Annotated[int, Meta(lt=COUNT_MAX)]  # this many
    noise: Annotated[float, Meta(ge=0.01, le=1e4)]
    steps: Annotated[int, Meta(ge=0, lt=COUNT_MAX)]

    @property
    def kind(self) -> tuple[int, int, float]:
        return self.expected, self.sequences, self.noise


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that was told of sequences of one length."""

    length: int  # tokens
    steps: list[Spent]


class SpentSteps:
    """The steps that this node has taken on its owner's data, in a file that is on the disk before a step is taken."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length
        told = _read(path) or Told(length, [])
        if told.length != length:
            what = f"{path} counts what was told of sequences of {told.length} tokens, and this run's have {length}"
            fix = "Such sums mean nothing: join a run with sequences of that length"
            raise ConfigError(what, key="privacy", fix=fix)
        self._steps = {entry.kind: entry.steps for entry in told.steps}

    @property
    def steps(self) -> int:
        return sum(self._steps.values())

    def with_steps(self, kind: tuple[int, int, float], steps: int) -> dict[tuple[int, int, float], int]:
        """Returns all steps by their kind, with so many more."""
        return self._steps | {kind: self._steps.get(kind, 0) + steps}

    def add(self, kind: tuple[int, int, float], steps: int) -> None:
        if kind not in self._steps and len(self._steps) >= ENTRIES_MAX:
            raise DataError(f"{self.path}: {ENTRIES_MAX} kinds of steps are noted, more than can be added up")
        later = self.with_steps(kind, steps)
        entries = [Spent(*kind, steps) for kind, steps in sorted(later.items())]
        write_atomically(self.path, msgspec.json.format(msgspec.json.encode(Told(self.length, entries))))
        self._steps = later


def _read(path: Path) -> Told | None:
    """Returns what is in the file; None if there is no file."""
    if not path.exists():
        return None
    try:
        with trouble(path, "cannot be read"):
            encoded = path.read_bytes()
        told = msgspec.json.decode(encoded[:LEDGER_BYTES_MAX], type=Told)
        kinds = {each.kind for each in told.steps if each.expected <= each.sequences}
        if len(kinds) < len(told.steps):
            raise msgspec.ValidationError("a number is not possible")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        what = f"{path}: what was told of this machine's data so far cannot be read ({str(error)[:100]})"
        raise DataError(f"{what}. Restore the file from a copy; if you delete it, the budget begins anew") from error
    return told


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

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of orders that it leaves out
    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(expected / sequences, GaussianDpEvent(noise)))
    divergence: NDArray[np.float64] = np.maximum(accountant.rdp, 0)  # tiny ones round to less
    return divergence


class Privacy:
    """The privacy of a node's own data in one run: what a step draws, what is added to its gradient, what it costs.

    expected: sequences that a step draws on average, of so many"""

    def __init__(self, config: PrivacyConfig, expected: int, sequences: int, ledger: SpentSteps) -> None:
        self.expected, self.sequences, self.ledger = expected, sequences, ledger
        self.budget, self.delta = float(config.epsilon), float(config.delta)
        self._clip, self._noise = float(config.clip), float(config.noise)
        self._kind = expected, sequences, self._noise
        self.spent = self.epsilon()  # of the budget, by all steps so far
        self._not_begun = 0  # steps that are paid for

    def __str__(self) -> str:
        return f"epsilon {self.spent:.2f} of {self.budget:g} is spent (delta {self.delta:g})"

    def epsilon(self, steps: int = 0) -> float:
        """Returns the epsilon of all steps so far, and of so many more."""
        return epsilon_of(self.ledger.with_steps(self._kind, steps), self.delta)

    def steps_left(self, most: int = 2**40) -> int:
        """Returns how many more steps the budget allows."""
        return bisect_right(range(1, most + 1), self.budget, key=self.epsilon)

    def spend(self, steps: int) -> None:
        """Pays for steps that are about to be taken. PrivacySpentError if the budget does not allow all of them."""
        if self.epsilon(steps) > self.budget:
            raise PrivacySpentError(self.spent, self.budget)
        self._pay(steps)
        self._not_begun = steps

    def settle(self) -> None:
        """Takes back what was paid for steps that were not begun."""
        try:
            if self._not_begun > 0:
                self._pay(-self._not_begun)
        except DataError as error:  # what was trained is good all the same
            log.warning("%s; %d steps stay paid that were not taken", error, self._not_begun)
        self._not_begun = 0

    def _pay(self, steps: int) -> None:
        self.ledger.add(self._kind, steps)
        self.spent = self.epsilon()

    def draw(self) -> Positions:
        """Draws each sequence by itself, with the same probability."""
        self._not_begun -= 1
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
    uniform = ((np.frombuffer(stream, "<u8") >> 12) + 0.5) * 2.0**-52  # never 0 or 1
    radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def open_privacy(run: RunConfig, config: PrivacyConfig, directory: Path, sequences: int) -> Privacy | None:
    """Opens the ledger in a data directory; None without privacy. ConfigError if not one round fits the budget."""
    path = directory / LEDGER_NAME
    if not config.is_on:
        if path.exists():  # a forgotten --config would train without noise, and nobody would notice
            what = f"{path} says that this machine's data has a privacy budget, and the settings have none"
            fix = "Name the file with [privacy] again (--config), or remove that one"
            raise ConfigError(what, key="privacy", fix=fix)
        return None
    refuse_without_own_steps(run, config, has_loop=False)
    try:
        import dp_accounting  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigError("needs dp-accounting", key="privacy", fix=INSTALL) from error
    if float(config.delta) * sequences >= 1:
        what = f"{float(config.delta):g} would allow to give away one of {sequences} sequences whole"
        raise ConfigError(what, key="privacy.delta", fix=f'Set it to "1/{10 * sequences}" or less')
    expected = min(run.recipe.step_sequences, sequences)
    privacy = Privacy(config, expected, sequences, SpentSteps(path, run.model.sequence_length))
    steps, left = run.recipe.local_steps, privacy.steps_left()
    alone = {(expected, sequences, float(config.noise)): steps}  # as if there had been none before
    if (needed := epsilon_of(alone, privacy.delta)) > privacy.budget:
        what = f"{privacy.budget:g} allows no round: {steps} steps with noise {float(config.noise):g} on {sequences} "
        what += f"sequences, {expected} of them in a step, take {needed:.2f}"
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
    if plugin := run.recipe.plugin or run.model.plugin:
        what = f"the plug-in {plugin} may keep or send more of the data than this section covers"
        raise ConfigError(what, key="privacy", fix="Remove the section, or join a run without plug-ins")
