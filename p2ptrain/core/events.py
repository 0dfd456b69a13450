"""Every event that goes into the core, and every effect that comes out.

An event is a fact, in the past tense; an effect is a command to the driver. Both are data with one encoding, so that
a daemon can write its events down and `p2ptrain replay` can run them again. Effects are carried out in order, and
what follows a `Persist` waits until it is on the disk.

The driver decodes messages (and checks signatures) before it makes events of them, so that this work can be done
beside the core; what does not decode arrives as `MalformedReceived`.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from p2ptrain.core.history import Entry, History, Stage, Step
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import Received
from p2ptrain.core.state import AgreedState

# ---------------------------------------------------------------------------------------------------
# What a node keeps over a restart


class Said(Struct, frozen=True, tag=True):
    """A message of mine that may be said only once, and what is needed to stand by it."""

    envelope: bytes
    backing: tuple[bytes, ...] = ()  # of a precommit: the proposal, and the messages that its manifest is made of
    payloads: tuple[bytes, ...] = ()  # of an announcement and a prevote: what has to be on the disk with it, or a power
    # cut could leave a swarm that has agreed on what nobody holds


class Trunk(Struct, frozen=True):
    """What of a line is kept for ever: how its roster is proved, and where it branched."""

    lineage: tuple[Stage, ...]
    changes: tuple[Step, ...]  # rounds that changed the roster, and beginnings with the round before them
    forks: tuple[AgreedState, ...]  # from which branches began, the last of them
    base: AgreedState | None = None  # after a jump, ahead or far back: the state before the step; the rest can go


class Certified(Struct, frozen=True, tag=True):
    """A round that was decided, or a branch that began, and the agreed state after it.

    One that does not follow the last replaces whatever came after the one that it follows.
    """

    step: Step
    state: AgreedState
    trunk: Trunk | None = None  # if it has changed; the newest counts


class Silence(Struct, frozen=True, tag=True):
    """After a restart I say nothing on this branch up to this round: what I have said there is not known.

    I have left the branch for another, or, when it is empty, lost my log: then it stands for all branches, until it is
    known how far the others are, for ever. The newest of a branch counts.
    """

    branch: bytes
    round: int


class Observed(Struct, frozen=True, tag=True):
    """Scores of peers, as `Reputation.saved` returns them."""

    scores: bytes


class Halted(Struct, frozen=True, tag=True):
    """Two certificates for one round: more than f members lie, and nothing that is said can be trusted any more."""

    first: Entry
    second: Entry


Record: TypeAlias = Said | Certified | Silence | Observed | Halted


class Saved(Struct, frozen=True):
    """What the store gives back at a start: the newest of everything, each in the order in which it was persisted."""

    base: AgreedState  # the state before `history`
    history: tuple[Certified, ...]  # the last of them
    said: tuple[Said, ...]  # for rounds after that
    applied_round: int  # what the trainer's state is
    applied_root: bytes  # empty: there is none, it has to be fetched
    trunk: Trunk | None = None
    silences: tuple[Silence, ...] = ()
    scores: bytes = b""
    halted: Halted | None = None

    @property
    def state(self) -> AgreedState:
        return self.history[-1].state if self.history else self.base


# ---------------------------------------------------------------------------------------------------
# Events


class Started(Struct, frozen=True, tag=True):
    """The node begins. `forgetful`: this identity has spoken before, and what it said is lost."""

    saved: Saved
    forgetful: bool = False
    ticket: bytes = b""  # an invitation, for a run that wants one
    trust: bytes = b""  # the head without which no history is to be adopted (trust.py); only where none was yet


class MessageReceived(Struct, frozen=True, tag=True):
    """From gossip the sender is the publisher; from a stream, whoever handed the message over."""

    sender: bytes
    received: Received
    payload_good: bool | None = None  # of an attachment, after the strict decoder; None: there is none


class MalformedReceived(Struct, frozen=True, tag=True):
    sender: bytes
    why: str


class PeerSeen(Struct, frozen=True, tag=True):
    """A connection to this peer is there."""

    peer: bytes


class PeerLost(Struct, frozen=True, tag=True):
    peer: bytes


class TrainingFinished(Struct, frozen=True, tag=True):
    """The contribution of a `Train`. Large payloads stay with the driver, which serves them by digest."""

    round: int
    payload: bytes
    payload_bytes: int
    attachment: bytes = b""


class TrainingFailed(Struct, frozen=True, tag=True):
    """There will be no contribution for the round of a `Train`: a loss that is not finite, data that cannot be had."""

    round: int
    why: str = ""


class PayloadArrived(Struct, frozen=True, tag=True):
    """It is here, its digest is right, and the strict decoder has found it good or bad."""

    payload: bytes
    good: bool
    payload_bytes: int = 0  # its length, which its digest covers; 0: unknown, whatever was announced counts


class FetchFailed(Struct, frozen=True, tag=True):
    payload: bytes
    peer: bytes
    why: str = ""


class Applied(Struct, frozen=True, tag=True):
    """The trainer has applied the manifest of this round."""

    branch: bytes
    round: int
    root: bytes


class CaughtUp(Struct, frozen=True, tag=True):
    """The trainer's state is that of this round, of this root, verified piece by piece."""

    round: int
    root: bytes
    attempt: int = 0  # of the `CatchUp`


