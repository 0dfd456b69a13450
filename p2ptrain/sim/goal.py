"""The goal: the round that everyone has to reach, some rounds after the faults included. Reaching it ends the
simulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.sim.calendar import Calendar
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.scenario import Scenario


class Goal:
    """The round that every honest node has to apply, except nodes that are gone for good."""

    def __init__(self, scenario: Scenario, calendar: Calendar, nodes: Sequence[SimNode]) -> None:
        self.round = scenario.rounds
        self.resumed_at: float | None = None  # when everyone had made progress after the faults
        self._scenario, self._calendar, self._nodes = scenario, calendar, nodes
        self._next_look = 0.0

    def look(self) -> None:
        """Ends the simulation if the goal is reached; called after each applied round and each loaded state."""
        calendar = self._calendar
        if calendar.is_over or calendar.now < self._next_look:
            return
        self._next_look = calendar.now + min(1.0, self._scenario.training.seconds / 4)
        if calendar.now < self._scenario.end_of_faults:
            return
        waiting = [node for node in self._nodes if node.honest and not node.is_gone]
        if self.resumed_at is None and not self._has_resumed(waiting):
            return
        # If nobody is left, nobody has reached it.
        if waiting and all(node.alive and node.state.round >= self.round for node in waiting):
            calendar.stop()

    def faults_ended(self) -> None:
        """Notes that all faults are over, so that the swarm has to recover from here on."""
        self._next_look = 0.0
        self.look()

    def _has_resumed(self, waiting: Sequence[SimNode]) -> bool:
        """Whether everyone's state has advanced since the faults ended, on one branch."""
        since = self._scenario.end_of_faults
        branches = {node.disk.state.branch for node in waiting}
        if len(branches) > 1 or not all(node.alive and node.state.moved_at > since for node in waiting):
            return False
        self.resumed_at = self._calendar.now
        if self._scenario.fault:
            highest = max((node.state.round for node in waiting), default=0)
            self.round = max(self.round, highest + self._scenario.rounds_after)
        return True
