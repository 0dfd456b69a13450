"""The node: events in, effects out.

Most messages only increase a count, and the node advances when the count reaches a threshold. So it rests: while
nothing that its parts count (`Participant.counted`) has changed and the deadline has not passed, it does nothing.

A single deadline stands for all timers. Only time in which the node ran counts: a clock that jumps back is treated as
having stood still, and so is one that jumps far beyond the deadline, because the machine slept or the clock was set."""

from __future__ import annotations

from math import inf, nextafter
from random import Random

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.context import Context, Signer
from p2ptrain.core.participant import Participant
from p2ptrain.core.view import NodeView

GAP_SECONDS = 5.0  # after the deadline: if the driver is later than this, the machine slept


class Node:
    """The protocol's state machine for one participant."""

    def __init__(self, run: RunConfig, run_id: bytes, me: bytes, signer: Signer, rng: Random) -> None:
        self.context = Context(run, run_id, me, signer, rng)
        self.deadline: float | None = None
        self.participant: Participant | None = None  # before `Started`
        self._view = NodeView(self.context, lambda: self.participant)
        self._last = 0.0
        self._shift = 0.0  # from the driver's clock to ours, which never jumps or goes back
        self._due = 0.0  # the deadline on our own clock
        self._rested: tuple[object, ...] | None = None  # what was counted after the last advance; None: must not rest

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        context, before, node = self.context, self._shift, self.participant
        if now < self._last:
            self._shift += self._last - now
        self._last = now
        slept = self.deadline is not None and now > self.deadline + GAP_SECONDS
        if self.deadline is not None and slept:
            self._shift -= now - self.deadline
        if now + self._shift < context.now:  # a rounding error
            self._shift = context.now - now
        context.now = max(context.now, now + self._shift)
        if isinstance(event, ev.Started):
            node = self.participant = Participant(context, event)
        else:
            assert node is not None, "a node starts first"
            if slept:
                node.wake()
            node.take(event)
        is_quiet = type(event) is ev.MessageReceived and not context.effects and self._shift == before
        if is_quiet and context.now < self._due and self._rested is not None and node.counted == self._rested:
            return []  # nothing to do, and the deadline is unchanged
        self._rest_until(node.go_on())
        self._rested = node.counted if node.may_rest else None
        effects, context.effects = context.effects, []
        return effects

    def _rest_until(self, due: float) -> None:
        """Sets the deadline to this time of our own clock."""
        self._due, self.deadline = due, due - self._shift
        while self.deadline + self._shift < due:  # if rounded down, the tick would come slightly early
            self.deadline = nextafter(self.deadline, inf)

    def view(self) -> NodeView:
        """Returns the read-only view of the node, for everyone outside the core."""
        return self._view

    def limits(self) -> dict[str, tuple[int, int]]:
        assert self.participant is not None, "a node starts first"
        return self.participant.limits()
