"""Records: what people want to know about the past, in one sqlite file beside the run's other files.

    addresses   where peers were reached, for the next start, and when that was
    rounds      one row for each round that was applied here
    peers       what became of each peer's contributions, and what it did wrong
    points      the points against a peer, whenever they have grown
    mine        what this node has done in the run, in one row
    format      the version of all this, in one row

It is history for people, and nothing that is agreed rests on it. So a commit is not waited for until it is on the
disk (WAL mode and synchronous = NORMAL: a power cut costs the last rows, and leaves the file whole); a damaged file is
named, moved aside as records.sqlite.damaged, and begun anew; and a disk that takes nothing costs history and nothing
else. Rows that peers can have made are bounded in number and in bytes. Each row is a map from names to values, encoded
as msgpack under a digest of its own, so that a bit that has flipped is not shown as a figure: such a row counts as not
written. What the names mean is the schema's business (observe/schema.py); here it is kept. The version stands
in sqlite's header, too: only both together say that a newer p2ptrain has written here, and that this one must not. One
alone is a bit that has flipped, and no reason not to start.

One thread writes at a time; whoever only reads opens the file for that, while others write.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from msgspec import Meta, Struct

from p2ptrain.digest import digest
from p2ptrain.errors import DataError
from p2ptrain.files import fix_of, forget, read

RECORDS_NAME, DAMAGED_SUFFIX = "records.sqlite", ".damaged"
OLD_PEERS_NAME = "peers.json"  # in which the addresses stood before
VERSION = 1  # of the format
ADDRESSES_MAX = 1_024  # a few are enough to find the others
ADDRESS_LENGTH_MAX = 512
ROUNDS_MAX = 100_000  # rows: two months of a round a minute, a day of a round a second
PEERS_MAX = 4_096  # as many as the core remembers the reputation of
POINTS_MAX = 20_000  # rows; those of the longest ago go first
BYTES_MAX = 2**28  # of the file: 100,000 rounds of 50 contributors; where there are 1,024, of 7,000 rounds
PRUNE_WRITES = 64  # writes between looks at these bounds
WAL_PAGES = 256  # after which sqlite takes its log into the file: 1 MB, and about as much at once
WAL_BYTES_MAX = 2**20  # to which the log is cut then; it grows beyond while somebody reads what is before it
BUSY_SECONDS = 2.0  # that a writer waits for another, which there should not be

_Addresses = Annotated[list[Annotated[str, Meta(max_length=ADDRESS_LENGTH_MAX)]], Meta(max_length=ADDRESSES_MAX)]
_log = structlog.get_logger("p2ptrain.store")
T = TypeVar("T")
Row = dict[str, Any]
ROUND, PEER, POINTS, MINE = "RoundRecord", "PeerRecord", "Points", "Mine"  # what the digest of a row begins with

_SCHEMA = """
CREATE TABLE addresses (place INTEGER PRIMARY KEY, address TEXT NOT NULL UNIQUE, peer TEXT NOT NULL, reached_at REAL);
CREATE TABLE rounds (
    id INTEGER PRIMARY KEY, branch BLOB NOT NULL, round INTEGER NOT NULL, applied_at REAL NOT NULL,
    record BLOB NOT NULL, digest BLOB NOT NULL, UNIQUE (branch, round)
);
CREATE TABLE peers (peer BLOB PRIMARY KEY, changed_at REAL NOT NULL, record BLOB NOT NULL, digest BLOB NOT NULL);
CREATE TABLE points (id INTEGER PRIMARY KEY, peer BLOB NOT NULL, record BLOB NOT NULL, digest BLOB NOT NULL);
CREATE TABLE mine (id INTEGER PRIMARY KEY CHECK (id = 1), record BLOB NOT NULL, digest BLOB NOT NULL);
"""
_FORMAT = f"""
CREATE TABLE IF NOT EXISTS format (id INTEGER PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL);
REPLACE INTO format SELECT 1, {VERSION};
PRAGMA user_version = {VERSION};
"""


class Batch(Struct, frozen=True):
    """Rows to be written in one go."""

    rounds: Sequence[Row] = ()
    peers: Sequence[Row] = ()
    points: Sequence[Row] = ()
    mine: Row | None = None


class Past(Struct, frozen=True):
    """The rows that a start begins with."""

    rounds: Sequence[Row] = ()  # the last of them, the newest last
    peers: Sequence[Row] = ()  # the longest unchanged first
    mine: Row = msgspec.field(default_factory=dict)


class Records:
    """Of one run. What fails raises DataError, and may be tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._writes = 0
        if path.exists():  # a newer one is refused at once; else it is made when there is something to write
            with suppress(_TroubleError):  # which comes up again
                self._do("opened", lambda connection: None)
        self._take_over_addresses()

    def close(self) -> None:
        with self._lock:
            self._close()

    # -----------------------------------------------------------------------------------------------
    # Rounds, peers, and mine

    def write(self, batch: Batch) -> None:
        """All of it or nothing. A round that is there already stays as it is: a restart applies some again."""

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT OR IGNORE INTO rounds (branch, round, applied_at, record, digest) VALUES (?, ?, ?, ?, ?)",
                [(*_of(each, "branch", "round", "applied_at"), *_packed(ROUND, each)) for each in batch.rounds],
            )
            connection.executemany(
                "INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?)",
                [(*_of(each, "peer", "changed_at"), *_packed(PEER, each)) for each in batch.peers],
            )
            connection.executemany(
                "INSERT INTO points (peer, record, digest) VALUES (?, ?, ?)",
                [(each["peer"], *_packed(POINTS, each)) for each in batch.points],
            )
            if batch.mine is not None:
                connection.execute("INSERT OR REPLACE INTO mine VALUES (1, ?, ?)", _packed(MINE, batch.mine))
            if self._writes % PRUNE_WRITES == 0:
                _prune(connection)

        self._do("written", work)
        self._writes += 1

    def past(self, count: int) -> Past:
        """The last rounds, all peers, and mine; nothing if they cannot be read: it is no reason not to start."""

        def work(connection: sqlite3.Connection) -> Past:
            rounds = _rounds_in(connection, count, self.path)
            rows = connection.execute("SELECT record, digest FROM peers ORDER BY changed_at")
            peers = [*_unpacked(rows, PEER, self.path)]
            mine = [*_unpacked(connection.execute("SELECT record, digest FROM mine"), MINE, self.path)]
            return Past(rounds, peers, mine[0] if mine else {})

        return self._read(work, Past())

    def points_of(self, peer: bytes) -> list[Row]:
        """How the points against a peer grew, the oldest first."""
        query = "SELECT record, digest FROM points WHERE peer = ? ORDER BY id"
        return self._read(lambda each: [*_unpacked(each.execute(query, (peer,)), POINTS, self.path)], [])

    # -----------------------------------------------------------------------------------------------
    # Addresses

    def addresses(self) -> list[str]:
        """The best first."""
        return self._read(_addresses_in, [])

    def reached(self) -> dict[str, float | None]:
        """When each address was reached last, in seconds since 1970; None: never, as far as is known."""
        query = "SELECT address, reached_at FROM addresses ORDER BY place"
        return self._read(lambda each: dict(each.execute(query)), {})

    def remember(self, addresses: Sequence[str], linked: Collection[str] = (), now: float | None = None) -> None:
        """In place of those of before; peers of these ids are connected now."""
        kept = [each for each in dict.fromkeys(addresses) if len(each) <= ADDRESS_LENGTH_MAX][:ADDRESSES_MAX]

        def work(connection: sqlite3.Connection) -> None:
            before = dict(connection.execute("SELECT address, reached_at FROM addresses"))
            connection.execute("DELETE FROM addresses")
            rows = []
            for place, address in enumerate(kept):
                peer = address.rpartition("/p2p/")[2]
                rows.append((place, address, peer, now if peer in linked else before.get(address)))
            connection.executemany("INSERT INTO addresses VALUES (?, ?, ?, ?)", rows)

        self._do("written", work)

    def _take_over_addresses(self) -> None:
        """From the file in which they stood before."""
        old = self.path.with_name(OLD_PEERS_NAME)
        if not old.exists():
            return
        try:
            self.remember([*self.addresses(), *_old_addresses(old)])
        except DataError as error:
            _log.warning("remembered addresses stay where they are", path=str(old), why=str(error))
        else:
            forget(old)

    # -----------------------------------------------------------------------------------------------
    # The file

    def _read(self, work: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        if not self.path.exists():
            return nothing
        try:
            return self._do("read", work)
        except DataError as error:
            _log.warning("the past is not known", why=str(error))
            return nothing

    def _do(self, done: str, work: Callable[[sqlite3.Connection], T]) -> T:
        """In one transaction. A file that turns out to be damaged is moved aside, and it is done with a new one."""
        with self._lock:
            try:
                return self._attempt(work)
            except sqlite3.Error as error:
                if not _is_damage(error):
                    raise _TroubleError(self.path, done, error) from error
                self._move_aside(error)
            try:
                return self._attempt(work)
            except sqlite3.Error as error:
                raise _TroubleError(self.path, done, error) from error

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = _opened(self.path)
            with self._connection:
                self._connection.execute("BEGIN")
                return work(self._connection)
        except sqlite3.Error:
            self._close()
            raise

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):  # what was committed stays where it is
                self._connection.close()
            self._connection = None

    def _move_aside(self, error: sqlite3.Error) -> None:
        """For whoever wants to look into it; one is kept."""
        aside = self.path.with_name(self.path.name + DAMAGED_SUFFIX)
        _log.warning("the records are damaged, and begun anew", path=str(self.path), kept=str(aside), why=str(error))
        try:
            for suffix in ("", "-wal", "-shm"):
                path = Path(f"{self.path}{suffix}")
                if path.exists():
                    path.replace(f"{aside}{suffix}")
                else:
                    forget(Path(f"{aside}{suffix}"))
        except OSError as trouble:
            raise _TroubleError(self.path, "moved aside, and is damaged", trouble) from trouble


