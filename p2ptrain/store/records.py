"""The records: history for people, in one sqlite file in the run's directory.

    addresses   peers' addresses for the next start, best first
    rounds      one row for each round applied here
    peers       the outcome of each peer's contributions, and its offences
    mine        this node's own totals in the run, in one row
    format      the version of this format, in one row

The agreement between nodes does not depend on it. So commits are not synced (WAL mode and synchronous = NORMAL: a power
cut loses the last rows but leaves the file intact); a damaged file is logged, moved aside as records.sqlite.damaged and
replaced; and if the disk cannot be written, only history is lost. Rows that peers can cause are bounded.

Each row is a map from names to values, encoded as msgpack with its own digest: a row with a flipped bit is skipped, not
shown as a figure. The names are defined in observe/schema.py. The version is also in sqlite's header. A newer p2ptrain
has written the file only if both places agree, and then this one must not touch it. If only one of them differs, a bit
has flipped, which must not prevent a start.

The file keeps 100,000 rounds and 256 MiB, 4,096 peers and 1,024 addresses.

One thread writes at a time; readers open the file read-only, even while others write."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from p2ptrain.digest import digest
from p2ptrain.errors import DataError
from p2ptrain.files import fix_of, forget
from p2ptrain.store.formats import refuse_version

RECORDS_NAME, DAMAGED_SUFFIX = "records.sqlite", ".damaged"
VERSION = 1  # of the format
ADDRESSES_MAX = 1_024  # a few are enough to find the others
ADDRESS_LENGTH_MAX = 512
ROUNDS_MAX = 100_000  # rows: two months of a round a minute, a day of a round a second
PEERS_MAX = 4_096  # as many reputations as the core remembers
BYTES_MAX = 2**28  # size of the file: 100,000 rounds of 50 contributors, or 7,000 rounds of 1,024
PRUNE_WRITES = 64  # writes between checks of these bounds
WAL_PAGES = 256  # sqlite checkpoints its WAL after this many pages: 1 MB
WAL_BYTES_MAX = 2**20  # the WAL is then truncated to this; it grows larger while a reader needs older pages
# The file is at fault: it is corrupt, not an sqlite file, or has different tables.
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
BUSY_SECONDS = 2.0  # how long a writer waits for another, which should not exist

_log = logging.getLogger("p2ptrain.store")
T = TypeVar("T")
Row = dict[str, Any]
_ROUND_COLUMNS, _PEER_COLUMNS = itemgetter("branch", "round", "applied_at"), itemgetter("peer", "changed_at")
_text = partial(bytes.decode, errors="replace")
ROUND, PEER, MINE = "RoundRecord", "PeerRecord", "Mine"  # the domains of the rows' digests

_SCHEMA = """
CREATE TABLE addresses (place INTEGER PRIMARY KEY, address TEXT NOT NULL UNIQUE, peer TEXT NOT NULL);
CREATE TABLE rounds (
    id INTEGER PRIMARY KEY, branch BLOB NOT NULL, round INTEGER NOT NULL, applied_at REAL NOT NULL,
    record BLOB NOT NULL, digest BLOB NOT NULL, UNIQUE (branch, round)
);
CREATE TABLE peers (peer BLOB PRIMARY KEY, changed_at REAL NOT NULL, record BLOB NOT NULL, digest BLOB NOT NULL);
CREATE TABLE mine (id INTEGER PRIMARY KEY CHECK (id = 1), record BLOB NOT NULL, digest BLOB NOT NULL);
CREATE TABLE format (id INTEGER PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL);
"""
_FORMAT = f"""
REPLACE INTO format SELECT 1, {VERSION};
PRAGMA user_version = {VERSION};
"""


class Batch(Struct, frozen=True):
    rounds: Sequence[Row] = ()
    peers: Sequence[Row] = ()
    mine: Row | None = None


class SavedRows(Struct, frozen=True):
    rounds: Sequence[Row] = ()  # the latest rounds, newest last
    peers: Sequence[Row] = ()  # least recently changed first
    mine: Row = msgspec.field(default_factory=dict)


class Records:
    """The records of one run. Methods raise DataError on failure, and may be retried."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._writes = 0
        if path.exists():  # refuses a newer format at once; a missing file is created at the first write
            with suppress(_RecordsError):  # the next access raises it again
                self._do("opened", lambda connection: None)

    def close(self) -> None:
        with self._lock:
            self._close()

    def write(self, batch: Batch) -> None:
        """Writes all rows or none. Existing rounds stay as they are, because a restart applies some rounds again."""

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT OR IGNORE INTO rounds (branch, round, applied_at, record, digest) VALUES (?, ?, ?, ?, ?)",
                [(*_ROUND_COLUMNS(each), *_packed(ROUND, each)) for each in batch.rounds],
            )
            connection.executemany(
                "INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?)",
                [(*_PEER_COLUMNS(each), *_packed(PEER, each)) for each in batch.peers],
            )
            if batch.mine is not None:
                connection.execute("INSERT OR REPLACE INTO mine VALUES (1, ?, ?)", _packed(MINE, batch.mine))
            if self._writes % PRUNE_WRITES == 0:
                _prune(connection)

        self._do("written", work)
        self._writes += 1

    def past(self, count: int) -> SavedRows:
        """Returns the latest rounds, all peers, and `mine`; empty if unreadable, so that the node can start anyway."""

        def work(connection: sqlite3.Connection) -> SavedRows:
            rounds = _rounds_in(connection, count, self.path)
            rows = connection.execute("SELECT record, digest FROM peers ORDER BY changed_at")
            peers = [*_unpacked(rows, PEER, self.path)]
            mine = [*_unpacked(connection.execute("SELECT record, digest FROM mine"), MINE, self.path)]
            return SavedRows(rounds, peers, mine[0] if mine else {})

        return self._read(work, SavedRows())

    def addresses(self) -> list[str]:
        return self._read(_addresses_in, [])

    def remember(self, addresses: Sequence[str]) -> None:
        kept = [each for each in dict.fromkeys(addresses) if len(each) <= ADDRESS_LENGTH_MAX][:ADDRESSES_MAX]

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM addresses")
            connection.executemany(
                "INSERT INTO addresses (place, address, peer) VALUES (?, ?, ?)",
                [(place, address, address.rpartition("/p2p/")[2]) for place, address in enumerate(kept)],
            )

        self._do("written", work)

    # -- The file -----------------------------------------------------------------------------------

    def _read(self, work: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        if not self.path.exists():
            return nothing
        try:
            return self._do("read", work)
        except DataError as error:
            _log.warning("cannot read the records: %s", error)
            return nothing

    def _do(self, done: str, work: Callable[[sqlite3.Connection], T]) -> T:
        """Runs `work` in one transaction. If the file is damaged, moves it aside and runs it on a new one."""
        with self._lock:
            try:
                try:
                    return self._attempt(work)
                except sqlite3.Error as error:
                    if _code_of(error) not in DAMAGE:
                        raise
                    self._move_aside(error)
                return self._attempt(work)
            except sqlite3.Error as error:
                raise _RecordsError(self.path, done, error) from error

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
            with suppress(sqlite3.Error):  # committed rows are not affected
                self._connection.close()
            self._connection = None

    def _move_aside(self, error: sqlite3.Error) -> None:
        """Renames the damaged file for inspection; only the latest such file is kept."""
        aside = self.path.with_name(self.path.name + DAMAGED_SUFFIX)
        _log.warning("the records are damaged; starting a new file: path %s, kept %s, why %s", self.path, aside, error)
        try:
            for suffix in ("", "-wal", "-shm"):
                path = Path(f"{self.path}{suffix}")
                if path.exists():
                    path.replace(f"{aside}{suffix}")
                else:
                    forget(Path(f"{aside}{suffix}"))
        except OSError as trouble:
            raise _RecordsError(self.path, "moved aside, although it is damaged", trouble) from trouble


class _RecordsError(DataError):
    """An error from sqlite or the disk, with its fix."""

    def __init__(self, path: Path, done: str, error: sqlite3.Error | OSError) -> None:
        code = error.errno if isinstance(error, OSError) else _ERRNO.get(_code_of(error))
        why = error.strerror if isinstance(error, OSError) else error
        super().__init__(f"cannot be {done} ({why})", path=path, fix=fix_of(code))


_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_IOERR: errno.EIO,
}


