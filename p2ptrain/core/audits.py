"""Audits: what the members find of each other's contributions, and who counts because of it.

Whoever has the weights that a contribution was computed from, and the sequences that its author was given, can measure
whether it comes from them (train/matched_filter.py). A member measures a few, which nobody knows beforehand, and signs
two numbers: `z`, how much more the contribution answers to its author's sequences than to others', and `strength`, how
far it goes where all contributions go. Manifests carry them as they carry evidence.

A number that a single member signs never decides. It adds to a sum (a CUSUM, Page 1954): `doubt` grows where z is below
half of what it typically is, `harm` where the strength is below what honest work has, and both sink where they are
above. When a sum crosses its bound, all members are summoned to measure that very contribution, with many more
sequences. It lies in the past, so its author cannot mend it, and an honest one has nothing to fear: as soon as a quorum
has measured, the medians decide, and who was far from them may not audit for a time that doubles. Two failures within
FAILED_ROUNDS suspend: after the first, all measure the next contribution, too, and a pass in between forgives nothing.

    on trial    in an open run, a newcomer: its contributions are applied to nothing, and it has no vote
    counted     PASSES members found work of its own, and all together found it again
    suspended   the members found no work of its own: as on trial, but it keeps its vote
    expelled    nobody found enough work of its own for TRIAL_ROUNDS, or it had to be found working once before: it
                loses its seat, and then its key is forgotten

Nobody is summoned for a doubt about who counts for nothing anyway, so a crowd of new keys costs no summons.

Passes also add to a credit, which fades with the audits. A seat in an open run needs half of the credit that members
have in the median, for the time since its key was admitted: keys that share one machine's work share one machine's
credit, and a pass of fewer steps adds as much less. Whoever had to be found working keeps its seat by work as well: its
`work` grows by what it does and sinks by half of what members do in the median, and with none left the seat is gone.
So who works for one key until it has a seat, and then for the next, loses the first."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from statistics import median_low
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from p2ptrain.core.messages import SEATS_MAX, Key, Number, Strength, Z
from p2ptrain.core.roster import quorum_of, tolerated_by

if TYPE_CHECKING:
    from p2ptrain.config import RunConfig
    from p2ptrain.core.manifest import Manifest
    from p2ptrain.core.state import Admitted, AgreedState

AUDIT_ROUNDS = 4  # after which a contribution is not audited any more
AUDITED_FROM = 5  # counted keys: with fewer contributions there is hardly anything to compare with
TRIAL_ROUNDS = 512  # in which a key has to be found working, or to be found working again
PASSES = 4  # members that have to find work of its own before a key counts
SUMMONS_MAX = 4  # open at a time: each costs every member an audit
AGREE_IN_BOTH = 3  # from this protocol version on, what too few measured has to agree in strength as it has in z
SUMMONS_ROUNDS = 8  # until a summons ends without an outcome, because a quorum did not measure
TYPICAL_STEP = 32  # by which an audit moves the typical z up or down, towards the median: a third cannot move that far
TYPICAL_ROUNDS = 16  # in which one audit of a member moves it: who lies can say something in every round
# From docs/explanation/matched-filter.md, for audits of 32 sequences and, where all measure, of all of them.
TYPICAL_LEAST = 1_000  # below it, at the beginning of a run, nobody is suspended for a low z
PASS = 700  # z of a pass at least: one in eight without work has it in one audit, one in fifty where all measure
# z below which a contribution that all measured is no work: two thirds of those without work have less, and of honest
# ones one in 5,000, or, early in a run with large batches, one in 100.
FAIL = 150
DOUBT = 1_000  # two audits in which z is zero, while it is typically one
HARM = 800
STRENGTH_LEAST = 600  # of honest work; who adds harm to it has less
MUTED_ROUNDS = 64  # in which a member's audits do not count after it was far off; doubled each time
STRIKES_MAX = 16
FAILED_ROUNDS = 256  # in which a second failure suspends
# In which who accused a member that does not fail does not audit, even if it was not far off: where all found its work,
# and where they found too little for a verdict. Honest members accuse rarely; the second is often a liar's luck.
ACQUITTED_ROUNDS, PAUSED_ROUNDS = 128, 16
FAR_OFF = 150  # from the median of those who measured the same with the same sequences; floats differ by far less
FAR_OFF_ALONE = 1_500  # for the z of the audit that led to it, which read few sequences
FAR_OFF_STRENGTH = 600  # and for its strength
HARM_OF_ONE = 500  # that one audit adds at most: it takes two
CREDIT = 1_024  # of a pass
FADING = 10  # bits: credit loses this fraction with each manifest that has audits
CREDIT_ROUNDS = 1 << FADING  # over which credit gathers
KEPT_ROUNDS = 32  # that a seat lasts, at most, whose machine does nothing: it may rest, or be busy, for a while
NEW_SEAT_ROUNDS = 8  # that a new one does, at most: one machine that goes from key to key has few at a time


class Tier(IntEnum):
    """Whether a key's contributions are applied, and whether it keeps its seat."""

    ON_TRIAL = 0
    COUNTED = 1
    SUSPENDED = 2
    EXPELLED = 3


