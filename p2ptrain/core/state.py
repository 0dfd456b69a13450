"""The agreed state: the replicated state that all members share after a round, and its transition by a manifest.

It holds the roster, admitted keys with what audits have found of them, bans, the window of contributions taken,
absences, spent invitations, and what members have moved. A manifest names the digest of the state before it, so that a
certificate also proves the state. Everything here is a function of the state and the manifest alone.

A contribution is taken at most once: the window remembers (author, round) for as long as a contribution of that round
could be taken. Its base may be at most `staleness_rounds_max` non-empty manifests old, and is never later than its
round, so older entries can be dropped."""

from __future__ import annotations

from functools import cached_property, lru_cache
from statistics import median_low
from typing import TYPE_CHECKING, Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from p2ptrain.config import RunConfig
from p2ptrain.core import audits
from p2ptrain.core.messages import ADMITTED_MAX, NUMBER_MAX, SEATS_MAX, Announcement, Digest, Key, Number, Short
from p2ptrain.core.roster import Roster, changed, roster_of
from p2ptrain.core.succession import UNMOVED, Succession, succession_after
from p2ptrain.digest import digest
from p2ptrain.share import PassSlots

if TYPE_CHECKING:
    from p2ptrain.core.manifest import Manifest

BANS_MAX = 4_096  # only admitted keys are banned, at most 1,024 at a time; then the oldest ban is forgotten
SPENT_MAX = 65_536  # uses of unexpired invitations; when full, no more are accepted until some expire
USES_MAX = 1_024  # of an invitation: as many keys as a run admits
WINDOW_MAX = 65 * ADMITTED_MAX  # staleness_rounds_max is 64 at most
# Times absence_rounds_max: how long an open run keeps a key that has no seat and offers nothing. Long enough for a
# machine fifty times slower than the rest; a guess beyond that.
UNSEATED_ABSENCES = 64
AFTER_MAX = 16  # transitions remembered: in a simulation a thousand nodes take the same one


class Admitted(Struct, frozen=True, array_like=True):
    key: Key
    since: Number  # the round that admitted it
    taken: Number  # contributions taken since it was last without a seat
    absent: Number  # rounds in a row unheard (members), or with nothing taken (others)
    steps: Number = 0  # by capability: of its last contributions, the most of them fading; 0: none known, so all
    conduct: audits.Conduct = audits.CLEAN  # by the audits
    work: Number = 0  # where seats are earned: twice the local steps of a member less what is usual, up to a bound


class Taken(Struct, frozen=True, array_like=True):
    author: Key
    round: Number
    base_round: Number
    payload: Digest
    payload_bytes: Number
    steps: Number  # a claim: local steps behind it
    content: Short
    counts: bool = True  # False: it is taken so that it can be audited, and applied to nothing


Auditable = tuple[Key, Number, Number]  # author, the round that took it, local steps that it claims
Uses = Annotated[int, Meta(ge=0, le=USES_MAX)]


