"""The devices and lines of simulated nodes: training, applying and fetching take time and come back as events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.auditing import OTHERS
from p2ptrain.core.messages import Z_MAX
from p2ptrain.core.pace import takes_another
from p2ptrain.digest import digest
from p2ptrain.sim.ledger import Violation
from p2ptrain.sim.machine import SavedState, SimNode
from p2ptrain.sim.topology import DIAL_SECONDS, REQUEST_BYTES
from p2ptrain.sim.world import SimWorld

CHECK_SECONDS = 0.001  # to check a payload's digest and decode it
HONEST_CLAIMS = range(2_000_000, 3_000_000)  # losses that honest nodes measure, in millionths of a nat
FALSE_CLAIMS = (1, 2**40)
SET, WORK_Z = 8, 1.4  # sequences of a set; the z of its author's work, in one
FLOAT_NOISE = 20  # thousandths that two machines differ by


def claims_of(node: SimNode, number: int) -> tuple[int, int]:
    """Returns the losses that a node claims of a round: of its training, and held-out. Every liar lies in them."""
    draw = digest("simulated loss", node.key, number.to_bytes(8, "little"))
    claims = HONEST_CLAIMS if node.honest else FALSE_CLAIMS
    first, second = (claims[int.from_bytes(part, "little") % len(claims)] for part in (draw[:8], draw[8:16]))
    return first, second


def measured(payload: bytes, is_work: bool, sequences: int) -> tuple[int, int]:
    """Returns what all who audit a contribution measure, but for the last digits: z has a spread that sinks with the
    number of sets, as the matched filter's has early in a run (docs/explanation/matched-filter.md)."""
    draw = Random(f"{payload.hex()} {sequences}")
    spread = max(0.3, 1.1 / math.sqrt(max(1, sequences // SET)))
    z = draw.gauss(WORK_Z if is_work else 0.0, spread)
    return round(1_000 * max(-2.0, min(z, 2.0))), round(1_000 * draw.gauss(1.0, 0.09))


class Devices:
    def __init__(self, world: SimWorld, rng: Random, give: Callable[[SimNode, ev.Event], None]) -> None:
        self.world, self.rng, self.give = world, rng, give
        self.states: dict[bytes, tuple[int, bytes]] = {}  # by root: the round, and the manifest that led to it

    def forget(self, before: int) -> None:
        self.states = {root: led for root, led in self.states.items() if led[0] >= before}

    def train(self, node: SimNode, effect: ev.Train) -> None:
        accelerator, training = node.accelerator, self.world.setup.scenario.training
        if accelerator.training is not None:
            raise Violation(f"node {node.index} began to train for round {effect.round} while it was training")
        if effect.base_round > node.state.round:
            raise Violation(f"node {node.index} trains from round {effect.base_round} and has {node.state.round}")
        accelerator.train(effect)
        seconds = training.seconds * accelerator.pace * (1.0 + training.spread * self.rng.uniform(-0.5, 0.5))
        recipe, calendar = self.world.setup.run_config.recipe, self.world.calendar
        if recipe.local_steps_min:
            step_seconds = seconds / recipe.local_steps
            calendar.timer(node, calendar.now + step_seconds, self._stepped, node, effect, 1, step_seconds)
        else:
            calendar.timer(node, calendar.now + seconds, self._trained, node, effect, recipe.local_steps)

    def keep_pace(self, node: SimNode, effect: ev.Pace) -> None:
        node.accelerator.keep_pace(effect, self.world.calendar.now)

    def _stepped(self, node: SimNode, effect: ev.Train, done: int, step_seconds: float) -> None:
        recipe, calendar = self.world.setup.run_config.recipe, self.world.calendar
        usual, last = node.accelerator.seconds_left(effect.round, calendar.now)
        if takes_another(done, recipe.local_steps_min, recipe.local_steps, step_seconds, usual, last):
            calendar.timer(node, calendar.now + step_seconds, self._stepped, node, effect, done + 1, step_seconds)
        else:
            self._trained(node, effect, done)

    def _trained(self, node: SimNode, effect: ev.Train, steps: int) -> None:
        accelerator = node.accelerator
        if accelerator.stalled_until > self.world.calendar.now:
            self.world.calendar.timer(node, accelerator.stalled_until, self._trained, node, effect, steps)
            return
        accelerator.train(None)
        name, payload = self.world.payloads.make(node, effect.round, effect.base_round)
        node.held_payloads.add(name)
        loss, held_out = claims_of(node, effect.round)
        size, attachment, content = payload.payload_bytes, payload.attachment, payload.content
        said = held_out if effect.evaluates else 0
        applies_between = self.world.setup.run_config.agreement.staleness_rounds_max > 0
        base = node.state.round if applies_between else effect.base_round
        done = ev.TrainingFinished(effect.round, name, size, attachment, steps, loss, said, base, content=content)
        self.give(node, done)

    def _on_device(self, node: SimNode, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Calls `action` once the node's device has finished this job and those queued before it."""
        done_at = node.accelerator.book(self.world.calendar.now, seconds)
        self.world.calendar.timer(node, done_at, action, node, *arguments)

    def audit(self, node: SimNode, effect: ev.Audit) -> None:
        recipe, training = self.world.setup.run_config.recipe, self.world.setup.scenario.training
        share = OTHERS * effect.sequences / (recipe.local_steps * recipe.step_sequences)
        self._on_device(node, share * training.seconds * node.accelerator.pace, self._audited, effect)

    def _audited(self, node: SimNode, effect: ev.Audit) -> None:
        taken, number = effect.taken, effect.manifest.round
        self.world.metrics.audits[node.index] += 1
        payload = self.world.payloads.by_name.get(taken.payload)
        if payload is None:
            self.give(node, ev.Audited(number, taken.author, why="it is long forgotten"))
            return
        z, strength = measured(taken.payload, payload.is_work, effect.sequences)
        noise = self.rng.randint(-FLOAT_NOISE, FLOAT_NOISE)
        self.give(node, ev.Audited(number, taken.author, max(-Z_MAX, min(z + noise, Z_MAX)), strength + noise))

    def apply(self, node: SimNode, effect: ev.Apply) -> None:
        for taken in effect.manifest.taken if node.honest else ():
            if taken.payload not in node.held_payloads:
                raise Violation(f"node {node.index} applies round {effect.manifest.round} and lacks a payload of it")
        self._on_device(node, self.world.setup.scenario.training.apply_seconds, self._applied, effect)

    def _applied(self, node: SimNode, effect: ev.Apply) -> None:
        state, manifest = node.state, effect.manifest
        follows = manifest.parent in (state.head, manifest.branch)
        if node.honest and (manifest.round != state.round + 1 or not follows):
            raise Violation(f"node {node.index} applies round {manifest.round} to the state of round {state.round}")
        root = digest("simulated state", state.root, manifest.digest)
        self.states[root] = (manifest.round, manifest.digest)
        self._become(node, manifest.round, root)
        node.state.note_applied(manifest)
        self.world.metrics.applied(node, manifest, self.world.calendar.now)
        self.give(node, ev.Applied(manifest.branch, manifest.round, root))
        self.world.goal.look()

    def _become(self, node: SimNode, number: int, root: bytes) -> None:
        _, head = self.states.get(root, (number, self.world.setup.genesis.head))
        node.state.become(number, root, head, node.disk.kept, self.world.calendar.now)
        if number % self.world.setup.scenario.disk.checkpoint_rounds == 0:
            node.disk.save_checkpoint(SavedState(number, root, head))

    def catch_up(self, node: SimNode, effect: ev.CatchUp) -> None:
        """Loads the newest state that any node serves. Pieces are checked on arrival, so no wrong state gets in."""
        seconds = 0.0
        node.accelerator.begin_catching_up(effect)
        saved = {checkpoint.root for checkpoint in node.disk.checkpoints}
        found = next((place for place in effect.roots if place[1] in saved), None)
        is_mine = found is not None
        for key in effect.sources:
            source = self.world.node_of(key)
            served = next((place for place in effect.roots if self._serves_state(source, place, node)), None)
            reached = self.world.reach(node, key, REQUEST_BYTES)
            if reached is None:
                seconds += DIAL_SECONDS
            elif served is None or (found is not None and served[0] <= found[0]):
                seconds += 0.1
            else:
                size = self.world.setup.scenario.training.state_bytes
                at = self.world.network.stream(source.index, node.index, self.world.calendar.now, size)
                seconds += at - self.world.calendar.now if at is not None else DIAL_SECONDS
                if at is not None:
                    found, is_mine = served, False
        self._on_device(node, seconds, self._caught_up, effect, found, is_mine)

    def _serves_state(self, source: SimNode, place: tuple[int, bytes], node: SimNode) -> bool:
        """Whether a node can serve this state: it keeps the newest, and one every few rounds."""
        kept, (number, root) = source.state.kept, place
        every = self.world.setup.scenario.disk.checkpoint_rounds
        is_kept = place in kept and (number % every == 0 or place == [*kept][-1])
        return is_kept and (source.liar is None or source.liar.serves(root, node.key))

    def _caught_up(self, node: SimNode, effect: ev.CatchUp, found: tuple[int, bytes] | None, is_mine: bool) -> None:
        if node.accelerator.catching is not effect:
            return  # another attempt has begun
        if found is None:
            self.give(node, ev.CatchUpFailed("nobody has it", effect.attempt))
            return
        self.world.metrics.states_fetched[node.index] += not is_mine
        node.state.mend()
        self._become(node, *found)
        self.give(node, ev.CaughtUp(*found, effect.attempt))
        self.world.goal.look()

    # -- Payloads -----------------------------------------------------------------------------------

    def fetch(self, node: SimNode, effect: ev.Fetch) -> None:
        self.world.calendar.timer(
            node, self.world.calendar.now + CHECK_SECONDS, self._try_source, node, effect, deque(effect.sources)
        )

    def _try_source(self, node: SimNode, effect: ev.Fetch, sources: deque[bytes]) -> None:
        if effect.payload in node.held_payloads and effect.payload in self.world.payloads.by_name:
            self._have(node, effect.payload)
        elif sources:
            source = sources.popleft()
            reached = self.world.reach(node, source, REQUEST_BYTES)
            if reached:
                self.world.calendar.timer(node, reached[1], self._serve, node, effect, sources, reached[0])
            else:
                self._failed(node, effect, sources, source, "cannot be reached", DIAL_SECONDS)

    def _serve(self, node: SimNode, effect: ev.Fetch, sources: deque[bytes], source: SimNode) -> None:
        payload = self.world.payloads.by_name.get(effect.payload)
        withholds = source.liar is not None and not source.liar.serves(effect.payload, node.key)
        why = ""
        if payload is None or effect.payload not in source.held_payloads or withholds:
            why = "does not have it"
        elif payload.payload_bytes != effect.payload_bytes:
            why = "has another length"
        size = REQUEST_BYTES if why else effect.payload_bytes
        network, calendar = self.world.network, self.world.calendar
        at = network.stream(source.index, node.index, calendar.now, size) if source.alive else None
        if at is None:
            self._failed(node, effect, sources, source.key, "lost", DIAL_SECONDS)
        elif why:
            self._failed(node, effect, sources, source.key, why, 0.0)
        else:
            self.world.metrics.sent("payload", effect.payload_bytes)
            calendar.timer(node, at + CHECK_SECONDS, self._came, node, effect.payload)

    def _failed(
        self, node: SimNode, effect: ev.Fetch, sources: deque[bytes], source: bytes, why: str, seconds: float
    ) -> None:
        at = self.world.calendar.now + seconds
        self.world.calendar.timer(node, at, self.give, node, ev.FetchFailed(effect.payload, source, why))
        self.world.calendar.timer(node, at, self._try_source, node, effect, sources)

    def _came(self, node: SimNode, payload: bytes) -> None:
        self.world.metrics.payloads_fetched[node.index] += 1
        node.held_payloads.add(payload)
        self._have(node, payload)

    def _have(self, node: SimNode, payload: bytes) -> None:
        held = self.world.payloads.by_name[payload]
        self.give(node, ev.PayloadArrived(payload, held.good, held.author, held.payload_bytes, held.content))
