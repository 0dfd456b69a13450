"""The events that go into the core, and the effects that come out.

An event is a fact, in the past tense; an effect is a command to the driver. Both are plain data with one encoding, so
that a daemon can log its events and `p2ptrain replay` can run them again. Effects are carried out in order, and
everything after a `Persist` waits until its record is on the disk.

The driver decodes messages and checks their signatures before it turns them into events, so that this work can run
beside the core; a message that does not decode arrives as `MalformedReceived`."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from p2ptrain.core.history import BranchStart, Entry, History, Step
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import Received
from p2ptrain.core.state import AgreedState, Taken
from p2ptrain.share import PassSlots, Share

# -- Records: state that survives a restart ---------------------------------------------------------


class Said(Struct, frozen=True, tag=True):
    """A message of this node that may be sent only once, and everything needed to stand by it."""

    envelope: bytes
    backing: tuple[bytes, ...] = ()  # for a precommit: the proposal, and the messages that its manifest is built from
    # For an announcement or a prevote: payloads that have to be on the disk with it, or a power cut could leave a swarm
    # that has agreed on payloads that nobody holds.
    payloads: tuple[bytes, ...] = ()


class Trunk(Struct, frozen=True):
    """The part of a chain that is kept forever: the proof of its roster, and its branch points."""

    lineage: tuple[BranchStart, ...]
    changes: tuple[Step, ...]  # rounds that changed the roster, and beginnings, each with the round before it
    forks: tuple[AgreedState, ...]  # the last states from which branches began
    base: AgreedState | None = None  # after a jump: the state before the step; older history can go


class Certified(Struct, frozen=True, tag=True):
    """A decided round or the beginning of a branch, with the agreed state after it.

    If it does not follow the last record, it replaces everything after the one that it follows."""

    step: Step
    state: AgreedState
    trunk: Trunk | None = None  # only if it has changed otherwise than by this step (chain.py, `grown`)


class Silence(Struct, frozen=True, tag=True):
    """After a restart, this node stays silent on this branch up to this round, as it may have spoken there before.

    Either it left the branch for another, or, if `branch` is empty, it lost its log: then the silence covers all
    branches, and has no end until it is known how far the others are. The newest record of a branch counts."""

    branch: bytes
    round: int


class Observed(Struct, frozen=True, tag=True):
    """Scores of peers, as `Reputation.saved` returns them."""

    scores: bytes


class Halted(Struct, frozen=True, tag=True):
    """Two certificates for one round: more than f members lie, so no vote can be trusted any more."""

    first: Entry
    second: Entry


Record: TypeAlias = Said | Certified | Silence | Observed | Halted


class Saved(Struct, frozen=True):
    """The state that the store returns at startup: the newest of each kind, in the order in which it was persisted."""

    base: AgreedState  # the state before `history`
    history: tuple[Certified, ...]  # the newest rounds
    said: tuple[Said, ...]  # for rounds after the history
    applied_round: int  # the round of the trainer's state
    applied_root: bytes  # its root; empty if there is no state and it has to be fetched
    trunk: Trunk | None = None
    silences: tuple[Silence, ...] = ()
    scores: bytes = b""
    halted: Halted | None = None

    @property
    def state(self) -> AgreedState:
        return self.history[-1].state if self.history else self.base


# -- Events -----------------------------------------------------------------------------------------


class Started(Struct, frozen=True, tag=True):
    """The node starts. `forgetful`: this identity has sent messages before, and the record of them is lost."""

    saved: Saved
    forgetful: bool = False
    claim: bytes = b""  # to an invitation (admission.py), for a run that wants one
    trust: bytes = b""  # adopt only a history with this head (trust.py); only before the first history is adopted
    audit_share: float = 0.0  # of its training, that this node spends on audits
    can_overlap: bool = True  # whoever trains can go on from weights that change between two steps (overlap.py)


class MessageReceived(Struct, frozen=True, tag=True):
    """A message arrived: by gossip from its publisher, or by stream from the peer that passed it on."""

    sender: bytes
    received: Received
    payload_good: bool | None = None  # the strict decoder's verdict on the attachment; None if there is none


class MalformedReceived(Struct, frozen=True, tag=True):
    sender: bytes
    why: str


class PeerSeen(Struct, frozen=True, tag=True):
    """A connection to this peer was opened, from this range of addresses; empty: not known."""

    peer: bytes
    range: str = ""


class PeerLost(Struct, frozen=True, tag=True):
    peer: bytes


class TrainingFinished(Struct, frozen=True, tag=True):
    """A `Train` has produced a contribution. Large payloads stay with the driver, which serves them by digest."""

    round: int
    payload: bytes
    payload_bytes: int
    attachment: bytes = b""
    steps: int = 0  # what is claimed of the training
    loss: int = 0
    held_out: int = 0  # and of the base
    base_round: int = -1  # what its last steps went on from; later than asked if a round was applied in between
    k: int = 0  # numbers of each chunk in it, of which the owner may allow fewer than asked; 0: as asked
    content: bytes = b""  # its content's name; empty: the payload's own digest stands for it


class TrainingFailed(Struct, frozen=True, tag=True):
    """A `Train` has failed, for example with a non-finite loss or unavailable data: the round gets no contribution."""

    round: int
    why: str = ""
    has_passed: bool = False  # nothing failed: the round passed before the training could begin


class Audited(Struct, frozen=True, tag=True):
    """An `Audit` is over."""

    round: int
    key: bytes
    z: int = 0  # in thousandths
    strength: int = 0
    why: str = ""  # it was dropped


class PayloadArrived(Struct, frozen=True, tag=True):
    """A payload with the right digest is here, and the strict decoder has found it good or bad."""

    payload: bytes
    good: bool
    author: bytes  # covered by the digest, as its length is
    payload_bytes: int
    content: bytes = b""  # as in `TrainingFinished`


class FetchFailed(Struct, frozen=True, tag=True):
    payload: bytes
    peer: bytes
    why: str = ""


class Applied(Struct, frozen=True, tag=True):
    """The trainer has applied the manifest of a round."""

    branch: bytes
    round: int
    root: bytes


class CaughtUp(Struct, frozen=True, tag=True):
    """The trainer has fetched the state of this round and verified it piece by piece against this root."""

    round: int
    root: bytes
    attempt: int = 0  # copied from the `CatchUp`


class CatchUpFailed(Struct, frozen=True, tag=True):
    why: str = ""
    attempt: int = 0


class Asked(Struct, frozen=True, tag=True):
    """A peer asked for messages, named by the first 16 bytes of their digests."""

    peer: bytes
    names: tuple[bytes, ...]


class HistoryAsked(Struct, frozen=True, tag=True):
    peer: bytes
    branch: bytes
    round: int


class HistoryArrived(Struct, frozen=True, tag=True):
    peer: bytes
    history: History


class HistoryFailed(Struct, frozen=True, tag=True):
    peer: bytes
    why: str = ""


class MoveRequested(Struct, frozen=True, tag=True):
    """The user moves that the run go on as another (succession.py)."""

    last: int
    weights: int
    root: bytes
    change: bytes


class AssentRequested(Struct, frozen=True, tag=True):
    """The user, or a standing rule, assents to a motion; NOTHING: to none any more."""

    motion: bytes


class StopRequested(Struct, frozen=True, tag=True):
    """The user asked the node to leave the run, or (`keeps_place`) to stop and come back later."""

    keeps_place: bool = False


class Tick(Struct, frozen=True, tag=True):
    """The node's deadline has passed."""