class Conduct(Struct, frozen=True, array_like=True):
    """The standing of a key by the audits of its contributions, and of the audits that it makes."""

    tier: Tier = Tier.COUNTED
    doubt: Number = 0
    harm: Number = 0
    credit: Number = 0
    passed_by: Annotated[tuple[Key, ...], Meta(max_length=PASSES)] = ()  # the members that found work of its own
    audited: Number = 0  # the last round of which an audit by this key counted
    muted: Number = 0  # the last round in which its audits do not count
    strikes: Annotated[int, Meta(ge=0, le=STRIKES_MAX)] = 0
    since: Number = 0  # the round in which its tier began
    failed: Number = 0  # the last round in which it failed where all measured; 0: none


CLEAN = Conduct()


class Measured(Struct, frozen=True, array_like=True):
    """A member's audit of the contribution of a key that a round took."""

    author: Key
    key: Key
    round: Number
    z: Z
    strength: Strength
    is_summoned: bool  # with all others, and as many sequences


class Summons(Struct, frozen=True, array_like=True):
    """All members are to measure a contribution."""

    key: Key
    round: Number  # that took it
    since: Number
    by: Key  # whose audit led to it; the key itself: none of this contribution
    z: Z  # that it found
    strength: Strength
    found: Annotated[tuple[Measured, ...], Meta(max_length=SEATS_MAX)] = ()  # by the members so far


class Settled(Struct):
    """The changes that a manifest's audits lead to."""

    conduct: dict[bytes, Conduct]  # where it changes
    typical: int
    summons: tuple[Summons, ...]


def counts(state: AgreedState, key: bytes) -> bool:
    """Whether the contributions of an admitted key are applied."""
    return state.admitted[state.place[key]].conduct.tier is Tier.COUNTED


def are_earned(run: RunConfig) -> bool:
    """Whether seats take work that audits have found: the run is open to strangers, and can audit."""
    return run.admission.policy == "open" and run.is_audited


def begins_as(state: AgreedState, run: RunConfig, before: int) -> Conduct:
    """Returns the conduct of a key that is admitted, after `before` others of this round."""
    is_tried = are_earned(run) and state.counted + before >= AUDITED_FROM
    return Conduct(Tier.ON_TRIAL, since=state.round + 1) if is_tried else CLEAN


def may_leave(state: AgreedState, key: bytes) -> bool:
    """Whether a key may give its admission up: who is suspected would come back as if nothing had been."""
    conduct = state.admitted[state.place[key]].conduct
    has_failed = conduct.failed and state.round <= conduct.failed + FAILED_ROUNDS
    is_judged = conduct.tier is Tier.SUSPENDED or has_failed or any(each.key == key for each in state.summons)
    is_doubted = 2 * conduct.harm >= HARM or (2 * conduct.doubt >= DOUBT and state.typical >= TYPICAL_LEAST)
    return not (is_judged or is_doubted or conduct.muted > state.round)


def may_report(state: AgreedState, measured: Measured) -> bool:
    """Whether an audit may count in the next round."""
    if measured.author not in state.roster.seat or measured.author == measured.key or measured.key not in state.place:
        return False
    conduct = state.admitted[state.place[measured.author]].conduct
    if conduct.muted > state.round:
        return False
    if not measured.is_summoned:
        return conduct.audited < measured.round and (measured.key, measured.round) in state.auditable
    return any(
        (summons.key, summons.round) == (measured.key, measured.round)
        and all(each.author != measured.author for each in summons.found)
        for summons in state.summons
    )


def passes_needed(state: AgreedState) -> int:
    """Returns how many members have to find a key's work before it counts."""
    return min(PASSES, max(1, sum(counts(state, key) for key in state.members)))


def has_earned_seat(state: AgreedState, key: bytes, run: RunConfig) -> bool:
    """Whether the audits of a key without a seat allow it one."""
    entry = state.admitted[state.place[key]]
    if entry.conduct.tier is not Tier.COUNTED:
        return False
    if not are_earned(run) or state.counted < AUDITED_FROM:
        return True
    rounds = min(state.round - entry.since, CREDIT_ROUNDS)
    usual = median_low(state.admitted[state.place[key]].conduct.credit for key in state.members)
    return 2 * entry.conduct.credit * min(state.round, CREDIT_ROUNDS) >= usual * rounds