class CatchUpFailed(Struct, frozen=True, tag=True):
    why: str = ""
    attempt: int = 0


class Asked(Struct, frozen=True, tag=True):
    """A peer wants messages, by the first 16 bytes of their digests."""

    peer: bytes
    names: tuple[bytes, ...]


class HistoryAsked(Struct, frozen=True, tag=True):
    """A peer wants what came after this round of this branch."""

    peer: bytes
    branch: bytes
    round: int


class HistoryArrived(Struct, frozen=True, tag=True):
    peer: bytes
    history: History


class HistoryFailed(Struct, frozen=True, tag=True):
    peer: bytes
    why: str = ""


class StopRequested(Struct, frozen=True, tag=True):
    """The user wants the node to leave the run properly, or only to be away for a while."""

    keeps_place: bool = False


class Tick(Struct, frozen=True, tag=True):
    """The deadline has come."""


Event: TypeAlias = (
    Started
    | MessageReceived
    | MalformedReceived
    | PeerSeen
    | PeerLost
    | TrainingFinished
    | TrainingFailed
    | PayloadArrived
    | FetchFailed
    | Applied
    | CaughtUp
    | CatchUpFailed
    | Asked
    | HistoryAsked
    | HistoryArrived
    | HistoryFailed
    | StopRequested
    | Tick
)

# ---------------------------------------------------------------------------------------------------
# Effects


class Publish(Struct, frozen=True, tag=True):
    """To everyone, through gossip."""

    envelope: bytes


class Send(Struct, frozen=True, tag=True):
    """To one peer, on a stream."""

    peer: bytes
    envelopes: tuple[bytes, ...]


class Ask(Struct, frozen=True, tag=True):
    """The peer for messages by name; what it has comes back as `MessageReceived`."""

    peer: bytes
    names: tuple[bytes, ...]


class Fetch(Struct, frozen=True, tag=True):
    """A payload, from the first of these peers that has it; then check it."""

    payload: bytes
    payload_bytes: int
    sources: tuple[bytes, ...]


class Train(Struct, frozen=True, tag=True):
    """A contribution for this round, from the state after `base_round`, on the data of place `place` of `places`."""

    round: int
    base_round: int
    place: int
    places: int
    unsettled: tuple[int, ...] = ()  # rounds whose contribution of mine may still be taken, or is in one to apply


class Apply(Struct, frozen=True, tag=True):
    """The manifest; all its payloads are here. Contributions of mine that it takes are forgotten."""

    manifest: Manifest


class Return(Struct, frozen=True, tag=True):
    """My contribution of this round can no longer be taken: add what it carried back to the residual."""

    round: int


class NoteWrongState(Struct, frozen=True, tag=True):
    """My state, which was applied up to this round, came out otherwise than the certified one."""

    round: int


class Persist(Struct, frozen=True, tag=True):
    record: Record


class CatchUp(Struct, frozen=True, tag=True):
    """Make the trainer's state one of these certified roots, from any of these peers: the newest that can be had."""

    roots: tuple[tuple[int, bytes], ...]  # (round, root), the newest first; rounds that are kept lead on from each
    sources: tuple[bytes, ...]
    attempt: int = 0  # one ends what is left of those before it


class AskHistory(Struct, frozen=True, tag=True):
    """The peer for what came after this round of this branch."""

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
    """The node has nothing more to do here."""

    why: str


Effect: TypeAlias = (
    Publish
    | Send
    | Ask
    | Fetch
    | Train
    | Apply
    | Return
    | NoteWrongState
    | Persist
    | CatchUp
    | AskHistory
    | SendHistory
    | Disconnect
    | Stop
)