class AgreedState(Struct, frozen=True, array_like=True, dict=True):
    """The state after round `round` of `branch`."""

    branch: Digest
    round: Number
    head: Digest  # the manifest of this round; at the start of a branch, the branch
    members: Annotated[tuple[Key, ...], Meta(max_length=SEATS_MAX)]  # ascending
    admitted: Annotated[tuple[Admitted, ...], Meta(max_length=ADMITTED_MAX)]  # by key, ascending; includes the members
    bans: Annotated[tuple[Key, ...], Meta(max_length=BANS_MAX)]  # the oldest first
    # (author, round, content) taken; ascending
    window: Annotated[tuple[tuple[Key, Number, Short], ...], Meta(max_length=WINDOW_MAX)]
    filled: Annotated[tuple[Number, ...], Meta(max_length=65)]  # the last rounds whose manifest was not empty
    spent: Annotated[tuple[tuple[Key, Number], ...], Meta(max_length=SPENT_MAX)]  # (bearer, last round) of each use
    root_round: Number  # the round of the newest certified root
    root: Digest
    assigned: Number  # by capability: local steps that all rounds so far have given out data for
    # of what may be audited, by round
    taken_lately: Annotated[tuple[Auditable, ...], Meta(max_length=audits.AUDIT_ROUNDS * ADMITTED_MAX)] = ()
    typical: Number = 0  # z of a member's contribution
    summons: Annotated[tuple[audits.Summons, ...], Meta(max_length=audits.SUMMONS_MAX)] = ()
    succession: Succession = UNMOVED

    @cached_property
    def digest(self) -> bytes:
        return digest("agreed state", _ENCODER.encode(self))

    @cached_property
    def place(self) -> dict[bytes, int]:
        """The index of each admitted key among all admitted keys."""
        return _places(tuple([entry.key for entry in self.admitted]))

    @cached_property
    def banned(self) -> frozenset[bytes]:
        return frozenset(self.bans)

    @cached_property
    def taken(self) -> frozenset[tuple[bytes, int]]:
        return frozenset(entry[:2] for entry in self.window)

    @cached_property
    def contents(self) -> frozenset[bytes]:
        """The contents taken lately, which nobody contributes again, not even their authors."""
        return frozenset(entry[2] for entry in self.window)

    @cached_property
    def auditable(self) -> dict[tuple[bytes, int], int]:
        return {entry[:2]: entry[2] for entry in self.taken_lately}

    @cached_property
    def counted(self) -> int:
        """How many admitted keys' contributions are applied."""
        return sum(entry.conduct.tier is audits.Tier.COUNTED for entry in self.admitted)

    @cached_property
    def roster(self) -> Roster:
        return roster_of(self.members)

    def idle(self, run: RunConfig) -> list[Admitted]:
        """Returns the keys that a full open run forgets for newcomers: no seat, and nothing taken of them lately."""
        if run.admission.policy != "open":
            return []
        least = run.admission.absence_rounds_max
        return [entry for entry in self.admitted if entry.absent >= least and entry.key not in self.roster.seat]

    def oldest_base(self, staleness: int) -> int:
        """Returns the earliest base that a contribution for the next round may have."""
        return self.filled[-staleness - 1] if len(self.filled) > staleness else 0

    def may_take(self, offer: Announcement, staleness: int) -> bool:
        """Whether the next round may take this contribution."""
        return offer.branch == self.branch and self.is_open_to(offer, staleness)

    def is_open_to(self, offer: Announcement | Taken, staleness: int) -> bool:
        """The same for a contribution to this branch."""
        return (
            offer.author in self.place
            and offer.round <= self.round + 1
            and self.oldest_base(staleness) <= offer.base_round <= self.round
            and (offer.author, offer.round) not in self.taken
            and offer.content not in self.contents
        )

    def slots_of(self, key: bytes, round_number: int, run: RunConfig) -> PassSlots | None:
        """Returns what a key trains on in a later round, if nothing changes until then; None if its place says it."""
        if run.data.assignment != "capability":
            return None
        each, place = run.recipe.step_sequences, self.place[key]
        steps = self._steps(run)
        start = self.assigned + (round_number - self.round - 1) * sum(steps)
        return PassSlots(start * each, sum(steps) * each, sum(steps[:place]) * each, steps[place] * each)

    def after(self, manifest: Manifest, run: RunConfig) -> AgreedState:
        """Returns the state after a manifest: the same object for all nodes of one process."""
        assert manifest.state == self.digest, "a manifest applies to the state that it names"
        known = _AFTER.get((self.digest, manifest.digest))
        if known is not None and known[0] is run:
            return known[1]
        found = self._after(manifest, run)
        _AFTER[self.digest, manifest.digest] = run, found
        for old in list(_AFTER)[:-AFTER_MAX]:  # a copy: another thread, which checks an origin, may add one
            _AFTER.pop(old, None)
        return found

    def _after(self, manifest: Manifest, run: RunConfig) -> AgreedState:
        members = changed(self.members, manifest.seated, manifest.unseated)
        filled = (*self.filled, manifest.round) if manifest.taken else self.filled
        filled = filled[-run.agreement.staleness_rounds_max - 1 :]
        window = (*self.window, *((taken.author, taken.round, taken.content) for taken in manifest.taken))
        if len(filled) > run.agreement.staleness_rounds_max:
            window = tuple(entry for entry in window if entry[1] >= filled[0])
        oldest = manifest.round - audits.AUDIT_ROUNDS
        taken_lately = (*self.taken_lately, *((taken.author, manifest.round, taken.steps) for taken in manifest.taken))
        settled, is_by_capability = audits.settle(self, manifest, run), run.data.assignment == "capability"
        spent = (*self.spent, *((join.bearer, join.last_round) for join in manifest.joins if join.last_round))
        return AgreedState(
            branch=self.branch,
            round=manifest.round,
            head=manifest.digest,
            members=members,
            admitted=self._admitted_after(manifest, members, run, settled.conduct),
            bans=(*self.bans, *manifest.banned)[-BANS_MAX:],
            window=tuple(sorted(window)),
            filled=filled,
            spent=tuple(sorted(entry for entry in spent if entry[1] > manifest.round)),
            root_round=manifest.root_round,
            root=manifest.root,
            assigned=(self.assigned + sum(self._steps(run))) % NUMBER_MAX if is_by_capability else 0,
            taken_lately=tuple([entry for entry in taken_lately if entry[1] > oldest]),
            typical=settled.typical,
            summons=settled.summons,
            succession=succession_after(self, manifest, members, run),
        )

    def _steps(self, run: RunConfig) -> list[int]:
        """The steps that a round has data for, by place."""
        return [entry.steps or run.recipe.local_steps for entry in self.admitted]

    def _admitted_after(
        self, manifest: Manifest, members: tuple[bytes, ...], run: RunConfig, conducts: dict[bytes, audits.Conduct]
    ) -> tuple[Admitted, ...]:
        taken = {taken.author: taken.steps for taken in manifest.taken}
        unheard = set(self.roster.in_seats(manifest.absent) or ())
        unseated = set(manifest.unseated)
        gone = {*manifest.leaves, *manifest.banned}
        seated, seated_now, are_earned = set(members), set(manifest.seated), audits.are_earned(run)
        patience = UNSEATED_ABSENCES * run.admission.absence_rounds_max
        worked = {author: run.recipe.steps_of(steps) for author, steps in taken.items()}
        usual = median_low(worked.get(key, 0) for key in self.members)
        joined = [join.key for join in manifest.joins if join.key not in self.place]
        joined.sort(key=lambda key: blake3(self.head + key).digest())  # drawn, for the first of them may need no trial
        begun = (audits.begins_as(self, run, before) for before in range(len(joined)))
        entries = [Admitted(key, manifest.round, 0, 0, 0, each) for key, each in zip(joined, begun, strict=True)]
        for entry in self.admitted:
            key = entry.key
            if key in gone:
                continue
            member = key in seated
            is_missing = key in unheard if member else key not in taken
            absent = entry.absent + 1 if is_missing and key not in unseated else 0
            if not member and run.admission.policy == "open" and absent > patience:
                continue
            count = 0 if key in unseated else entry.taken + (key in taken)
            steps = _steps_after(entry.steps, taken.get(key, 0), run)
            conduct = conducts.get(key, entry.conduct)
            if conduct.tier is not audits.Tier.COUNTED and manifest.round > conduct.since + audits.TRIAL_ROUNDS:
                if not member:
                    continue
                conduct = msgspec.structs.replace(conduct, tier=audits.Tier.EXPELLED)
            work = audits.work_after(entry.work, worked.get(key, 0), usual, run) if member and are_earned else 0
            if are_earned and key in seated_now:
                work = min(count, audits.NEW_SEAT_ROUNDS) * run.recipe.local_steps
            found = Admitted(key, entry.since, count, absent, steps, conduct, work)
            entries.append(entry if found == entry else found)
        over = len(entries) - run.admission.contributors_max
        if over > 0:
            least = run.admission.absence_rounds_max
            idle = [entry for entry in entries if entry.absent >= least and entry.key not in seated]
            forgotten = {entry.key for entry in sorted(idle, key=lambda entry: (-entry.absent, entry.key))[:over]}
            entries = [entry for entry in entries if entry.key not in forgotten]
        return tuple(sorted(entries, key=lambda entry: entry.key))

    def regrouped(self, branch: bytes, members: tuple[bytes, ...]) -> AgreedState:
        """Returns the state at the start of a branch of these members. The others stay admitted, without a seat."""
        kept = set(members)
        assert kept <= set(self.members), "only members can regroup"
        return msgspec.structs.replace(
            self,
            branch=branch,
            head=branch,
            members=members,
            succession=Succession(since=self.round),  # two thirds of those who are left have to want it
            admitted=tuple(
                msgspec.structs.replace(entry, absent=0, **({} if entry.key in kept else {"taken": 0, "work": 0}))
                for entry in self.admitted
            ),
        )