def read_rounds(directory: Path, count: int) -> list[Row]:
    """Returns the last rounds of the run in this directory, newest last, even while its daemon writes."""
    path = directory / RECORDS_NAME
    return _look(path, lambda connection: _rounds_in(connection, count, path))


def remembered_peers(directory: Path) -> list[str]:
    """Returns the remembered addresses of this directory's run, best first; empty if they cannot be read."""
    try:
        return _look(directory / RECORDS_NAME, _addresses_in)
    except DataError as error:
        _log.warning("cannot read remembered addresses: %s", error)
        return []


def _look(path: Path, work: Callable[[sqlite3.Connection], list[T]]) -> list[T]:
    """Reads from the file of a node that may be writing it; empty if there is none."""
    if not path.exists():
        return []
    try:
        place = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(place, timeout=BUSY_SECONDS, uri=True)) as connection:
            connection.text_factory = _text
            _versions_of(connection, path)
            return work(connection)
    except sqlite3.Error as error:
        raise _RecordsError(path, "read", error) from error


def _opened(path: Path) -> sqlite3.Connection:
    """Opens the file for writing, and creates it or its tables if needed."""
    if not path.exists():
        with suppress(OSError):  # sqlite gives the better error
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
            _log.info("corrected the records' version: path %s, found %s", path, versions)
            connection.executescript(f"BEGIN; {_FORMAT} COMMIT;")
    except (sqlite3.Error, DataError):
        connection.close()
        raise
    return connection


