"""Auditing: decides which contributions this node measures, and says what it found.

An audit is paid from a share of the training that this node does; one that all members are summoned to is rare, and
comes on top. The node alone draws whom it audits, after the contributions are agreed on, so nobody else can foresee it.
(A draw that others can check would have to come from something that nobody can choose: a manifest's digest depends on
its proposer, and who has an Ed25519 key can sign one message in many ways.) The sequences that are read follow from the
manifest, so that all who measure the same contribution read the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import Random

from blake3 import blake3
from msgspec import Struct

from p2ptrain.config import AUDIT_SEQUENCES, RunConfig
from p2ptrain.core.audits import Conduct, Measured, Tier, may_report
from p2ptrain.core.chain import Chain
from p2ptrain.core.context import Context
from p2ptrain.core.events import Audit, Audited
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import STRENGTH_MAX, AuditReport
from p2ptrain.core.pools import Pools
from p2ptrain.core.state import AgreedState, Taken
from p2ptrain.share import Share

SEQUENCES_SHARE = 10  # at least a tenth of the author's sequences are read in an audit
# In one that all members do: all of most rounds. With 128 of 320 a proposer, who can choose from 153 manifests and so
# from as many draws, could make an honest contribution fail early in a run.
SUMMONED_SEQUENCES = 320
OTHERS = 2  # times as many sequences are read: as many of others, to compare with
SAID_KEPT = 16
SAVED_ROUNDS = 8  # of the share, at most: a node that was busy does not audit for hours afterwards
CHANCE = 0.5  # of an audit in a round in which the node has saved enough: a draw without memory
ALLOWANCE = 1_100  # of strength: only whole, timely work of local steps always goes as far as the others'
REFERENCES = 16  # other contributions that one is compared with, at most
BACK_MAX = 32  # rounds that weights are computed back: each costs as much as applying it, and rounds a little
TRIAL_CHANCE = 0.5  # that a key on trial is drawn, if there is one
RANKED_CHANCE = 0.75  # that of those the most promising are drawn
NEW_ROUNDS = 64  # that a key is looked at more often after its trial


class Doing(Struct, frozen=True):
    order: Audit
    branch: bytes
    is_summoned: bool


def sequences_of(run: RunConfig, *, is_summoned: bool) -> int:
    """Returns how many of an author's sequences an audit reads."""
    whole = run.recipe.round_sequences
    return min(whole, SUMMONED_SEQUENCES if is_summoned else max(AUDIT_SEQUENCES, -(-whole // SEQUENCES_SHARE)))


def share_of(chain: Chain, branch: bytes, author: bytes, number: int, run: RunConfig) -> Share | None:
    """Returns the data that an author trains on for a round; None if it is not known here.

    With overlap it may begin before the last state. So the share is that of the earliest state from which it may have
    begun: whoever joins or leaves meanwhile changes nothing, and everybody knows which it was."""
    for at in range(max(0, number - 1 - run.agreement.overlap_rounds_max), number):
        state = chain.state_at(branch, at)
        if state is not None and author in state.place:
            return Share(number, state.place[author], len(state.admitted), state.slots_of(author, number, run))
    return None


def is_whole(taken: Taken, number: int, run: RunConfig) -> bool:
    """Whether a contribution that round `number` took is timely work of local steps, of more than half of them."""
    usual = number - 1 - run.agreement.overlap_rounds_max
    is_short = 0 < 2 * taken.steps <= run.recipe.local_steps
    return run.recipe.spec.kind == "local" and taken.base_round >= usual and not is_short


def beside(manifest: Manifest, taken: Taken, part_of: Callable[[int], int]) -> list[Taken]:
    """Draws the contributions that one is compared with, of those to the same part of the model (`part_of`)."""
    draw, part = manifest.digest + taken.author, part_of(taken.round)
    others = [each for each in manifest.counted if each.author != taken.author and part_of(each.round) == part]
    return sorted(others, key=lambda each: blake3(draw + each.author).digest())[:REFERENCES]


def audit_of(
    chain: Chain, run: RunConfig, number: int, key: bytes, *, is_summoned: bool, back_max: int = BACK_MAX
) -> Audit | str:
    """Returns the order to measure a key's contribution that a round took, or why it cannot be measured."""
    entry = chain.entry(number)
    if not run.is_audited:
        return "nobody but its author has the data of a contribution to this run, or a round is too small"
    if entry is None:
        return f"round {number} is not kept here, or not decided yet"
    taken = next((each for each in entry.manifest.taken if each.author == key), None)
    if taken is None:
        return f"round {number} took no contribution of this key"
    since = tuple(each.manifest for each in chain.entries_after(taken.base_round))
    if not 0 < len(since) <= back_max or len(since) != chain.state.round - taken.base_round:
        return f"the weights of round {taken.base_round} are too long ago"
    share = share_of(chain, entry.manifest.branch, key, taken.round, run)
    if share is None:
        return "the state from which its author began is not kept here"
    return Audit(entry.manifest, since, taken, share, sequences_of(run, is_summoned=is_summoned))


def draw(state: AgreedState, me: bytes, keys: Sequence[bytes], ranges: Mapping[bytes, str], rng: Random) -> bytes:
    """Draws which of these contributions a member measures: often one of a key on trial, or that was until lately, and
    of those mostly one that others found working, or else that nobody has measured yet.

    Keys cost nothing, and addresses something: all new keys in one range of addresses have the chance of one key, and
    a crowd of them keeps nobody from looking at who counts."""
    conducts = {key: state.admitted[state.place[key]].conduct for key in keys}
    ranks = {key: _rank(conduct) for key, conduct in conducts.items()}
    new = [key for key in keys if _is_new(conducts[key], state.round) and me not in conducts[key].passed_by]
    if not new or rng.random() >= TRIAL_CHANCE:
        return rng.choice([key for key in keys if conducts[key].tier is not Tier.ON_TRIAL] or keys)
    rng.shuffle(new)
    is_ranked = rng.random() < RANKED_CHANCE  # not always, for one member can say that it found work
    if is_ranked:
        new.sort(key=lambda key: -ranks[key])
    new = [*{ranges.get(key): key for key in new}.values()]  # the last of each range
    best = min(ranks[key] for key in new)
    return rng.choice([key for key in new if ranks[key] == best] if is_ranked else new)


def _is_new(conduct: Conduct, number: int) -> bool:
    if conduct.tier is Tier.COUNTED:
        return 0 < conduct.since > number - NEW_ROUNDS
    return conduct.tier is Tier.ON_TRIAL or bool(conduct.passed_by)  # suspended liars are not worth half of all audits


def _rank(conduct: Conduct) -> int:
    if conduct.passed_by or conduct.tier is Tier.COUNTED:
        return 0
    return 2 if conduct.doubt else 1


class Auditing:
    """This node's audits, one at a time."""

    def __init__(self, context: Context, pools: Pools, chain: Chain, share: float) -> None:
        """share: of what the node trains; 0: it never audits"""
        self.context, self.pools, self.chain, self.share = context, pools, chain, share
        # Sequences that may be spent: at first those of an audit, for it is worst to know nothing.
        self.saved = float(OTHERS * sequences_of(context.run, is_summoned=False))
        self.doing: Doing | None = None
        self.said: deque[tuple[bytes, int]] = deque(maxlen=SAID_KEPT)  # answered summonses: key and round

    def trained(self) -> None:
        whole = self.context.run.recipe.round_sequences
        most = max(SAVED_ROUNDS * self.share * whole, OTHERS * sequences_of(self.context.run, is_summoned=False))
        self.saved = min(self.saved + self.share * whole, most)

    def look(self, applied_round: int) -> None:
        """Begins an audit if one is due."""
        context, state = self.context, self.chain.state
        may = self.share and context.run.is_audited and context.me in state.roster.seat and not context.is_stopping
        if not may or self.doing is not None or applied_round != state.round:
            return
        for summons in state.summons:
            place = Measured(context.me, summons.key, summons.round, 0, 0, is_summoned=True)
            is_new = (summons.key, summons.round) not in self.said
            if is_new and may_report(state, place) and self._begin(summons.round, summons.key, is_summoned=True):
                return
        cost = OTHERS * sequences_of(context.run, is_summoned=False)
        if self.saved >= cost and context.rng.random() < CHANCE:
            self._draw()

    def _draw(self) -> None:
        state, context = self.chain.state, self.context
        keys = [key for key, number, _ in state.taken_lately if number == state.round]
        keys = [
            key for key in keys if may_report(state, Measured(context.me, key, state.round, 0, 0, is_summoned=False))
        ]
        if keys:
            self._begin(state.round, draw(state, context.me, keys, context.peers, context.rng), is_summoned=False)

    def _begin(self, number: int, key: bytes, *, is_summoned: bool) -> bool:
        order = audit_of(self.chain, self.context.run, number, key, is_summoned=is_summoned)
        if isinstance(order, str):
            return False
        self.saved -= 0 if is_summoned else OTHERS * order.sequences
        self.doing = Doing(order, self.chain.state.branch, is_summoned)
        self.context.emit(order)
        return True

    def done(self, event: Audited) -> None:
        """Says what an audit has found, if it still counts."""
        doing, context, state = self.doing, self.context, self.chain.state
        if doing is None or (doing.order.manifest.round, doing.order.taken.author) != (event.round, event.key):
            return
        self.doing = None
        if event.why:
            context.counters["audits dropped"] += 1
            return
        context.counters["audits"] += 1
        allowance = 0 if is_whole(doing.order.taken, event.round, context.run) else ALLOWANCE
        allowed = min(event.strength + allowance, STRENGTH_MAX)
        found = event.z, allowed, doing.is_summoned
        if doing.branch == state.branch and may_report(state, Measured(context.me, event.key, event.round, *found)):
            report = context.signed(AuditReport(state.branch, event.round, event.key, *found, context.me))
            self.pools.requests.add(report, state)
            context.publish(report)
            if doing.is_summoned:
                self.said.append((event.key, event.round))