_ENCODER = msgspec.msgpack.Encoder()
_AFTER: dict[tuple[bytes, bytes], tuple[RunConfig, AgreedState]] = {}  # by the digests of a state and a manifest


@lru_cache(maxsize=16)
def _places(keys: tuple[bytes, ...]) -> dict[bytes, int]:
    """Cached, because hundreds of kept states share it; must not be changed."""
    return {key: place for place, key in enumerate(keys)}


def genesis(run_id: bytes, members: tuple[bytes, ...], root: bytes) -> AgreedState:
    ordered = tuple(sorted(members))
    return AgreedState(
        branch=run_id,
        round=0,
        head=run_id,
        members=ordered,
        admitted=tuple(Admitted(key, 0, 0, 0) for key in ordered),
        bans=(),
        window=(),
        filled=(),
        spent=(),
        root_round=0,
        root=root,
        assigned=0,
    )


def _steps_after(before: int, taken: int, run: RunConfig) -> int:
    """Returns what is known of a key's steps after a round that took a contribution of so many; 0: it took none.

    One slow round changes little, and who is not in time any more has less and less data kept for it."""
    if run.data.assignment != "capability":
        return 0
    recipe = run.recipe
    least, faded = recipe.local_steps_min or recipe.local_steps, 3 * (before or recipe.local_steps) // 4
    return max(min(taken, recipe.local_steps), faded, least)