def has_lost_seat(state: AgreedState, entry: Admitted, run: RunConfig) -> bool:
    """Whether a member is expelled, or had to be found working and does too little to keep its seat."""
    is_idle = entry.conduct.since > 0 and not entry.work and are_earned(run) and state.counted >= AUDITED_FROM
    return is_idle or entry.conduct.tier is Tier.EXPELLED


def work_after(before: int, steps: int, usual: int, run: RunConfig) -> int:
    """Returns what a member's work is after a round that took a contribution of so many of its steps (0: none), and of
    `usual` in the median of the members: it grows for who does more than half of that, and sinks for who does less."""
    whole = run.recipe.local_steps  # of which a round takes one from who does nothing, however few steps are usual
    change = 2 * steps * whole // usual - whole if usual else 2 * steps
    return max(0, min(before + change, KEPT_ROUNDS * whole))


class _Bench:
    """Works one manifest's audits in."""

    def __init__(self, state: AgreedState, number: int, taken: frozenset[bytes], run: RunConfig) -> None:
        self.state, self.number, self.taken, self.run = state, number, taken, run
        self.conduct: dict[bytes, Conduct] = {}
        self.typical = state.typical
        # Who has left since is judged no more.
        self.open = {(each.key, each.round): each for each in state.summons if each.key in state.place}
        self.passes = passes_needed(state)

    def of(self, key: bytes) -> Conduct:
        return self.conduct.get(key) or self.state.admitted[self.state.place[key]].conduct

    def hear(self, measured: Measured) -> None:
        author = self.of(measured.author)
        summons = self.open.get((measured.key, measured.round))
        if measured.is_summoned:
            if summons is not None and all(each.author != measured.author for each in summons.found):
                self.open[measured.key, measured.round] = replace(summons, found=(*summons.found, measured))
        elif author.audited < measured.round:
            self.conduct[measured.author] = replace(author, audited=measured.round)
            is_first = not author.audited or measured.round // TYPICAL_ROUNDS > author.audited // TYPICAL_ROUNDS
            self._add(measured, moves_typical=is_first)

    def _add(self, measured: Measured, *, moves_typical: bool) -> None:
        """Adds a member's audit to the sums of the key that it is about."""
        before, half = self.of(measured.key), self.typical // 2
        has_passed = measured.z >= max(half, PASS) and measured.strength >= STRENGTH_LEAST
        passed_by = before.passed_by
        if has_passed and before.tier is not Tier.COUNTED and measured.author not in passed_by:
            passed_by = (*passed_by, measured.author)[-PASSES:]
        lost = min(before.credit, CREDIT) if before.tier is Tier.ON_TRIAL else 0  # or luck would count for ever
        strength = max(-STRENGTH_LEAST, min(measured.strength, 2 * STRENGTH_LEAST))
        recipe, steps = self.run.recipe, self.state.auditable[measured.key, measured.round]
        earned = CREDIT * recipe.steps_of(steps) // recipe.local_steps  # few steps pass as well as many
        after = self.conduct[measured.key] = replace(
            before,
            doubt=max(0, before.doubt + half - measured.z),
            harm=max(0, before.harm + min(STRENGTH_LEAST - strength, HARM_OF_ONE)),
            credit=before.credit + earned if has_passed else before.credit - lost,
            passed_by=passed_by,
        )
        is_proof = after.tier is not Tier.COUNTED and has_passed and len(passed_by) >= self.passes
        if (self._is_doubted(after) or is_proof) and not self._summon(measured):
            # Who made it cross has to answer for that, so it does not cross without.
            self.conduct[measured.key] = replace(
                after, doubt=min(after.doubt, DOUBT - 1), harm=min(after.harm, HARM - 1)
            )
        if moves_typical and before.tier is Tier.COUNTED and measured.key in self.state.roster.seat:
            self.typical = max(0, self.typical + (TYPICAL_STEP if measured.z > self.typical else -TYPICAL_STEP))

    def _is_doubted(self, conduct: Conduct) -> bool:
        is_low = conduct.harm >= HARM or (conduct.doubt >= DOUBT and self.typical >= TYPICAL_LEAST)
        return is_low and conduct.tier is Tier.COUNTED

    def _summon(self, measured: Measured) -> bool:
        """Summons all to measure this contribution, too; returns False if there is no room."""
        key, number = measured.key, measured.round
        if len(self.open) >= SUMMONS_MAX or any(key == other for other, _ in self.open):
            return False
        self.open[key, number] = Summons(key, number, self.number, measured.author, measured.z, measured.strength)
        return True

    def summon_again(self) -> None:
        """Summons all to the new contributions of those who have failed, just now or before they stayed away."""
        for entry in self.state.admitted:
            if entry.key in self.taken and self._is_doubted(self.of(entry.key)):
                self._summon(Measured(entry.key, entry.key, self.number, 0, 0, is_summoned=True))

    def decide(self) -> None:
        """Ends the summonses that a quorum has answered, and those that are too old."""
        size = len(self.state.members)
        for place, summons in list(self.open.items()):
            is_over = self.number >= summons.since + SUMMONS_ROUNDS
            agreeing = _agreeing(summons.found, self.run.protocol >= AGREE_IN_BOTH) if is_over else summons.found
            if len(agreeing) >= (tolerated_by(size) + 1 if is_over else quorum_of(size)):
                del self.open[place]
                self._judge(summons, agreeing)
            elif is_over:
                del self.open[place]
                self._leave_open(summons.key)

    def _judge(self, summons: Summons, agreeing: Sequence[Measured]) -> None:
        z = median_low(each.z for each in agreeing)
        strength = median_low(each.strength for each in agreeing)
        far_off = {
            each.author
            for each in summons.found
            if abs(each.z - z) > FAR_OFF or abs(_clipped(each.strength) - _clipped(strength)) > FAR_OFF
        }
        is_far = abs(summons.z - z) > FAR_OFF_ALONE
        is_far = is_far or abs(_clipped(summons.strength) - _clipped(strength)) > FAR_OFF_STRENGTH
        if summons.by != summons.key and is_far:
            far_off.add(summons.by)
        for author in sorted(far_off & self.state.place.keys()):
            conduct = self.of(author)
            muted = self.number + (MUTED_ROUNDS << conduct.strikes)
            self.conduct[author] = replace(conduct, muted=muted, strikes=min(conduct.strikes + 1, STRIKES_MAX))
        conduct = self.of(summons.key)
        if (z < FAIL and self.typical >= TYPICAL_LEAST) or strength < STRENGTH_LEAST:
            self._fail(summons.key)
            return
        if conduct.tier is Tier.COUNTED and summons.by in self.state.place and summons.by != summons.key:
            accuser, pause = self.of(summons.by), ACQUITTED_ROUNDS if z >= PASS else PAUSED_ROUNDS
            self.conduct[summons.by] = replace(accuser, muted=max(accuser.muted, self.number + pause))
        if z < PASS:
            self._leave_open(summons.key)
            return
        self.conduct[summons.key] = replace(conduct, doubt=0, harm=0)
        if len(conduct.passed_by) >= self.passes:
            self.conduct[summons.key] = replace(
                self.of(summons.key), tier=Tier.COUNTED, passed_by=(), since=self.number
            )

    def _fail(self, key: bytes) -> None:
        conduct = self.of(key)
        has_failed = conduct.failed and self.number <= conduct.failed + FAILED_ROUNDS
        if conduct.tier is Tier.COUNTED and not has_failed:
            self.conduct[key] = replace(conduct, failed=self.number, doubt=max(conduct.doubt, DOUBT))
            return
        tier, since = conduct.tier, conduct.since
        if tier is Tier.COUNTED:  # who had to be found working and stopped would vote for TRIAL_ROUNDS more
            tier, since = Tier.EXPELLED if since else Tier.SUSPENDED, self.number
        self.conduct[key] = replace(conduct, tier=tier, since=since, doubt=0, harm=0, credit=0, passed_by=(), failed=0)

    def _leave_open(self, key: bytes) -> None:
        """Lets the next doubt summon all again."""
        conduct = self.of(key)
        self.conduct[key] = replace(conduct, harm=0, doubt=min(conduct.doubt, 3 * DOUBT // 4))

    def fade(self) -> None:
        for entry in self.state.admitted:
            conduct = self.of(entry.key)
            if conduct.credit:
                self.conduct[entry.key] = replace(conduct, credit=conduct.credit + (-conduct.credit >> FADING))


def _agreeing(found: Sequence[Measured], in_both: bool) -> Sequence[Measured]:
    """Returns the most reports of which none is far off the first: honest ones agree, however few they are."""

    def is_near(each: Measured, one: Measured) -> bool:
        apart = abs(_clipped(each.strength) - _clipped(one.strength)) if in_both else 0
        return max(apart, abs(each.z - one.z)) <= FAR_OFF

    return max(([each for each in found if is_near(each, one)] for one in found), key=len, default=())


def _clipped(strength: int) -> int:
    """Only whether a strength is far below the others' matters, and large ones are noisy."""
    return max(-1_000, min(strength, 1_000))


def settle(state: AgreedState, manifest: Manifest, run: RunConfig) -> Settled:
    """Works in the audits that a manifest carries."""
    if not (manifest.audits or state.summons):
        return Settled({}, state.typical, state.summons)
    bench = _Bench(state, manifest.round, frozenset(taken.author for taken in manifest.taken), run)
    for measured in manifest.audits:
        if may_report(state, measured):  # more than f liars may have certified anything
            bench.hear(measured)
    bench.decide()
    bench.summon_again()
    if manifest.audits:
        bench.fade()
    return Settled(bench.conduct, bench.typical, tuple(bench.open[place] for place in sorted(bench.open)))
