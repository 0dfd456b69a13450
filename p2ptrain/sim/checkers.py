"""Checkers: the invariants of every simulation, checked after each event that an honest node acted on.

They see the effects of nodes and the messages that nodes have sent; watch.py decides which events they are shown. Each
does little work for an event, and none for most of them; what they demand of a round depends on how many of its
members lie (ledger.py)."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.core import events as ev
from p2ptrain.core.audits import Tier
from p2ptrain.core.history import Beginning, Entry
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import Announcement, Availability, Message, Proposal, Regroup, Vote
from p2ptrain.core.state import AgreedState
from p2ptrain.core.tally import MILLION
from p2ptrain.sim.devices import HONEST_CLAIMS
from p2ptrain.sim.ledger import (
    Checker,
    Guarantee,
    Ledger,
    Members,
    TwoHistories,
    Violation,
    are_liars,
    certified,
    entries,
    quorum,
    signature_under,
)
from p2ptrain.sim.succession import Successions
from p2ptrain.sim.world import SimWorld

PLACES_MAX = 100_000  # messages remembered: those of many rounds, in a swarm of any size
ROUNDS_KEPT = 64  # rounds for which the signatures in certificates are remembered
EVENTS_BETWEEN = 16  # events between two checks of a node's buffers; a leak is found a little later
LOWEST, HIGHEST = HONEST_CLAIMS[0] / MILLION, HONEST_CLAIMS[-1] / MILLION  # losses
VIEWS_MORE = 12  # views beyond the member count after the faults: to reconnect, and for a second turn of the honest


def safety() -> list[Checker]:
    ledger = Ledger()
    return [
        ledger,
        Successions(ledger),
        OneHistory(ledger),
        RealQuorums(ledger),
        EqualRoots(ledger),
        OnlyForward(),
        NobodyHonestBanned(ledger),
        NobodyHonestSuspended(ledger),
        BoundedBuffers(),
        NothingCensored(ledger),
        OneVoice(),
    ]


class OneHistory(Checker):
    """No two honest nodes decide on, or apply, different manifests for a round of a branch."""

    holds_beyond = True

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        applied = [effect.manifest for effect in effects if type(effect) is ev.Apply]
        for manifest in (*(entry.manifest for entry in entries(effects)), *applied):
            self._compare(index, manifest)

    def _compare(self, index: int, manifest: Manifest) -> None:
        ledger = self.ledger
        found = ledger.decided.get((manifest.branch, manifest.round))
        if found is None:
            raise TwoHistories(f"node {index} applies round {manifest.round}, which no honest node has decided")
        if found[0] != manifest.digest and ledger.promises(manifest.parent) >= Guarantee.ONE_HISTORY:
            raise TwoHistories(
                f"nodes {found[1]} and {index} have different manifests for round {manifest.round} of branch "
                f"{manifest.branch.hex()[:8]}: {found[0].hex()[:8]} and {manifest.digest.hex()[:8]}"
            )


class RealQuorums(Checker):
    """Certificates, and the beginnings of branches, are signed by a quorum of distinct members."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.expected: dict[tuple[object, ...], dict[bytes, bytes]] = {}  # signatures, by what is signed and by whom

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        for record in certified(effects):
            step = record.step
            if isinstance(step, Beginning):
                self._beginning(world, index, step)
            else:
                self._entry(world, index, step)

    def _entry(self, world: SimWorld, index: int, entry: Entry) -> None:
        certificate, manifest = entry.certificate, entry.manifest
        members = self.ledger.rosters[manifest.parent]
        what = f"node {index}'s certificate for round {manifest.round}"
        if certificate.manifest != manifest.digest or certificate.round != manifest.round:
            raise Violation(f"{what} is for something else")
        bits = int.from_bytes(certificate.seats, "little")
        seats = [seat for seat in range(bits.bit_length()) if bits >> seat & 1]
        if len(seats) < quorum(len(members)) or seats[-1] >= len(members):
            raise Violation(f"{what} has {len(seats)} of {len(members)} members; the quorum is {quorum(len(members))}")
        fields = ("vote", certificate.branch, certificate.round, certificate.view, 2, certificate.manifest)
        self._verify(world, what, fields, tuple(members[seat] for seat in seats), certificate.signatures)

    def _beginning(self, world: SimWorld, index: int, step: Beginning) -> None:
        what = f"node {index}'s branch after round {step.round}"
        if len(set(step.signers)) < quorum(len(step.members)) or not set(step.signers) <= set(step.members):
            raise Violation(f"{what} is signed by {len(set(step.signers))} of {len(step.members)} members")
        if not set(step.members) <= set(self.ledger.rosters[step.parent]):
            raise Violation(f"{what} has members that were not members before")
        fields = ("regroup", step.parent_branch, step.parent, step.attempt, step.members)
        self._verify(world, what, fields, step.signers, step.signatures)

    def _verify(
        self, world: SimWorld, what: str, fields: tuple[object, ...], signers: Members, signatures: Sequence[bytes]
    ) -> None:
        known = self.expected.setdefault(fields, {})
        for key, signature in zip(signers, signatures, strict=True):
            if key not in known:
                known[key] = signature_under(world.setup.run_id, [*fields, key], key)
            if known[key] != signature:
                raise Violation(f"{what} has a signature that node {world.key_index[key]} never made")
        while len(self.expected) > ROUNDS_KEPT:
            del self.expected[next(iter(self.expected))]