class _TroubleError(DataError):
    """What sqlite refuses, with what to do about it."""

    def __init__(self, path: Path, done: str, error: sqlite3.Error | OSError) -> None:
        code = error.errno if isinstance(error, OSError) else _ERRNO.get(_code_of(error))
        why = error.strerror if isinstance(error, OSError) else error
        super().__init__(f"{path}: cannot be {done} ({why}). {fix_of(code)}")


_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_IOERR: errno.EIO,
}


def read_rounds(directory: Path, count: int) -> list[Row]:
    """The last rounds of the run in this directory, the newest last; also while its daemon writes."""
    path = directory / RECORDS_NAME
    if not path.exists():
        return []
    try:
        with closing(_opened_to_read(path)) as connection:
            return _rounds_in(connection, count, path)
    except sqlite3.Error as error:
        raise _TroubleError(path, "read", error) from error


def remembered_peers(directory: Path) -> list[str]:
    """Addresses that worked in the run of this directory, the best first; losing them is no reason not to start."""
    path, old = directory / RECORDS_NAME, directory / OLD_PEERS_NAME
    found = _old_addresses(old) if old.exists() else []
    if path.exists():
        try:
            with closing(_opened_to_read(path)) as connection:
                found = [*_addresses_in(connection), *found]
        except (sqlite3.Error, DataError) as error:
            _log.warning("remembered addresses are lost", path=str(path), why=str(error))
    return list(dict.fromkeys(found))[:ADDRESSES_MAX]


