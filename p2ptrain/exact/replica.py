"""The replica: what the swarm has agreed on, which every node computes to the same bit.

    check   says why a payload is refused, if it is
    apply   applies the payloads of a round to the state, exactly
    root    computes the digest that the members sign
    adopt   replaces the state by one that others have

It takes no step and knows no residual: whoever trains copies its weights. One thread changes it, and holds `lock` while
it does; so does whoever reads more than one thing of it. Payloads may be checked in any thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock, RLock

import numpy as np
import torch
from torch import Tensor

from p2ptrain.config import RunConfig
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.exact.codec import Contribution
from p2ptrain.exact.outer import Counted, Outer
from p2ptrain.exact.root import FLOAT_BYTES, covered_pieces, state_leaves, state_root
from p2ptrain.exact.shortage import where_it_fits

UNPACKED_BYTES = 64 * 2**20  # of contributions kept unpacked between their check and their round; a guess
WEIGHTS_PREFIX, MOMENTUM_NAME = "weights.", "momentum"  # of the state's tensors, by name
CPU = torch.device("cpu")

NamedShapes = Sequence[tuple[str, Sequence[int]]]


class Replica:
    """The weights of a run, and its outer momentum if there is one; zeros until `adopt` or `restore`.

    named_shapes: of the weights, in the model's order"""

    def __init__(self, run: RunConfig, named_shapes: NamedShapes, device: torch.device = CPU) -> None:
        self.run = run
        self.names = [name for name, _ in named_shapes]
        self.outer = Outer.of(run, [shape for _, shape in named_shapes])
        # Changed in place. On the worker's device if it has room, else in main memory: the bits are the same.
        self.state = where_it_fits(lambda where: torch.zeros(self.outer.state_numbers, device=where), device)
        self.round = 0  # rounds applied
        self.adopted = 0  # states adopted
        self.update_norm: float | None = None  # of the last round's update; None: the state is not from an update here
        self.lock = RLock()
        # By payload, the most recently checked last: how many rounds were applied then, and the contribution.
        self.unpacked: OrderedDict[bytes, tuple[int, Contribution]] = OrderedDict()
        self._unpacked_lock = Lock()

    @property
    def weights(self) -> Tensor:
        return self.state[: self.outer.parameters]

    @property
    def state_bytes(self) -> int:
        return self.outer.state_numbers * FLOAT_BYTES

    @property
    def gradient_bytes(self) -> int:
        """The size of a gradient in fp32, as which contributions might be sent."""
        return self.outer.parameters * FLOAT_BYTES

    def named(self, state: Tensor | None = None) -> dict[str, Tensor]:
        """Returns views of the state's tensors, or of a copy's, by the names that they have in a file."""
        state = self.state if state is None else state
        weights, momentum = state[: self.outer.parameters], state[self.outer.parameters :]
        named = dict(zip((WEIGHTS_PREFIX + name for name in self.names), self.outer.parts(weights), strict=True))
        return named | ({MOMENTUM_NAME: momentum} if len(momentum) else {})

    # -- Rounds -------------------------------------------------------------------------------------

    def check(self, payload: bytes) -> str | None:
        """Returns why a payload is refused, or None if it is good."""
        try:
            contribution = self.outer.unpack(payload)
        except RemoteProtocolError as error:
            return error.why
        self.keep(payload, contribution)
        return None

    def keep(self, payload: bytes, contribution: Contribution) -> None:
        """Keeps what a payload contains, so that `apply` need not unpack it."""
        with self._unpacked_lock:
            self.unpacked[payload] = self.round, contribution
            while len(self.unpacked) * self.outer.contribution_bytes > UNPACKED_BYTES:
                self.unpacked.popitem(last=False)

    @torch.no_grad()
    def apply(self, number: int, payloads: Sequence[bytes]) -> Counted:
        """Applies a round, counted from 1, from payloads that `check` found good, in the order of their authors."""
        assert number == self.round + 1, f"round {number} cannot follow {self.round} applied rounds"
        with self.lock:
            counted = self.outer.apply(self.state, self.round, payloads, self._take_unpacked(payloads))
            self.round, self.update_norm = number, counted.norm
        return counted

    @torch.no_grad()
    def weights_before(self, rounds: Sequence[Sequence[bytes]]) -> Tensor:
        """Returns the weights before the last rounds, but for rounding; these are their payloads, the newest last."""
        with self.lock:
            state, number = self.state.clone(), self.round
        for payloads in reversed(rounds):
            number -= 1
            self.outer.undo(state, number, payloads)
        return state[: self.outer.parameters]

    def _take_unpacked(self, payloads: Sequence[bytes]) -> dict[bytes, Contribution]:
        """Removes these contributions, and those that came too late for a round, and returns the former."""
        oldest = self.round - self.run.agreement.staleness_rounds_max
        with self._unpacked_lock:
            taken = {payload: self.unpacked.pop(payload)[1] for payload in payloads if payload in self.unpacked}
            while self.unpacked and next(iter(self.unpacked.values()))[0] < oldest:
                self.unpacked.popitem(last=False)
        return taken

    def root(self, manifest: bytes = bytes(32)) -> bytes:
        """Computes the root of the state; the manifest's digest draws the sample of a large one."""
        return state_root(self.state, covered_pieces(self.state_bytes, self.run.state, self.round, manifest))

    def leaves(self) -> list[bytes]:
        """Hashes the pieces of the state."""
        return state_leaves(self.state)

    # -- States from elsewhere ----------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self, number: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Continues from the state that others have after round `number`. Invalid pieces change nothing."""
        assert number >= 0, f"the state of round {number}"
        received, size, is_aligned = torch.empty(self.outer.state_numbers), 0, True
        for piece in pieces:
            start, size = size // FLOAT_BYTES, size + len(piece)
            is_aligned = is_aligned and len(piece) % FLOAT_BYTES == 0
            if is_aligned and size <= self.state_bytes:  # otherwise it is refused for its size
                values = np.frombuffer(piece, dtype="<f4")
                if not np.isfinite(values).all():
                    raise RemoteProtocolError("the state has a weight that is not finite")
                received[start : start + len(values)] = torch.from_numpy(values.copy())
        if size != self.state_bytes or not is_aligned:
            raise RemoteProtocolError(f"the state has {size} bytes; this run's has {self.state_bytes}")
        with self.lock:
            self.state.copy_(received)
            self.round, self.adopted, self.update_norm = number, self.adopted + 1, None

    @torch.no_grad()
    def restore(self, number: int, named: dict[str, Tensor]) -> None:
        """Continues from a state that was saved after round `number`: tensors as `named` returns them."""
        with self.lock:
            for name, tensor in self.named().items():
                tensor.copy_(named[name])
            self.round, self.update_norm = number, None