class EqualRoots(Checker):
    """Nodes at the same round of the same branch have the same root, and only such roots are certified."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.roots: dict[tuple[bytes, int], tuple[bytes, int]] = {}
        self.known: set[tuple[int, bytes]] = set()
        self.forgotten = 0  # rounds before this one

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        if type(event) is ev.Applied and not world.nodes[index].state.is_wrong:  # a wrong root must never be certified
            if event.round < self.forgotten:
                raise Violation(f"node {index} applies round {event.round}, which everyone has long left behind")
            place = event.branch, event.round
            root, other = self.roots.setdefault(place, (event.root, index))
            self.known.add((event.round, event.root))
            if root != event.root and self._is_promised(place):
                raise Violation(f"nodes {other} and {index} have different roots after round {event.round}")
        elif type(event) is ev.CaughtUp and (event.round, event.root) not in self.known and event.round > 0:
            core = world.nodes[index].core
            assert core is not None, "it has just handled the event"
            head = core.view().state.head  # a branch of liars certifies what it likes
            if self.ledger.promises(head) is Guarantee.EVERYTHING:
                raise Violation(f"node {index} fetched a state of round {event.round} that no honest node has had")
        for manifest in (entry.manifest for entry in entries(effects)):
            is_known = manifest.root_round == 0 or (manifest.root_round, manifest.root) in self.known
            if not is_known and self.ledger.promises(manifest.parent) is Guarantee.EVERYTHING:
                raise Violation(f"round {manifest.round} certifies a root that no honest node has computed")

    def forget(self, before: int) -> None:
        self.roots = {place: found for place, found in self.roots.items() if place[1] >= before}
        self.known = {(number, root) for number, root in self.known if number >= before}
        self.forgotten = before

    def _is_promised(self, place: tuple[bytes, int]) -> bool:
        decided = self.ledger.decided.get(place)
        return decided is not None and self.ledger.promises(decided[0]) is Guarantee.EVERYTHING


class OnlyForward(Checker):
    """Rounds never go back on a branch, except to what is on disk when a process restarts."""

    def __init__(self) -> None:
        self.decided: dict[int, dict[bytes, int]] = {}
        self.applied: dict[int, dict[bytes, int]] = {}

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        if type(event) is ev.Started:
            state = event.saved.state
            self.decided[index], self.applied[index] = {state.branch: state.round}, {}
        elif type(event) is ev.CaughtUp:
            self.applied.pop(index, None)
        for record in certified(effects):
            state, begins = record.state, isinstance(record.step, Beginning)
            self._advance(self.decided, index, state.branch, state.round, "decided", begins)
        for manifest in (effect.manifest for effect in effects if type(effect) is ev.Apply):
            self._advance(self.applied, index, manifest.branch, manifest.round, "applied", False)

    def _advance(
        self, kept: dict[int, dict[bytes, int]], index: int, branch: bytes, number: int, what: str, begins: bool
    ) -> None:
        rounds = kept.setdefault(index, {})
        last = rounds.get(branch, -1)
        if number <= last and not begins:
            raise Violation(f"node {index} {what} round {number} after round {last} of the same branch")
        rounds[branch] = number


class NobodyHonestBanned(Checker):
    """Evidence and refused payloads ban liars only."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        for manifest in (entry.manifest for entry in entries(effects)):
            for node in map(world.node_of, manifest.banned):
                if node.honest and self.ledger.promises(manifest.parent) is Guarantee.EVERYTHING:
                    raise Violation(f"round {manifest.round} bans node {node.index}, which is honest")