Event: TypeAlias = (
    Started | MessageReceived | MalformedReceived | PeerSeen | PeerLost | TrainingFinished | TrainingFailed
    | PayloadArrived | FetchFailed | Applied | CaughtUp | CatchUpFailed | Asked | HistoryAsked | HistoryArrived
    | HistoryFailed | StopRequested | Tick | Audited | MoveRequested | AssentRequested
)  # fmt: skip

# -- Effects ----------------------------------------------------------------------------------------


class Publish(Struct, frozen=True, tag=True):
    """Publish a message to everyone who is admitted."""

    envelope: bytes


class Send(Struct, frozen=True, tag=True):
    """Send messages to one peer, on a stream."""

    peer: bytes
    envelopes: tuple[bytes, ...]


class Ask(Struct, frozen=True, tag=True):
    """Ask a peer for messages by name; its answers arrive as `MessageReceived`."""

    peer: bytes
    names: tuple[bytes, ...]


class Fetch(Struct, frozen=True, tag=True):
    """Fetch a payload from the first of these peers that has it, and check it."""

    payload: bytes
    payload_bytes: int
    sources: tuple[bytes, ...]


class Train(Struct, frozen=True, tag=True):
    """Train a contribution for this round from the state after `base_round`, on data share `place` of `places`."""

    round: int
    base_round: int
    place: int
    places: int
    unsettled: tuple[int, ...] = ()  # rounds whose own contribution may still be taken, or is yet to be applied
    samples: bool = False  # after that, write a line of text with the weights after `base_round`
    evaluates: bool = False  # before it, measure their held-out loss
    k: int = 0  # numbers of each chunk in the contribution; 0: the most that the run allows
    slots: PassSlots | None = None  # the data share, where the place does not say it

    @property
    def share(self) -> Share:
        return Share(self.round, self.place, self.places, self.slots)


class Pace(Struct, frozen=True, tag=True):
    """Let the training of this round take as many steps as fit (pace.py). Both times are from now."""

    round: int
    usual: float = 0.0  # seconds until the others usually contribute; 0: they have, or the round is over
    last: float = 0.0  # seconds until they wait no longer


class Apply(Struct, frozen=True, tag=True):
    """Apply a manifest, whose payloads are all here, and forget this node's contributions that it takes."""

    manifest: Manifest


class Audit(Struct, frozen=True, tag=True):
    """Measure a contribution that a manifest took."""

    manifest: Manifest
    since: tuple[Manifest, ...]  # they lead from the weights that it was computed from to the present ones
    taken: Taken
    share: Share  # of the data, that its author was given
    sequences: int  # of these to read


class Return(Struct, frozen=True, tag=True):
    """Add this node's contribution of this round, which can no longer be taken, back to the residual."""

    round: int


class NoteWrongState(Struct, frozen=True, tag=True):
    """Note that this node's state after this round differs from the certified one."""

    round: int


class Persist(Struct, frozen=True, tag=True):
    record: Record


class CatchUp(Struct, frozen=True, tag=True):
    """Fetch the newest available of these certified states from any of these peers, and make it the trainer's state."""

    roots: tuple[tuple[int, bytes], ...]  # (round, root), the newest first; the kept rounds continue from each
    sources: tuple[bytes, ...]
    attempt: int = 0  # a new attempt ends earlier ones


class AskHistory(Struct, frozen=True, tag=True):
    peer: bytes
    branch: bytes
    round: int


class SendHistory(Struct, frozen=True, tag=True):
    peer: bytes
    history: History


class Disconnect(Struct, frozen=True, tag=True):
    peer: bytes
    why: str


class Stop(Struct, frozen=True, tag=True):
    why: str


Effect: TypeAlias = (
    Publish | Send | Ask | Fetch | Train | Pace | Apply | Return | NoteWrongState | Persist | CatchUp | AskHistory
    | SendHistory | Disconnect | Stop | Audit
)  # fmt: skip
