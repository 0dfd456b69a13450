"""Lies about work: contributions that nobody trained, and audits that say what their author likes."""

from __future__ import annotations

from random import Random

from p2ptrain.core.events import Publish
from p2ptrain.core.messages import STRENGTH_MAX, Z_MAX, AuditReport, Received
from p2ptrain.core.participant import Participant
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.rewriting import Liar, Said
from p2ptrain.sim.world import SimWorld

PRAISE, BLAME = (1_900, 1_000), (-Z_MAX, -STRENGTH_MAX)


class DoesNotWork(Liar):
    """Contributes well-formed numbers that come from no sequences of its own."""

    works = False


class FalseAudits(DoesNotWork):
    """Says of every contribution that an audit may be of, each round anew, what helps its fellows: all together accuse
    one honest member after the other, and praise themselves."""

    def __init__(self, rng: Random, signer: FakeSigner, world: SimWorld) -> None:
        super().__init__(rng, signer, world)
        self.said: tuple[bytes, int] = b"", 0  # branch and round

    def say(self, core: Participant, received: Received) -> list[Said]:
        return [] if isinstance(received.message, AuditReport) else [Publish(received.envelope)]

    def add(self, core: Participant) -> list[Said]:
        state = core.here.state
        if (state.branch, state.round) == self.said or self.me not in state.roster.seat:
            return []
        self.said = state.branch, state.round
        wanted = {(summons.key, summons.round, True) for summons in state.summons}
        honest = [node.key for node in self.world.nodes if node.honest and node.key in state.place]
        victim = honest[state.round // 8 % len(honest)]
        places = {place for place in state.taken_lately if place[0] == victim or not self._is_honest(place[0])}
        wanted |= {(*place, False) for place in places}
        made = []
        for key, number, is_summoned in sorted(wanted):
            if key != self.me:
                z, strength = BLAME if self._is_honest(key) else PRAISE
                made.append(self.signed(AuditReport(state.branch, number, key, z, strength, is_summoned, self.me)))
        return [Publish(each.envelope) for each in made]

    def _is_honest(self, key: bytes) -> bool:
        return self.world.node_of(key).honest
