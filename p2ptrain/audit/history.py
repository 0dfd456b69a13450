"""Verifies a node's log: every certificate against the roster before it, and every roster from genesis on.

The write-ahead log holds certified steps, each with the agreed state that, so the node says, it led to. This module
follows the steps again by the core's own rules (`follow`, `jump`) and compares the results with the log. Everything
before the first kept step is proved as for a newcomer (core/history.py): the roster changes lead from genesis to a
roster, and a certificate of that roster names the digest of the state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.audit.findings import Grade, Report
from p2ptrain.config import RunConfig
from p2ptrain.core.events import Certified, Record, Said, Trunk
from p2ptrain.core.history import CHANGES_MAX, STAGES_MAX, Beginning, BranchStart, Entry, Step, follow, jump, name_of
from p2ptrain.core.journal import Journal
from p2ptrain.core.messages import Message, decode
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.identity import verify
from p2ptrain.store.log import ALL_ROUNDS, newest_segment, read_own
from p2ptrain.store.segment import Snapshot, decoded, frames_of
from p2ptrain.store.store import beginning

SIGNED_FIX = "Do not go on from this directory: move it away and join again, and tell the others"
RESTORE_FIX = "Restore the directory from a copy, or move it away and join again"


class CountingVerifier:
    """Checks one run's signatures, and counts the valid ones."""

    def __init__(self, run_id: bytes) -> None:
        self.run_id, self.count = run_id, 0

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        is_right = verify(key, signed, signature)
        self.count += is_right
        return is_right

    def read(self, envelope: bytes) -> Message:
        return decode(envelope, self).message


@dataclass(slots=True)
class LogContents:
    """A log, folded into a journal; nothing of it is verified yet."""

    path: Path
    journal: Journal
    beginning: AgreedState  # of the run
    said: list[Said] = field(default_factory=list)  # everything in the segment


@dataclass(slots=True)
class ProvedLog:
    states: list[AgreedState] = field(default_factory=list)  # the first one precedes the first entry
    entries: list[Entry] = field(default_factory=list)
    kept_from: int = 0  # the node has to have the payloads of all rounds after this one

    @property
    def certified(self) -> tuple[int, int] | None:
        """The first and the last round whose certificate holds."""
        return (self.entries[0].manifest.round, self.entries[-1].manifest.round) if self.entries else None

    @property
    def roots(self) -> dict[int, bytes]:
        return {state.root_round: state.root for state in self.states}

    @property
    def newest_root(self) -> int:
        """The last round whose root is certified; payloads of later rounds may still be on their way to the node."""
        return self.states[-1].root_round if self.states else -1


def read_log(directory: Path, run: RunConfig, verifier: CountingVerifier, report: Report) -> LogContents | None:
    """Reads the newest segment as far as it is consistent; None if nothing can be used."""
    where = directory / "wal"
    try:
        found = newest_segment(where)
    except DataError as error:
        report.open(error.path or where, error.problem, error.fix)
        return None
    if found is None:
        report.open(where, "there is no log, and therefore no history", RESTORE_FIX)
        return None
    path, data = found
    try:
        first = beginning(directory, run)
    except DataError as error:
        report.open(error.path or where, error.problem, error.fix)
        return None
    return _fold(path, data, first, verifier, report)


def _fold(
    path: Path, data: bytes, first_state: AgreedState, verifier: CountingVerifier, report: Report
) -> LogContents | None:
    try:
        bodies, end = frames_of(path, int(path.name[:8]), data)
        (at, first), *rest = bodies
        snapshot = decoded(path, at, first)
    except DataError as error:
        report.wrong(path, error.problem, RESTORE_FIX)
        return None
    if not isinstance(snapshot, Snapshot):
        report.wrong(path, "the segment does not begin with a snapshot", RESTORE_FIX)
        return None
    try:
        journal = Journal.restored(snapshot.saved, ALL_ROUNDS, verifier.read)
        kept = LogContents(path, journal, first_state, list(snapshot.saved.said))
        for at, body in rest:
            record = decoded(path, at, body)
            if isinstance(record, Snapshot) or not _follows(kept.journal, record):
                what = f"the record at byte {at} does not follow from those before it"
                report.wrong(path, what, RESTORE_FIX)
                return kept
            if isinstance(record, Said):
                kept.said.append(record)
            kept.journal.write(record, verifier.read(record.envelope) if isinstance(record, Said) else None)
    except DataError as error:
        report.wrong(path, error.problem, RESTORE_FIX)
        return None
    except RemoteProtocolError as error:
        report.wrong(path, f"near byte {at}: holds what no honest node would have said: {error.why}", RESTORE_FIX)
        return None
    report.holds(path, f"{len(bodies)} records, each what was written")
    if end < len(data):
        what = f"{len(data) - end} bytes at the end belong to an incomplete record"
        report.note(Grade.NOTE, path, what, "This is normal after a crash, and while a node is writing")
    return kept


def _follows(journal: Journal, record: Record) -> bool:
    """Whether a journal accepts a record. The journal itself does not check that a step follows one that it holds."""
    if not isinstance(record, Certified):
        return True
    parent = record.step.parent if isinstance(record.step, Beginning) else record.step.manifest.parent
    if record.trunk is not None and record.trunk.base is not None:
        return record.trunk.base.head == parent
    # The parent is usually the last one; a forged log must not make every step search all of them.
    return any(parent == each.state.head for each in reversed(journal.history)) or parent == journal.base.head