def _opened(path: Path) -> sqlite3.Connection:
    """As this version has it."""
    if not path.exists():
        with suppress(OSError):  # which sqlite then says better
            path.touch(0o600)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.text_factory = _text
        versions = _versions_of(connection, path)
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_MAX}")
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            connection.executescript(f"BEGIN; {_SCHEMA} {_FORMAT} COMMIT;")
        elif versions != (VERSION, VERSION):
            _log.info("the version of the records is put right", path=str(path), found=versions)
            connection.executescript(f"BEGIN; {_FORMAT} COMMIT;")
    except (sqlite3.Error, DataError):
        connection.close()
        raise
    return connection


def _opened_to_read(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=BUSY_SECONDS, uri=True)
    try:
        connection.text_factory = _text
        _versions_of(connection, path)
    except (sqlite3.Error, DataError):
        connection.close()
        raise
    return connection


def _versions_of(connection: sqlite3.Connection, path: Path) -> tuple[int, int]:
    """In the header, and in the table; 0: in none. Newer is what both say is newer."""
    header: int = connection.execute("PRAGMA user_version").fetchone()[0]
    has_table = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'format'").fetchone()
    row = connection.execute("SELECT version FROM format").fetchone() if has_table else None
    table = row[0] if row and isinstance(row[0], int) else 0
    if min(header, table) > VERSION:
        raise DataError(f"{path}: has format {table}, and this p2ptrain reads up to {VERSION}. Update p2ptrain")
    return header, table


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _code_of(error: sqlite3.Error) -> int:
    """Without what extends it."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is at fault: no sqlite file, one that is torn, or one with other tables than we make."""
    return _code_of(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def _addresses_in(connection: sqlite3.Connection) -> list[str]:
    return [address for (address,) in connection.execute("SELECT address FROM addresses ORDER BY place")]


def _old_addresses(path: Path) -> list[str]:
    try:
        content = read(path)
        return [] if content is None else msgspec.json.decode(content, type=_Addresses)
    except (DataError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        _log.warning("remembered addresses are lost", path=str(path), why=str(error))
        return []


def _rounds_in(connection: sqlite3.Connection, count: int, path: Path) -> list[Row]:
    rows = connection.execute("SELECT record, digest FROM rounds ORDER BY id DESC LIMIT ?", (count,))
    return [*_unpacked(rows, ROUND, path)][::-1]


def _of(row: Row, *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _packed(kind: str, row: Row) -> tuple[bytes, bytes]:
    encoded = msgspec.msgpack.encode(row)
    return encoded, _digest_of(kind, encoded)


def _digest_of(kind: str, encoded: bytes) -> bytes:
    return digest(f"record {kind}", encoded)[:16]


def _unpacked(rows: Iterable[tuple[bytes, bytes]], kind: str, path: Path) -> Iterator[Row]:
    """Those that are what was written."""
    decoder, lost = msgspec.msgpack.Decoder(Row), 0
    for encoded, name in rows:
        if isinstance(encoded, bytes) and _digest_of(kind, encoded) == name:
            yield decoder.decode(encoded)
        else:
            lost += 1
    if lost:
        _log.warning("damaged rows are passed over", path=str(path), kind=kind, rows=lost)


def _prune(connection: sqlite3.Connection) -> None:
    """Let go of what is longest ago."""
    connection.execute("DELETE FROM rounds WHERE id <= (SELECT max(id) FROM rounds) - ?", (ROUNDS_MAX,))
    connection.execute("DELETE FROM points WHERE id <= (SELECT max(id) FROM points) - ?", (POINTS_MAX,))
    connection.execute(
        "DELETE FROM peers WHERE peer NOT IN (SELECT peer FROM peers ORDER BY changed_at DESC LIMIT ?)", (PEERS_MAX,)
    )
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    if (pages - free) * size > BYTES_MAX:  # a quarter at once: the room is used again, and this not done every time
        connection.execute("DELETE FROM rounds WHERE id <= (SELECT min(id) + (max(id) - min(id) + 3) / 4 FROM rounds)")
