"""Targets on disk: what a node reads when it starts, which a disk, another release or a person may have changed."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.fuzz import Target
from benchmarks.fuzz.core_targets import RUN, SIGNER
from p2ptrain.core.admission import encode_invitation, make_ticket
from p2ptrain.core.events import Observed, PeerSeen, Record, Silence
from p2ptrain.data.dataset import PIECES_NAME
from p2ptrain.data.prepare import UNFINISHED_NAME, _ReadSoFar, _unfinished
from p2ptrain.errors import ConfigError, DataError, HardwareError
from p2ptrain.identity import Identity
from p2ptrain.node.find import read_invitation
from p2ptrain.replay import _ENCODER, _HEADER, _LINE, Header, _parsed
from p2ptrain.store import segment
from p2ptrain.store.checkpoints import STAMP_NAME, FileStamp, Stamp, read_stamp
from p2ptrain.store.diary import Trained, _encoded, read_entries
from p2ptrain.store.mismatches import Mismatches
from p2ptrain.store.records import Batch, Records
from p2ptrain.train.private import Spent, SpentSteps, Told
from tests.helpers.records import lived, row
from tests.helpers.store import some_records

DAMAGED = (DataError,)
PATH = Path("FILE")


def records() -> list[bytes]:
    """Returns a record of each kind, and a snapshot."""
    by_kind: dict[type, Record] = {type(each): each for each in some_records()[1]}
    kinds = [each for kind, each in by_kind.items() if kind is not Silence]
    return [segment.encoded(each) for each in (*kinds, Silence(b"b" * 32, 7), Observed(b"scores"))]


def log() -> bytes:
    """Returns a segment of the log with three records."""
    content = segment.header(1)
    for body in records()[:3]:
        content += segment.frame(1, len(content), body)
    return content


def _reframed(data: bytes) -> object:
    """Decodes a record as it is found in a segment whose digests are right."""
    head = segment.header(1)
    bodies, _ = segment.frames_of(PATH, 1, head + segment.frame(1, len(head), data))
    return segment.decoded(PATH, *bodies[0])


def stamp() -> bytes:
    files = FileStamp(10, "ab" * 32), FileStamp(20, "cd" * 32)
    names = dict.fromkeys(("run", "branch", "head", "root"), "ef" * 32)
    return Stamp(
        format="p2ptrain checkpoint 1", round=3, trained=2, trainer=files[0], state=files[1], **names
    ).encoded()


def _stamped(folder: Path, data: bytes) -> Stamp:
    (folder / STAMP_NAME).write_bytes(data)
    return read_stamp(folder)


def diary() -> bytes:
    return b"".join(_encoded(Trained(number, number, number, 0, 2, (1,), "ab" * 32)) for number in (1, 2))


def _diary(data: bytes) -> bytes:
    entries, whole = read_entries(PATH, data)
    assert b"".join(map(_encoded, entries)) == whole
    return whole


def _records(path: Path, data: bytes) -> object:
    """Reads the records, which replaces a damaged file by a new one."""
    for each in path.parent.iterdir():
        each.unlink()
    path.write_bytes(data)
    with closing(Records(path)) as found:
        past = found.past(10)
        found.addresses()
        found.write(Batch(rounds=[row(9)]))
    return past


def records_file(path: Path) -> bytes:
    with closing(Records(path)) as made:
        made.write(Batch(rounds=[row(1), row(2)], peers=[], mine={"a": 1}))
        made.remember(["/ip4/203.0.113.7/tcp/4001/p2p/" + SIGNER.peer_id])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path.read_bytes()


def _lived(data: bytes) -> None:
    """Reads a row whose digest is right, as one of another release may have it."""
    row_read = msgspec.msgpack.Decoder(dict[str, object]).decode(data)
    lived(1, **{name: value for name, value in row_read.items() if name in row(1)})


def _in_file(path: Path, read: Callable[[Path], object], data: bytes) -> object:
    path.write_bytes(data)
    return read(path)


def _key(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    path.chmod(0o600)
    return Identity.load(path).key


def _invited(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    read_invitation(str(path))


def event_line() -> bytes:
    header = Header(1, "{}", RUN, SIGNER.key, "seed", "real")
    return msgspec.json.encode(header)


def event() -> bytes:
    return _ENCODER.encode((1.5, PeerSeen(SIGNER.key), "ab" * 32, ()))


def _prepared(folder: Path, data: bytes) -> object:
    (folder / UNFINISHED_NAME).write_bytes(data)
    return _unfinished(folder, "a call")


def disk_targets(folder: Path) -> list[Target]:
    for name in ("stamp", "records", "made", "old", f"prepared/{PIECES_NAME}"):
        (folder / name).mkdir(parents=True)
    invitation = encode_invitation(make_ticket(SIGNER.key, SIGNER.sign, RUN, SIGNER.key, 1, 9), RUN)
    mismatches = Mismatches(folder / "mismatches")
    mismatches.note(3)
    noted = (folder / "mismatches").read_bytes()
    Identity.make(folder / "made" / "key")
    key = (folder / "made" / "key").read_bytes()
    told = msgspec.json.encode(Told(8, [Spent(2, 10, 1.0, 5)]))
    database = records_file(folder / "made" / "records.sqlite")
    shutil.rmtree(folder / "made")
    return [
        Target("log", "bytes", (log(),), lambda data: segment.frames_of(PATH, 1, data), DAMAGED),
        Target("log-record", "msgpack", tuple(records()), _reframed, DAMAGED),
        Target("checkpoint-stamp", "json", (stamp(),), partial(_stamped, folder / "stamp"), DAMAGED,
               lambda found: found.encoded()),
        Target("diary", "json lines", (diary(),), _diary, DAMAGED),
        Target("mismatches", "json", (noted,), partial(_in_file, folder / "mismatches", Mismatches),
               (DataError, HardwareError)),
        Target("privacy-ledger", "json", (told,),
               partial(_in_file, folder / "ledger", lambda path: SpentSteps(path, 8)), (DataError, ConfigError)),
        Target("records", "bytes", (database,), partial(_records, folder / "records" / "records.sqlite"), DAMAGED,
               seconds=0.05, memory=2**21, every=3),
        Target("key-file", "bytes", (key,), partial(_key, folder / "key"), (ConfigError,), memory=2**18),
        Target("invitation-file", "text", (invitation.encode(),), partial(_invited, folder / "invitation"),
               (ConfigError,), seconds=0.01),
        Target("invitation-typed", "text", (invitation.encode(),),
               lambda data: read_invitation(data.decode(errors="surrogateescape")), (ConfigError,)),
        Target("event-log-header", "json", (event_line(),), lambda data: _parsed(_HEADER, data, PATH, 1), DAMAGED),
        Target("event-log-line", "json", (event(),), lambda data: _parsed(_LINE, data, PATH, 1), DAMAGED),
        Target("prepared-so-far", "msgpack", (msgspec.msgpack.encode(_ReadSoFar("a call")),),
               partial(_prepared, folder / "prepared"), ()),
    ]  # fmt: skip