def check_said(kept: LogContents, me: bytes | None, report: Report) -> None:
    """Checks that all messages are by the directory's owner; their signatures were checked on reading."""
    authors = {getattr(read_own(said.envelope), "author", b"") for said in kept.said} - {b""}
    if me is None:
        return
    if not authors:
        report.note(Grade.NOTE, "identity", "the log holds no signed message to tell by")
    elif authors == {me}:
        report.holds("identity", f"it signed the {len(kept.said)} messages of the log")
    else:
        others = ", ".join(sorted(author.hex()[:16] for author in authors - {me}))
        report.wrong("identity", f"the messages in the log are not by {me.hex()[:16]} but by {others}", RESTORE_FIX)


# -- The chain --------------------------------------------------------------------------------------


def prove(kept: LogContents, run: RunConfig, verifier: CountingVerifier, report: Report) -> ProvedLog:
    """Follows the log from genesis to its head and returns what holds, up to the first step that does not."""
    beginning, journal, base = kept.beginning, kept.journal, kept.journal.base
    proved = ProvedLog(kept_from=max(base.round, journal.state.round - run.agreement.history_rounds))
    if journal.halted is not None:
        number = journal.halted.first.manifest.round
        what = f"two manifests of round {number} were certified, so that more members lied than may"
        report.wrong(f"round {number}", what, "Nothing that was certified since then is proved; see `p2ptrain status`")
    is_led_to = base.digest == beginning.digest or _check_changes(kept, beginning, verifier, report)
    _check_trunk(journal.trunk, [each.step for each in journal.history], beginning, report)
    state, is_named = base, base.digest == beginning.digest
    proved.states.append(state)
    for each in journal.history:
        step = each.step
        where = f"round {state.round + 1}" if isinstance(step, Entry) else f"branch {step.branch.hex()[:16]}"
        try:
            state = follow(state, step, run, verifier)
        except RemoteProtocolError as error:
            report.wrong(where, error.why, SIGNED_FIX)
            break
        if isinstance(step, Entry):
            if not is_named and is_led_to:
                report.holds("agreed state", f"that of round {base.round} is the one that the manifest after it names")
            is_named = True
            proved.entries.append(step)
        if state.digest != each.state.digest:
            report.wrong(where, "the agreed state in the log is not the one that the step leads to", RESTORE_FIX)
        proved.states.append(state)
    if not is_named:
        what = f"no certificate names that of round {base.round}"
        report.open("agreed state", what, "Let the node finish one more round")
    if not is_led_to:
        proved.states, proved.entries = [], []  # nobody knows by whose quorum
    if proved.certified is not None:
        first, last = proved.certified
        report.holds("certificates", f"rounds {first} to {last}, each by a quorum of the roster before it")
    elif is_led_to:
        report.note(Grade.NOTE, "certificates", "no round is certified yet")
    return proved


def _check_changes(kept: LogContents, beginning: AgreedState, verifier: CountingVerifier, report: Report) -> bool:
    """Checks that the kept roster changes lead from genesis to the base's roster."""
    journal, base = kept.journal, kept.journal.base
    inside = {name_of(each.step) for each in journal.history}
    changes: list[Step] = []
    for change in journal.trunk.changes if journal.trunk is not None else ():
        if name_of(change) in inside:
            break  # from here on, each step is followed
        changes.append(change)
    try:
        jump(beginning, tuple(changes), base, verifier)
    except RemoteProtocolError as error:
        if journal.trunk is not None and len(journal.trunk.changes) >= CHANGES_MAX:
            report.open("roster", f"more than {CHANGES_MAX} changes: the first ones are not kept", "")
        else:
            what = f"its changes do not lead from genesis to round {base.round}: {error.why}"
            report.wrong("roster", what, SIGNED_FIX)
        return False
    what = f"{len(changes)} changes lead from genesis to the {len(base.members)} members of round {base.round}"
    report.holds("roster", what)
    return True


def _check_trunk(trunk: Trunk | None, steps: list[Step], beginning: AgreedState, report: Report) -> None:
    """Checks that the permanent records list every roster change, and all branches in the order in which they began."""
    changes = list(trunk.changes) if trunk is not None else []
    named = {name_of(change) for change in changes}
    for step in steps:
        if (isinstance(step, Beginning) or step.manifest.changes_roster) and name_of(step) not in named:
            number = step.round if isinstance(step, Beginning) else step.manifest.round
            what = f"the change of round {number} is not among those that are kept forever"
            report.wrong("roster", what, RESTORE_FIX)
    if trunk is None:
        return
    begun = [BranchStart(change.branch, change.round) for change in changes if isinstance(change, Beginning)]
    lineage = [BranchStart(beginning.branch, beginning.round), *begun][-STAGES_MAX:]
    if list(trunk.lineage) != lineage and len(changes) < CHANGES_MAX:
        report.wrong("branches", "the log does not list the branches that were begun", RESTORE_FIX)
    elif len(lineage) > 1:
        report.holds("branches", f"{len(lineage) - 1}, each begun by a quorum of its own members")
