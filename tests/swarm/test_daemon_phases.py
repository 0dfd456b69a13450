"""A node killed in any phase of a round comes back with the same state as the others.

Which phase that is, its log of events tells: a core of the test's own runs again what is written there, as it is
written. It says when to kill, and afterwards how far the victim really was.
"""

from __future__ import annotations

from contextlib import closing
from time import monotonic

import msgspec
import pytest

from p2ptrain import replay
from tests.helpers.daemons import TEST_SECONDS, DaemonSwarm, StartableDaemon

PHASES = ("train", "collect", "agree", "apply")
KILLS_MAX = 5  # until one comes in time: some phases take a few milliseconds
PHASE_SECONDS = 60.0  # for a phase to come, and with it its round

pytestmark = pytest.mark.timeout(TEST_SECONDS)


class Shadow:
    """The core of a daemon, replayed from its event log so far."""

    def __init__(self, daemon: StartableDaemon) -> None:
        self._file = daemon.events()[-1].open("rb")
        header = msgspec.json.decode(self._file.readline(), type=replay.Header)
        self.node, self._signer = replay._node_of(header, {})
        self._rest = b""

    def phase(self) -> str:
        """Returns the phase after all events written so far."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            now, event, effects, signatures = msgspec.json.decode(line, type=replay.Line)
            self._signer.expect(signatures)
            assert replay.effects_digest(self.node.handle(event, now)) == effects
        return self.node.view().phase

    @property
    def number(self) -> int:
        return self.node.view().state.round + 1

    def close(self) -> None:
        self._file.close()


def killed_in(phase: str, victim: StartableDaemon) -> bool:
    """Kills a member as soon as it is in this phase. Returns whether it still was."""
    with closing(Shadow(victim)) as shadow:
        shadow.phase()
        number = shadow.number  # not in this round: what a start brings about is another matter
        victim.until(lambda: shadow.phase() == phase and shadow.number > number, PHASE_SECONDS, look=0.001)
        victim.kill()
        return shadow.phase() == phase


def until_back(victim: StartableDaemon, *others: StartableDaemon) -> float:
    """Waits until a node has caught up and is a member. Returns the seconds since it was started."""
    number = max(other.applied for other in others) + 1
    victim.until(lambda: victim.applied >= number and victim.is_member)
    return monotonic() - victim.started_at


def kill_in_each_phase(
    swarm: DaemonSwarm, victim: StartableDaemon, *others: StartableDaemon, phases: tuple[str, ...] = PHASES
) -> None:
    for phase in phases:
        kills, was_in_it = 0, False
        while not was_in_it:
            assert kills < KILLS_MAX, f"{kills} kills, and none in {phase}"
            kills, was_in_it = kills + 1, killed_in(phase, victim)
            victim.start()
            took = until_back(victim, *others)
        swarm.note(f"{victim.name} back after kill {kills} in {phase}", took)
    number = max(node.applied for node in swarm.daemons) + 1
    for node in swarm.daemons:
        node.until_applied(number)
    for node in swarm.daemons:  # nobody has said two things of one round, and nobody came to another state
        counters = node.status()["counters"]
        assert {name for name in ("root mismatches", "lies proved") if counters.get(name)} == set()
    assert swarm.compared() > len(phases)


def test_the_first_node_is_killed_while_a_round_is_agreed_on(swarm: DaemonSwarm) -> None:
    first, second, third = swarm.of(3)
    kill_in_each_phase(swarm, first, second, third, phases=("agree",))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_whoever_is_killed_in_any_phase_comes_back_to_the_same_state(victim: int, swarm: DaemonSwarm) -> None:
    others = swarm.of(3)
    kill_in_each_phase(swarm, others.pop(victim), *others)