class NobodyHonestSuspended(Checker):
    """Audits take the weight and the seat of liars only, however many of a roster's f audit falsely."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        for record in certified(effects):
            for entry in record.state.admitted:
                is_out = entry.conduct.tier in (Tier.SUSPENDED, Tier.EXPELLED)
                is_wrong = is_out and world.node_of(entry.key).honest
                if is_wrong and self.ledger.promises(record.state.head) is Guarantee.EVERYTHING:
                    raise Violation(f"round {record.state.round} suspends node {world.key_index[entry.key]}")


class BoundedBuffers(Checker):
    """Every buffer stays within its bound, even in a flood of messages that change nothing."""

    def __init__(self) -> None:
        self.events: dict[int, int] = {}

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        core = world.nodes[index].core
        if effects or type(event) is not ev.MessageReceived:  # such a message stands for many
            count = self.events[index] = self.events.get(index, 0) + 1
            if count % EVENTS_BETWEEN:
                return
        if core is None:
            return
        for name, (size, bound) in core.limits().items():
            if size > bound:
                raise Violation(f"node {index} keeps {size} {name}; the bound is {bound}")


class NothingCensored(Checker):
    """A contribution that every honest member holds is in the manifest, unless its author was removed or, in an open
    run, has no seat and others without one were drawn: a quarter as many as there are members."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.offers: dict[bytes, tuple[bytes, int]] = {}  # author and round, by the name of an announcement
        self.held: dict[tuple[bytes, int], dict[int, set[bytes]]] = {}  # by branch and round, by member

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        if type(event) is ev.MessageReceived and type(event.received.message) is Announcement:
            self._note(event.received.digest, event.received.message)
        for entry in entries(effects):
            self._decided(world, entry.manifest)

    def said(self, world: SimWorld, index: int, envelope: bytes) -> None:
        received = world.decode(envelope)
        message = received.message if received else None
        if received and type(message) is Announcement:
            self._note(received.digest, message)
        elif type(message) is Availability:
            self._attested(index, message)

    def _note(self, name: bytes, message: Announcement) -> None:
        self.offers.setdefault(name[:16], (message.author, message.round))
        if len(self.offers) > PLACES_MAX:
            for old in list(self.offers)[: PLACES_MAX // 2]:
                del self.offers[old]

    def forget(self, before: int) -> None:
        self.offers = {name: offer for name, offer in self.offers.items() if offer[1] >= before}

    def _attested(self, index: int, message: Availability) -> None:
        """Collects the names in all of this member's availabilities for the round: a restarted one may send two."""
        place = message.branch, message.round
        if place in self.ledger.decided:
            return  # too late for the manifest
        members, held = self.held.setdefault(place, {}), set(message.held)
        members[index] = members[index] & held if index in members else held
        while len(self.held) > ROUNDS_KEPT:
            del self.held[next(iter(self.held))]

    def _decided(self, world: SimWorld, manifest: Manifest) -> None:
        members = self.held.pop((manifest.branch, manifest.round), None)
        ledger, parent = self.ledger, manifest.parent
        if not members or parent in ledger.closing or ledger.promises(parent) is not Guarantee.EVERYTHING:
            return
        taken = {each.author: each.round for each in manifest.taken}
        out = {*manifest.banned, *manifest.leaves}
        seats = self.ledger.rosters[manifest.parent]
        is_open = world.setup.run_config.admission.policy == "open"
        is_drawn = is_open and len(taken.keys() - {*seats}) >= max(1, len(seats) // 4)
        for name in sorted(set.intersection(*members.values())):
            author, number = self.offers.get(name, (b"", 0))
            if is_drawn and author not in seats:
                continue
            if author and author not in out and taken.get(author, number + 1) > number:
                raise Violation(
                    f"round {manifest.round} leaves out node {world.key_index[author]}'s contribution of round "
                    f"{number}, which every honest member holds"
                )


class OneVoice(Checker):
    """No honest node sends two different messages for one place, not even across restarts."""

    def __init__(self) -> None:
        self.places: dict[tuple[object, ...], bytes] = {}

    def said(self, world: SimWorld, index: int, envelope: bytes) -> None:
        received = world.decode(envelope)
        place = _place(received.message) if received else None
        if received is None or place is None or place[-1] != world.nodes[index].key:
            return  # relayed for its author
        if self.places.setdefault(place, received.digest) != received.digest:
            what = f"{place[0]} of round {getattr(received.message, 'round', '?')}"
            raise Violation(f"node {index}, which is honest, has made two of the same place: {what}")
        if len(self.places) > PLACES_MAX:
            for old in list(self.places)[: PLACES_MAX // 2]:
                del self.places[old]

    def forget(self, before: int) -> None:
        for place in [place for place in self.places if isinstance(place[2], int) and place[2] < before]:
            del self.places[place]  # a set of survivors has no round


def _place(message: Message) -> tuple[object, ...] | None:
    """Returns the place that a message takes, with its author last; an honest node sends one message per place."""
    match message:
        case Announcement(branch=branch, round=number, author=author):
            return "announcement", branch, number, author
        case Proposal(branch=branch, round=number, view=view, author=author):
            return "proposal", branch, number, view, author
        case Vote(branch=branch, round=number, view=view, ballot=ballot, author=author):
            return "vote", branch, number, view, ballot, author
        case Regroup(branch=branch, parent=parent, attempt=attempt, author=author):
            return "regroup", branch, parent, attempt, author
        case _:
            return None


class HonestClaims(Checker):
    """No honest node shows a loss that only liars have claimed, where these are a minority of those who spoke. Every
    simulated liar claims absurd losses (devices.py)."""

    def __init__(self) -> None:
        self.looked_at = self.shown = 0  # rounds whose training loss was looked at, and held-out losses

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        core = world.nodes[index].core
        if type(event) is not ev.Applied or core is None:
            return
        view = core.view()
        entry, loss = view.entry(event.round), view.training_of(event.round).loss
        if entry is not None and loss is not None and entry.manifest.branch == event.branch:
            authors = [world.nodes[world.key_index[taken.author]] for taken in entry.manifest.taken]
            least = view.run.recipe.local_steps_min or view.run.recipe.local_steps
            honest = sum(least for author in authors if author.honest)  # who knows how many steps they took
            if honest > view.run.recipe.local_steps * sum(not author.honest for author in authors):
                self.looked_at += 1
                self._look(index, "training", loss, LOWEST)
        liars = sum(not node.honest for node in world.nodes)
        if view.held_out is not None and liars <= 1 and view.held_out.said >= 2:
            self.shown += 1
            self._look(index, "held-out", view.held_out.loss, LOWEST if view.held_out.said > 2 or not liars else 0.0)

    def _look(self, index: int, what: str, loss: float, lowest: float) -> None:
        if not lowest <= loss <= HIGHEST:
            raise Violation(f"node {index} shows a {what} loss of {loss}, which no honest node has claimed")


# -- After the faults -------------------------------------------------------------------------------


class Recovered(Checker):
    """Once the faults are over, everyone soon makes progress on one history."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.view_then: int | None = None  # the highest when the faults ended

    def after(self, world: SimWorld, index: int, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        if world.calendar.now < world.setup.scenario.end_of_faults:
            return
        if self.view_then is None:
            cores = [node.core for node in world.nodes if node.honest and node.core is not None]
            self.view_then = max((core.view().view for core in cores), default=0)
        for entry in entries(effects):
            self._compare(entry, self.view_then)

    def _compare(self, entry: Entry, view_then: int) -> None:
        """Checks how many views a round took after the faults; a round that began earlier had used some already."""
        members = self.ledger.rosters.get(entry.manifest.parent, ())
        is_promised = self.ledger.promises(entry.manifest.parent) is Guarantee.EVERYTHING
        views = entry.certificate.view - view_then
        if is_promised and views > len(members) + VIEWS_MORE:
            raise Violation(f"round {entry.manifest.round} took {views} views after the faults were over")

    def at_end(self, world: SimWorld) -> None:
        if not self._is_promised(world):
            return
        honest = [node for node in world.nodes if node.honest and not node.is_gone]
        late = [node.index for node in honest if not world.goal.is_reached_by(node)]
        if late and not world.calendar.is_over:
            raise Violation(f"{world.calendar.now:.0f} s, and nodes {late} have not applied round {world.goal.round}")
        self._one_line(world)

    def _is_promised(self, world: SimWorld) -> bool:
        return all(self.ledger.promises(head.head) is Guarantee.EVERYTHING for head in self._heads(world).values())

    def _heads(self, world: SimWorld) -> dict[int, AgreedState]:
        """Returns the states of honest nodes, except on a branch of liars alone and where the run is over."""
        heads = {node.index: node.disk.state for node in world.honest}
        going = {index: head for index, head in heads.items() if head.head not in self.ledger.ended}
        return {index: head for index, head in going.items() if not are_liars(world, head.members)}

    def _one_line(self, world: SimWorld) -> None:
        heads = self._heads(world)
        if not heads:
            return
        first = max(heads, key=lambda index: (heads[index].round, heads[index].head))
        line = {head := heads[first].head}
        while head := self.ledger.parents.get(head, b""):
            line.add(head)
        for index, state in heads.items():
            if state.head not in line:
                raise Violation(f"node {index} is in round {state.round} of a different history from node {first}")


def standard() -> list[Checker]:
    """Returns all checkers: safety, and that the swarm goes on after the faults."""
    checkers = safety()
    ledger = checkers[0]
    assert isinstance(ledger, Ledger), "the ledger comes first, since the others ask it"
    return [*checkers, HonestClaims(), Recovered(ledger)]