def _versions_of(connection: sqlite3.Connection, path: Path) -> tuple[int, int]:
    """Returns the versions in the header and the table, or 0 where missing. Raises DataError if both are newer."""
    header: int = connection.execute("PRAGMA user_version").fetchone()[0]
    try:
        has_table = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'format'").fetchone()
    except UnicodeDecodeError as error:  # raised when sqlite's message quotes damaged names from the file
        raise sqlite3.DatabaseError("its tables have damaged names") from error
    row = connection.execute("SELECT version FROM format").fetchone() if has_table else None
    table = row[0] if row and isinstance(row[0], int) else 0
    refuse_version(path, min(header, table), VERSION)
    return header, table


def _code_of(error: sqlite3.Error) -> int:
    """Returns sqlite's primary error code, without the extension."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


def _addresses_in(connection: sqlite3.Connection) -> list[str]:
    return [address for (address,) in connection.execute("SELECT address FROM addresses ORDER BY place")]


def _rounds_in(connection: sqlite3.Connection, count: int, path: Path) -> list[Row]:
    rows = connection.execute("SELECT record, digest FROM rounds ORDER BY id DESC LIMIT ?", (count,))
    return [*_unpacked(rows, ROUND, path)][::-1]


def _packed(kind: str, row: Row) -> tuple[bytes, bytes]:
    encoded = msgspec.msgpack.encode(row)
    return encoded, _digest_of(kind, encoded)


def _digest_of(kind: str, encoded: bytes) -> bytes:
    return digest(f"record {kind}", encoded)[:16]


def _unpacked(rows: Iterable[tuple[bytes, bytes]], kind: str, path: Path) -> Iterator[Row]:
    decoder, lost = msgspec.msgpack.Decoder(Row), 0
    for encoded, name in rows:
        if isinstance(encoded, bytes) and _digest_of(kind, encoded) == name:
            yield decoder.decode(encoded)
        else:
            lost += 1
    if lost:
        _log.warning("skipping damaged rows: path %s, kind %s, rows %s", path, kind, lost)


def _prune(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM rounds WHERE id <= (SELECT max(id) FROM rounds) - ?", (ROUNDS_MAX,))
    connection.execute(
        "DELETE FROM peers WHERE peer NOT IN (SELECT peer FROM peers ORDER BY changed_at DESC LIMIT ?)", (PEERS_MAX,)
    )
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    if (pages - free) * size > BYTES_MAX:  # removes a quarter at once, so that this is rare; sqlite reuses the space
        connection.execute("DELETE FROM rounds WHERE id <= (SELECT min(id) + (max(id) - min(id) + 3) / 4 FROM rounds)")
