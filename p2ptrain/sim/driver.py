"""The driver of simulated nodes: carries out effects, as the daemon does with the real world.

In which order, and what waits for the disk, is the effect queue's business, here as there (core/effect_queue.py).
Training, applying and fetching take their time and come back as events. The state of a model is a chain of digests:
what is applied to the same state gives the same state, and nothing else does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from p2ptrain.core import events as ev
from p2ptrain.core.history import History, decode_history, encode_history
from p2ptrain.core.messages import Message, payload_digest
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.sim.checkers import Violation
from p2ptrain.sim.disk import Checkpoint
from p2ptrain.sim.liars import ToSome
from p2ptrain.sim.machine import SimNode

if TYPE_CHECKING:
    from p2ptrain.sim.cluster import Cluster

DIAL_SECONDS = 3.0  # until an unreachable peer is given up
HISTORY_SECONDS = 8.0  # until an answer is given up
REDIAL_SECONDS = 20.0  # until a peer that was disconnected is there again
CHECK_SECONDS = 0.001  # for a payload's digest and strict decoder
REQUEST_BYTES = 100  # a request on a stream
Actions = dict[type, Callable[[SimNode, Any], None]]


class Payload(Struct, frozen=True):
    """A payload that exists somewhere."""

    payload_bytes: int
    good: bool
    attachment: bytes  # empty: too large to ride along


class Driver:
    """Of all nodes of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rng = cluster.stream("driver")
        self.payloads: dict[bytes, Payload] = {}
        self.states: dict[bytes, tuple[int, bytes]] = {}  # by root: the round, and the manifest that led to it
        self.slow_disks: dict[int, float] = {}  # by node: how long it takes now
        self.trainings = count()
        self.questions = count()
        self._actions: Actions = {
            ev.Publish: self._publish,
            ToSome: self._publish_to_some,
            ev.Send: self._send,
            ev.Ask: self._ask,
            ev.Fetch: self._fetch,
            ev.Train: self._train,
            ev.Apply: self._apply,
            ev.Return: self._return,
            ev.Persist: lambda node, effect: None,  # it is on the disk
            ev.NoteWrongState: self._note_wrong_state,
            ev.CatchUp: self._catch_up,
            ev.AskHistory: self._ask_history,
            ev.SendHistory: self._send_history,
            ev.Disconnect: self._disconnect,
            ev.Stop: self._stop,
        }

    # -----------------------------------------------------------------------------------------------
    # The order of effects, and the disk

    def carry_out(self, node: SimNode, effects: Sequence[ev.Effect | ToSome]) -> None:
        node.process.queue.add(effects)
        self._go_on(node)

    def _go_on(self, node: SimNode) -> None:
        """Carry out what waits, as far as the disk allows."""
        process = node.process

        def act(effect: ev.Effect | ToSome) -> None:
            self._actions[type(effect)](node, effect)
            if process.fuse is not None:
                process.fuse -= 1
                if process.fuse <= 0:
                    self.cluster.kill(node)

        if records := process.queue.carry_out(act):
            mean = self.slow_disks.get(node.index, self.cluster.scenario.disk.fsync_seconds)
            seconds = self.rng.expovariate(1.0 / mean) if mean else 0.0
            self.cluster.timer(node, self.cluster.now + seconds, self._written, node, records)

    def _written(self, node: SimNode, records: Sequence[ev.Record]) -> None:
        self.write(node, records)
        node.process.queue.written()
        self._go_on(node)

    def write(self, node: SimNode, records: Sequence[ev.Record]) -> None:
        """These records are on the disk."""
        for record in records:
            message: Message | None = None
            if type(record) is ev.Said:
                received = self.cluster.decode(record.envelope)
                message = received.message if received else None
            members = node.disk.state.members
            node.disk.write(record, message)
            if type(record) is ev.Certified:
                if node.honest and record.state.members != members:
                    was_lost = any(map(self._has_lost_the_quorum, self.cluster.honest))
                    self.cluster.roster_came_into_force(record.state, was_lost)
                self.cluster.metrics.certified(node, record)
                node.shelf.turn(record.state.round)

    def _has_lost_the_quorum(self, node: SimNode) -> bool:
        """Ever: then others may have had good reason to follow whoever was left."""
        counters = node.core.view().counters if node.core else {}
        return bool(self.cluster.metrics.stalls[node.index] or counters.get("calls") or counters.get("regroups"))

    # -----------------------------------------------------------------------------------------------
    # Messages

    def _publish(self, node: SimNode, effect: ev.Publish) -> None:
        self._spread(node, effect.envelope, self.cluster.everyone)

    def _publish_to_some(self, node: SimNode, effect: ToSome) -> None:
        cluster = self.cluster
        self._spread(node, effect.envelope, [cluster.key_index[key] for key in effect.recipients])

    def _spread(self, node: SimNode, envelope: bytes, targets: Sequence[int]) -> None:
        cluster = self.cluster
        event, payload = self._event_of(node, envelope)
        if type(event) is ev.MessageReceived:
            message = event.received.message
            cluster.metrics.published(node, message, len(envelope), len(targets) - 1)
            if cluster.network.losing and cluster.network.loses(node.index, message):
                return
        cluster.fly(cluster.network.spread(node.index, targets, cluster.now, len(envelope)), event, payload)

    def _event_of(self, node: SimNode, envelope: bytes) -> tuple[ev.Event, bytes]:
        """What receivers get of a message by this node, and the payload that they hold by it."""
        cluster = self.cluster
        received = cluster.decode(envelope)
        if received is None:
            if node.honest:
                raise Violation(f"node {node.index} is honest and said what nobody can decode: {envelope[:80]!r}")
            return ev.MalformedReceived(node.key, "not a message"), b""
        if cluster.is_logging and node.honest and getattr(received.message, "author", node.key) == node.key:
            cluster.log.append((cluster.now, node.index, envelope))
        if not received.attachment:
            return ev.MessageReceived(node.key, received), b""
        digest_of = received.message.payload  # type: ignore[union-attr]
        payload = self.payloads.get(digest_of)
        return ev.MessageReceived(node.key, received, payload is not None and payload.good), digest_of

    def _stream_to(self, node: SimNode, peer: bytes, size: int) -> tuple[SimNode, float] | None:
        """The peer, and when what is sent to it arrives; None if it cannot be reached."""
        cluster = self.cluster
        index = cluster.key_index.get(peer)
        if index is None or not cluster.nodes[index].alive:
            return None
        at = cluster.network.stream(node.index, index, cluster.now, size)
        return None if at is None else (cluster.nodes[index], at)

    def _send(self, node: SimNode, effect: ev.Send) -> None:
        size = sum(map(len, effect.envelopes))
        for envelope in effect.envelopes:
            self.cluster.metrics.sent(node, "sent to one", len(envelope))
        reached = self._stream_to(node, effect.peer, size)
        if reached:
            peer, at = reached
            self.cluster.timer(peer, at, self._arrive, peer, [self._event_of(node, each) for each in effect.envelopes])

    def _arrive(self, peer: SimNode, events: list[tuple[ev.Event, bytes]]) -> None:
        life = peer.life
        for event, payload in events:
            if peer.life == life:
                if payload:
                    peer.shelf.add(payload)
                self.cluster.give(peer, event)

    def _ask(self, node: SimNode, effect: ev.Ask) -> None:
        self.cluster.metrics.sent(node, "asked", REQUEST_BYTES + 16 * len(effect.names))
        self._tell(node, effect.peer, ev.Asked(node.key, effect.names))

    def _tell(self, node: SimNode, peer: bytes, event: ev.Event) -> bool:
        """Let an event arrive at a peer, on a stream; False if it cannot be reached."""
        reached = self._stream_to(node, peer, REQUEST_BYTES)
        if reached:
            self.cluster.timer(reached[0], reached[1], self.cluster.give, reached[0], event)
        return reached is not None

    # -----------------------------------------------------------------------------------------------
    # Histories

    def _ask_history(self, node: SimNode, effect: ev.AskHistory) -> None:
        cluster = self.cluster
        cluster.metrics.sent(node, "asked", REQUEST_BYTES)
        index = cluster.key_index.get(effect.peer, -1)
        question = node.process.questions[index] = next(self.questions)
        is_there = self._tell(node, effect.peer, ev.HistoryAsked(node.key, effect.branch, effect.round))
        seconds = HISTORY_SECONDS if is_there else DIAL_SECONDS
        cluster.timer(node, cluster.now + seconds, self._give_up, node, index, question, effect.peer)

    def _give_up(self, node: SimNode, index: int, question: int, peer: bytes) -> None:
        if node.process.questions.get(index) == question:
            del node.process.questions[index]
            self.cluster.give(node, ev.HistoryFailed(peer, "no answer"))

    def _send_history(self, node: SimNode, effect: ev.SendHistory) -> None:
        encoded = encode_history(effect.history)
        self.cluster.metrics.sent(node, "history", len(encoded))
        reached = self._stream_to(node, effect.peer, len(encoded))
        if reached:
            peer, at = reached
            self.cluster.timer(peer, at, self._history_came, peer, node, encoded)

    def _history_came(self, node: SimNode, peer: SimNode, encoded: bytes) -> None:
        if node.process.questions.pop(peer.index, None) is None:
            return  # nobody asked
        event: ev.Event
        try:
            history: History = decode_history(encoded)
            event = ev.HistoryArrived(peer.key, history)
        except RemoteProtocolError as error:
            event = ev.HistoryFailed(peer.key, error.why)
        self.cluster.give(node, event)

    # -----------------------------------------------------------------------------------------------
    # Payloads

    def make_payload(self, node: SimNode, number: int, base_round: int, good: bool = True) -> tuple[bytes, Payload]:
        """A new payload and its digest. Large ones are not made, only their size is known."""
        size = self.cluster.scenario.training.payload_bytes
        seed = b"".join(place.to_bytes(8, "little") for place in (number, base_round, next(self.trainings)))
        start = digest("simulated payload", node.key, seed)
        is_inline = size <= self.cluster.run_config.agreement.inline_bytes_max
        content = (start * (size // len(start) + 1))[:size] if is_inline else start
        name, payload = payload_digest(content), Payload(size, good, content if is_inline else b"")
        self.payloads[name] = payload
        return name, payload

    def _fetch(self, node: SimNode, effect: ev.Fetch) -> None:
        cluster = self.cluster
        cluster.timer(node, cluster.now + CHECK_SECONDS, self._try_source, node, effect, deque(effect.sources))

    def _try_source(self, node: SimNode, effect: ev.Fetch, sources: deque[bytes]) -> None:
        cluster = self.cluster
        if effect.payload in node.shelf:
            self._have(node, effect.payload)
        elif sources:
            source = sources.popleft()
            reached = self._stream_to(node, source, REQUEST_BYTES)
            if reached:
                cluster.timer(node, reached[1], self._serve, node, effect, sources, reached[0])
            else:
                self._failed(node, effect, sources, source, "cannot be reached", DIAL_SECONDS)

    def _serve(self, node: SimNode, effect: ev.Fetch, sources: deque[bytes], source: SimNode) -> None:
        """The request has come to the source."""
        cluster, payload = self.cluster, self.payloads.get(effect.payload)
        withholds = source.liar is not None and not source.liar.serves(cluster, source.index, effect.payload, node.key)
        why = ""
        if payload is None or effect.payload not in source.shelf or withholds:
            why = "does not have it"
        elif payload.payload_bytes != effect.payload_bytes:
            why = "has another length"
        size = REQUEST_BYTES if why else effect.payload_bytes
        at = cluster.network.stream(source.index, node.index, cluster.now, size) if source.alive else None
        if at is None:
            self._failed(node, effect, sources, source.key, "lost", DIAL_SECONDS)
        elif why:
            self._failed(node, effect, sources, source.key, why, 0.0)
        else:
            cluster.metrics.sent(source, "payload", effect.payload_bytes)
            cluster.timer(node, at + CHECK_SECONDS, self._came, node, effect.payload)

    def _failed(
        self, node: SimNode, effect: ev.Fetch, sources: deque[bytes], source: bytes, why: str, seconds: float
    ) -> None:
        cluster = self.cluster
        at = cluster.now + seconds
        cluster.timer(node, at, cluster.give, node, ev.FetchFailed(effect.payload, source, why))
        cluster.timer(node, at, self._try_source, node, effect, sources)

    def _came(self, node: SimNode, payload: bytes) -> None:
        self.cluster.metrics.payloads_fetched += 1
        node.shelf.add(payload)
        self._have(node, payload)

    def _have(self, node: SimNode, payload: bytes) -> None:
        held = self.payloads[payload]
        self.cluster.give(node, ev.PayloadArrived(payload, held.good, held.payload_bytes))

    # -----------------------------------------------------------------------------------------------
    # The device

    def _train(self, node: SimNode, effect: ev.Train) -> None:
        device, training = node.device, self.cluster.scenario.training
        if device.training is not None:
            raise Violation(f"node {node.index} began to train for round {effect.round} while it was training")
        if effect.base_round > device.round:
            raise Violation(f"node {node.index} trains from round {effect.base_round} and has {device.round}")
        device.training = effect
        seconds = training.seconds * device.pace * (1.0 + training.spread * self.rng.uniform(-0.5, 0.5))
        self.cluster.timer(node, self.cluster.now + seconds, self._trained, node, effect)

    def _trained(self, node: SimNode, effect: ev.Train) -> None:
        cluster, device = self.cluster, node.device
        if device.stalled_until > cluster.now:
            cluster.timer(node, device.stalled_until, self._trained, node, effect)
            return
        device.training = None
        name, payload = self.make_payload(node, effect.round, effect.base_round)
        node.shelf.add(name)
        cluster.give(node, ev.TrainingFinished(effect.round, name, payload.payload_bytes, payload.attachment))

    def _return(self, node: SimNode, effect: ev.Return) -> None:
        self.cluster.metrics.returned[node.index] += 1

    def _note_wrong_state(self, node: SimNode, effect: ev.NoteWrongState) -> None:
        self.cluster.metrics.mismatches[node.index] += 1

    def _on_device(self, node: SimNode, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """One after the other."""
        device = node.device
        device.busy_until = max(device.busy_until, self.cluster.now) + seconds
        self.cluster.timer(node, device.busy_until, action, node, *arguments)

    def _apply(self, node: SimNode, effect: ev.Apply) -> None:
        for taken in effect.manifest.taken if node.honest else ():
            if taken.payload not in node.shelf:
                raise Violation(f"node {node.index} applies round {effect.manifest.round} and lacks a payload of it")
        self._on_device(node, self.cluster.scenario.training.apply_seconds, self._applied, effect)

    def _applied(self, node: SimNode, effect: ev.Apply) -> None:
        cluster, device, manifest = self.cluster, node.device, effect.manifest
        follows = manifest.parent in (device.head, manifest.branch)
        if node.honest and (manifest.round != device.round + 1 or not follows):
            raise Violation(f"node {node.index} applies round {manifest.round} to the state of round {device.round}")
        root = digest("simulated state", device.root, manifest.digest)
        self.states[root] = (manifest.round, manifest.digest)
        self._become(node, manifest.round, root)
        node.applied.append((manifest.branch, manifest.round, manifest.digest, root))
        cluster.metrics.applied(node, manifest, cluster.now)
        cluster.give(node, ev.Applied(manifest.branch, manifest.round, root))
        cluster.look()

    def _become(self, node: SimNode, number: int, root: bytes) -> None:
        _, head = self.states.get(root, (number, self.cluster.genesis.head))
        node.device.become(number, root, head, node.disk.kept)
        node.moved_at = self.cluster.now
        if number % self.cluster.scenario.disk.checkpoint_rounds == 0:
            node.disk.save_checkpoint(Checkpoint(number, root, head))

    def _catch_up(self, node: SimNode, effect: ev.CatchUp) -> None:
        """The newest that can be had; pieces are checked as they arrive, so that a wrong one cannot be handed over."""
        cluster, seconds = self.cluster, 0.0
        node.device.catching = effect
        saved = {checkpoint.root for checkpoint in node.disk.checkpoints}
        found = next((place for place in effect.roots if place[1] in saved), None)
        is_mine = found is not None
        for key in effect.sources:
            source = cluster.nodes[cluster.key_index[key]]
            served = next((place for place in effect.roots if self._serves_state(source, place, node)), None)
            reached = self._stream_to(node, key, REQUEST_BYTES)
            if reached is None:
                seconds += DIAL_SECONDS
            elif served is None or (found is not None and served[0] <= found[0]):
                seconds += 0.1
            else:
                size = cluster.scenario.training.state_bytes
                at = cluster.network.stream(source.index, node.index, cluster.now, size)
                seconds += at - cluster.now if at is not None else DIAL_SECONDS
                if at is not None:
                    found, is_mine = served, False
        if found:
            self._on_device(node, seconds, self._caught_up, effect, *found, is_mine)
        else:
            self._on_device(node, seconds, self._not_caught_up, effect)

    def _serves_state(self, source: SimNode, place: tuple[int, bytes], node: SimNode) -> bool:
        """A node keeps the state of now and then a round for others, and the newest."""
        kept, (number, root) = source.device.kept, place
        is_kept = place in kept and (number % self.cluster.scenario.disk.checkpoint_rounds == 0 or place == [*kept][-1])
        return is_kept and (source.liar is None or source.liar.serves(self.cluster, source.index, root, node.key))

    def _caught_up(self, node: SimNode, effect: ev.CatchUp, number: int, root: bytes, is_mine: bool) -> None:
        if node.device.catching is not effect:
            return  # another attempt has begun
        self.cluster.metrics.states_fetched[node.index] += not is_mine
        node.device.is_wrong = False
        self._become(node, number, root)
        self.cluster.give(node, ev.CaughtUp(number, root, effect.attempt))
        self.cluster.look()

    def _not_caught_up(self, node: SimNode, effect: ev.CatchUp) -> None:
        if node.device.catching is effect:
            self.cluster.give(node, ev.CatchUpFailed("nobody has it", effect.attempt))

    # -----------------------------------------------------------------------------------------------
    # The rest

    def _disconnect(self, node: SimNode, effect: ev.Disconnect) -> None:
        cluster = self.cluster
        cluster.metrics.disconnects[node.index] += 1
        cluster.at(
            cluster.now,
            cluster.connections.disconnect,
            node,
            cluster.nodes[cluster.key_index[effect.peer]],
            REDIAL_SECONDS,
        )

    def _stop(self, node: SimNode, effect: ev.Stop) -> None:
        self.cluster.stop(node)
