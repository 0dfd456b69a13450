"""Descent: where a run comes from, if it follows another (succession.py).

The successor's config, and with it its id, names the last manifest of the run before, and that names the agreed state
before it. So whoever knows the id checks everything that goes along, keys, seats, bans and what audits have found,
without a signature (`first_state`). Whoever knows only the run before finds its successor by that run's certificates,
which an origin has as well (`follows`)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from p2ptrain.config import CONFIG_BYTES_MAX, RunConfig
from p2ptrain.config.succession import successor_of
from p2ptrain.core.audits import KEPT_ROUNDS, are_earned
from p2ptrain.core.chain import Chain
from p2ptrain.core.history import CHANGES_MAX, Beginning, Entry, Step, follow, jump
from p2ptrain.core.manifest import contradiction
from p2ptrain.core.messages import Verifier
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.core.succession import UNMOVED, is_over
from p2ptrain.core.wire import decode_strictly, encode
from p2ptrain.errors import RemoteProtocolError

ORIGIN_BYTES_MAX = 16 * 2**20  # with 1,024 keys and 64 rounds of contents the agreed state has 6 MB


class Descent(Struct, frozen=True, array_like=True):
    """How the run before ended."""

    config: Annotated[bytes, Meta(max_length=CONFIG_BYTES_MAX)]  # in its canonical encoding
    changes: Annotated[tuple[Step, ...], Meta(max_length=CHANGES_MAX)]  # of its roster, until `before`
    before: AgreedState  # its last manifest
    last: Entry


_ORIGIN = msgspec.msgpack.Decoder(Descent)


def decode_origin(data: bytes) -> Descent:
    """Decodes an origin; only `first_state` verifies it."""
    if len(data) > ORIGIN_BYTES_MAX:
        raise RemoteProtocolError(f"an origin of {len(data)} bytes; the limit is {ORIGIN_BYTES_MAX}")
    return decode_strictly(_ORIGIN, data, "an origin")


def origin_of(chain: Chain, run: RunConfig) -> Descent | None:
    """Returns how a run ended, on this chain; None before its end, or if that is not kept."""
    if not is_over(chain.state) or not chain.steps:
        return None
    ends = [(before, each.step) for before, each in zip(chain.states, chain.steps, strict=False) if is_over(each.state)]
    before, last = ends[0]
    if is_over(before) or not isinstance(last, Entry):
        return None
    origin = Descent(run.canonical(), tuple(change for change in chain.changes if change is not last), before, last)
    if len(encode(origin)) > ORIGIN_BYTES_MAX:  # then only who knows the successor's id can check it
        return replace(origin, changes=())
    return origin


def succeed(origin: Descent) -> tuple[RunConfig, AgreedState]:
    """Returns the config and the first agreed state of the run that follows; RemoteProtocolError if none does."""
    run, last, before = RunConfig.from_canonical(origin.config), origin.last.manifest, origin.before
    if (last.state, last.round, last.branch) != (before.digest, before.round + 1, before.branch):
        raise RemoteProtocolError("the last manifest does not follow the agreed state")
    if why := contradiction(last, before, run):  # both may be a stranger's
        raise RemoteProtocolError(why)
    if is_over(before) or not is_over(state := before.after(last, run)):
        raise RemoteProtocolError(f"the run has not ended with round {last.round}")
    decided = state.succession.decided
    assert decided is not None, "a run ends by a motion"
    root = decided.root if decided.goes_back else state.root
    successor = successor_of(run, decided.change, state.round, state.head, root)
    return successor, begun(state, successor, root)


def first_state(run: RunConfig, origin: Descent | None) -> AgreedState:
    """Returns the agreed state with which a run begins; RemoteProtocolError if it does not come from there."""
    if not run.predecessor.run:
        members = tuple(bytes.fromhex(key) for key in run.admission.founders)
        return genesis(run.id, members, bytes.fromhex(run.state.initial_root))
    if origin is None:
        raise RemoteProtocolError("nothing says where the run comes from")
    found, state = succeed(origin)
    if found.canonical() != run.canonical():
        raise RemoteProtocolError("the run does not come from there")
    return state


def follows(origin: Descent, first: AgreedState, verifier: Verifier) -> RunConfig:
    """Returns the run that members of an earlier one have certified as its successor; RemoteProtocolError if they have
    not. `first` is the agreed state with which the earlier one began."""
    run = RunConfig.from_canonical(origin.config)
    if run.id != verifier.run_id:
        raise RemoteProtocolError("the origin is of another run")
    check_branches(first, origin.changes)
    jump(first, origin.changes, origin.before, verifier)
    follow(origin.before, origin.last, run, verifier)
    return succeed(origin)[0]


def check_branches(first: AgreedState, changes: tuple[Step, ...]) -> None:
    """Raises RemoteProtocolError for a branch that half of the members before it, or more, have not signed: anyone can
    sign a branch of itself, and here nobody knows whether the others were gone."""
    members = set(first.members)
    for change in changes:
        if isinstance(change, Beginning):
            if 2 * len(members & set(change.signers)) <= len(members):
                raise RemoteProtocolError("it rests on a branch of the few")
            members = set(change.members)
        else:
            members = (members | set(change.manifest.seated)) - set(change.manifest.unseated)


def begun(state: AgreedState, successor: RunConfig, root: bytes) -> AgreedState:
    """Returns the agreed state with which a successor begins, from the last one of the run before.

    That run's contributions are none of this one, but their contents stay known, so that nobody sends them again; and
    members' work is as much as can be: what was usual there need not be here."""
    full = KEPT_ROUNDS * successor.recipe.local_steps if are_earned(successor) else 0
    members = set(state.members)
    return replace(
        state,
        branch=successor.id,
        head=successor.id,
        admitted=tuple([replace(each, absent=0, work=full if each.key in members else 0) for each in state.admitted]),
        filled=(state.round,) * (successor.agreement.staleness_rounds_max + 1),
        root_round=state.round,
        root=root,
        taken_lately=(),
        summons=(),
        succession=UNMOVED,
    )
