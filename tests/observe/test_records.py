"""Records survive a restart, stay within bounds, and if damaged, cost only history."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from p2ptrain.digest import digest
from p2ptrain.errors import DataError
from p2ptrain.observe.schema import Mine, PeerRecord, RoundRecord
from p2ptrain.store import records as module
from p2ptrain.store.records import (
    ADDRESS_LENGTH_MAX,
    ADDRESSES_MAX,
    WAL_BYTES_MAX,
    Batch,
    Records,
    SavedRows,
    read_rounds,
    remembered_peers,
)
from tests.helpers.records import KEYS, row
from tests.helpers.store import opened

HEADER_BYTES = 100  # of every sqlite file


MINE = {"applied": 2, "applied_of_all": 6, "tokens": 128, "training_seconds": 3.5, "energy_joules": None}


def a_peer(key: bytes, **changes: Any) -> dict[str, Any]:
    usual = {"changed_at": 0.0, "offered": 0, "applied": 0, "late": 0, "refused": {}, "observed": {}, "points": 0.0}
    return {"peer": key, **usual, **changes}


def address(number: int) -> str:
    return f"/ip4/203.0.113.7/tcp/{number}/p2p/peer{number}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.sqlite"


@pytest.fixture
def records(path: Path) -> Iterator[Records]:
    with closing(Records(path)) as made:
        yield made


def again(path: Path, count: int = 1_000) -> SavedRows:
    """Opens the records as the next start does."""
    with closing(Records(path)) as made:
        return made.past(count)


# ---------------------------------------------------------------------------------------------------
# What is written


def test_what_is_written_is_there_at_the_next_start(path: Path, records: Records) -> None:
    peers = [a_peer(KEYS[1]), a_peer(KEYS[0], changed_at=1e9, refused={"bad payload": 1}, points=0.1)]
    records.write(Batch([row(1), row(2)], peers[::-1], MINE))
    records.close()
    assert again(path) == SavedRows([row(1), row(2)], peers, MINE)
    assert again(path, 1).rounds == [row(2)]


def test_a_round_that_is_applied_again_keeps_its_record_and_other_branches_have_their_own(
    path: Path, records: Records
) -> None:
    other = row(1, branch=b"o" * 32)
    records.write(Batch([row(1)]))
    records.write(Batch([row(1, loss=9.0), other, row(2)]))
    assert records.past(9).rounds == [row(1), other, row(2)]


def test_a_peer_and_what_is_mine_have_one_row_which_is_replaced(records: Records) -> None:
    for count in (1, 2):
        records.write(Batch(peers=[a_peer(KEYS[0], offered=count)], mine={"applied": count}))
    assert records.past(0) == SavedRows([], [a_peer(KEYS[0], offered=2)], {"applied": 2})


def test_what_was_never_written_makes_no_file(path: Path, records: Records) -> None:
    assert (records.past(9), records.addresses()) == (SavedRows(), [])
    assert (read_rounds(path.parent, 9), remembered_peers(path.parent)) == ([], [])
    assert [*path.parent.iterdir()] == []


def test_others_read_while_the_daemon_writes(path: Path, records: Records) -> None:
    records.write(Batch([row(1), row(2), row(3)]))
    records.remember([address(1)])
    assert read_rounds(path.parent, 2) == [row(2), row(3)]
    assert remembered_peers(path.parent) == [address(1)]
    records.write(Batch([row(4)]))
    assert read_rounds(path.parent, 2) == [row(3), row(4)]


def test_a_file_that_nobody_has_open_can_be_read_after_a_kill_too(path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from p2ptrain.store.records import *\n"
        "Records(Path(sys.argv[1])).write(Batch(mine={'applied': 7}))\n"
        "Records(Path(sys.argv[1])).remember(['/ip4/1.2.3.4/tcp/1/p2p/x'])\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert path.with_name("records.sqlite-wal").stat().st_size > 0, "it was not closed"
    assert remembered_peers(path.parent) == ["/ip4/1.2.3.4/tcp/1/p2p/x"]
    assert again(path).mine == {"applied": 7}


# The bytes of a row: directories must go on being read.
PACKED_MINE = bytes.fromhex(
    "85a76170706c69656402ae6170706c6965645f6f665f616c6c06a6746f6b656e73cc80b0747261696e696e675f7365636f6e6473"
    "cb400c000000000000ad656e657267795f6a6f756c6573c0"
)


def test_a_row_has_the_bytes_of_its_format(path: Path, records: Records) -> None:
    records.write(Batch([row(1)], mine=MINE))
    with closing(sqlite3.connect(path)) as connection:
        (mine, name), (lived, digest_of_it) = (
            connection.execute(f"SELECT record, digest FROM {table}").fetchone() for table in ("mine", "rounds")
        )
    assert (mine, name) == (PACKED_MINE, digest("record Mine", PACKED_MINE)[:16])
    assert digest_of_it == digest("record RoundRecord", lived)[:16]


# ---------------------------------------------------------------------------------------------------
# Addresses


def test_addresses_are_remembered_up_to_a_bound_and_in_their_order(path: Path, records: Records) -> None:
    assert records.addresses() == []
    many = [address(port) for port in range(ADDRESSES_MAX + 10, 0, -1)]
    records.remember(["x" * (ADDRESS_LENGTH_MAX + 1), many[0], *many])
    assert records.addresses() == remembered_peers(path.parent) == many[:ADDRESSES_MAX]
    records.remember(many[5:7])
    assert records.addresses() == many[5:7]


# ---------------------------------------------------------------------------------------------------
# Bounds


def test_the_oldest_rows_go_when_there_are_too_many(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("ROUNDS_MAX", 10), ("PEERS_MAX", 3), ("PRUNE_WRITES", 1)):
        monkeypatch.setattr(module, name, most)
    with closing(Records(path)) as records:
        for number in range(40):
            peer = a_peer(number.to_bytes(32, "big"), changed_at=float(number))
            records.write(Batch([row(number)], [peer]))
        past = records.past(1_000)
        assert [each["round"] for each in past.rounds] == [*range(30, 40)]
        assert sorted(each["changed_at"] for each in past.peers) == [37.0, 38.0, 39.0]


def test_rounds_of_many_contributors_do_not_let_the_file_grow_without_bound(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BYTES_MAX", 2**20)
    monkeypatch.setattr(module, "PRUNE_WRITES", 1)
    rng = Random(0)
    many = [rng.randbytes(32) for _ in range(1_024)]
    with closing(Records(path)) as records:
        for number in range(100):
            records.write(Batch([row(number, contributors=many)]))
        kept = [each["round"] for each in records.past(1_000).rounds]
    assert kept == [*range(kept[0], 100)]
    assert 10 < len(kept) < 40
    assert path.stat().st_size < 2**20 + 2**17


def test_the_log_beside_the_file_does_not_grow_with_the_rounds(path: Path, records: Records) -> None:
    wal, most = path.with_name("records.sqlite-wal"), 0
    for number in range(3_000):
        records.write(Batch([row(number)], mine=MINE))
        most = max(most, wal.stat().st_size)
    assert most < 2 * WAL_BYTES_MAX


def test_the_log_is_cut_again_after_somebody_has_read_for_long(path: Path, records: Records) -> None:
    wal = path.with_name("records.sqlite-wal")
    records.write(Batch([row(0)]))
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM rounds").fetchone()  # sees the file as it is now
        for number in range(1, 1_000):
            records.write(Batch([row(number)], mine=MINE))
        assert wal.stat().st_size > 2 * WAL_BYTES_MAX, "what it reads may not be overwritten"
    for number in range(1_000, 1_300):
        records.write(Batch([row(number)], mine=MINE))
    assert wal.stat().st_size <= WAL_BYTES_MAX


# ---------------------------------------------------------------------------------------------------
# What may be wrong with the file


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.records.write(Batch([row(1)]))
    path = tmp_path / "run" / "records.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA user_version = 2; UPDATE format SET version = 2;")
    before = path.read_bytes()
    for _ in range(2):  # whoever is refused is not locked either
        with pytest.raises(DataError, match=r"records\.sqlite: has format 2, and .* up to 1\. Update p2ptrain"):
            opened(tmp_path)
    with pytest.raises(DataError, match="has format 2"):
        read_rounds(path.parent, 1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"x" * 5_000, b"SQLite format 3\0" + b"\xff" * 5_000])
def test_what_is_no_file_of_ours_is_moved_aside_and_begun_anew(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)
    with closing(Records(path)) as records:
        records.write(Batch([row(1)]))
    assert again(path).rounds == [row(1)]
    if content:
        assert path.with_name("records.sqlite.damaged").read_bytes() == content
        [line] = caplog.messages
        assert line.startswith(f"the records are damaged; starting a new file: path {path}, ")


def test_a_file_with_other_tables_is_moved_aside(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE rounds (id); PRAGMA user_version = 1;")
    with closing(Records(path)) as records:
        records.write(Batch([row(1)]))
        assert records.past(9).rounds == [row(1)]
    assert path.with_name("records.sqlite.damaged").exists()


def test_a_file_that_is_damaged_under_way_is_begun_anew_with_what_is_written(path: Path, records: Records) -> None:
    records.write(Batch([row(number) for number in range(500)]))
    records.close()  # and opened again by the next write
    with path.open("r+b") as file:
        file.seek(8_192)
        file.write(b"\xff" * 40_960)
    records.write(Batch([row(1_000)]))
    assert records.past(9).rounds == [row(1_000)]


def test_whatever_bit_flips_no_wrong_figure_is_shown(path: Path, records: Records) -> None:
    rounds = [row(number) for number in range(40)]
    peers = [a_peer(key, offered=7) for key in KEYS]
    records.write(Batch(rounds, peers, MINE))
    records.close()
    good, rng = path.read_bytes(), Random(0)
    ends: set[str] = set()
    for _ in range(300):
        bad = bytearray(good)
        at = rng.randrange(len(bad))
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(bad) if rng.random() < 0.8 else good[:at])
        past = again(path)
        assert all(each in rounds for each in past.rounds)
        assert all(each in peers for each in past.peers)
        assert past.mine in (MINE, {})
        ends.add("whole" if len(past.rounds) == 40 else "in part" if past.rounds else "anew")
        for each in path.parent.iterdir():
            each.unlink()
    assert ends >= {"whole", "in part", "anew"}


def test_no_bit_of_sqlites_header_keeps_a_node_from_starting(path: Path, records: Records) -> None:
    records.write(Batch([row(1)]))
    records.close()
    good, kept = path.read_bytes(), 0
    version = range(8 * 60, 8 * 64)
    bits = sorted({*version, *range(0, 8 * HEADER_BYTES, 7)})
    for bit in bits:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        kept += again(path).rounds == [row(1)]
        for each in path.parent.iterdir():
            each.unlink()
    assert kept > len(bits) / 2, "most of them mean little"


@pytest.mark.parametrize("version", [-(2**31), 0, 2, 2**30])
@pytest.mark.parametrize("place", ["PRAGMA user_version = {}", "UPDATE format SET version = {}"])
def test_one_version_alone_that_is_another_is_put_right(path: Path, records: Records, place: str, version: int) -> None:
    records.write(Batch([row(1)]))
    records.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(place.format(version))
    assert read_rounds(path.parent, 9) == again(path).rounds == [row(1)]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version FROM format").fetchone() == (1,)
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)


def test_a_row_that_was_changed_counts_as_not_written(
    path: Path, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    records.write(Batch([row(1), row(2)]))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE rounds SET record = (SELECT record FROM rounds WHERE id = 1) || x'00' WHERE id = 1")
    assert records.past(9).rounds == [row(2)]
    assert caplog.messages == [f"skipping damaged rows: path {path}, kind RoundRecord, rows 1"]


# ---------------------------------------------------------------------------------------------------
# What may be wrong with the disk


class RefusingConnection:
    """A database connection on a disk that refuses writes."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __enter__(self) -> None:
        error = sqlite3.OperationalError("it says so")
        error.sqlite_errorcode = self.code
        raise error

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (sqlite3.SQLITE_FULL, "Free some space there"),
        (sqlite3.SQLITE_READONLY, "Let this user write there"),
        (sqlite3.SQLITE_IOERR | 3 << 8, "Check the disk"),
        (sqlite3.SQLITE_BUSY, "No saved data is lost"),
    ],
)
def test_a_disk_that_refuses_is_named_and_tried_again_the_next_time(
    path: Path,
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    words: str,
) -> None:
    records.write(Batch([row(1)]))
    records.close()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_opened", lambda path: RefusingConnection(code))
        with pytest.raises(DataError, match=rf"records\.sqlite: cannot be written \(it says so\)\. {words}"):
            records.write(Batch([row(2)]))
        caplog.clear()
        assert records.past(9) == SavedRows(), "and what cannot be read is no reason to stop"
        [line] = caplog.messages
        assert line.startswith("cannot read the records: ")
    records.write(Batch([row(3)]))
    assert records.past(9).rounds == [row(1), row(3)]
    assert not path.with_name("records.sqlite.damaged").exists()


def test_a_full_disk_takes_all_of_a_batch_or_nothing(path: Path, records: Records) -> None:
    records.write(Batch([row(1)]))
    connection = records._connection
    assert connection is not None
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(DataError, match=r"database or disk is full\)\. Free some space there"):
        records.write(Batch([row(number, mine_taken=[*range(900)]) for number in range(2, 9)], mine=MINE))
    assert records.past(9) == SavedRows([row(1)], [], {})


def test_a_store_starts_where_its_records_cannot_be_opened(tmp_path: Path) -> None:
    opened(tmp_path).close()
    path = tmp_path / "run" / "records.sqlite"
    path.mkdir()
    with opened(tmp_path) as store:
        assert store.records.past(9) == SavedRows()
        with pytest.raises(DataError, match=r"records\.sqlite: cannot be written"):
            store.records.write(Batch([row(1)]))


def test_a_row_that_does_not_fit_is_left_out_and_the_others_are_there(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"peer": KEYS[0], "offered": -1}, {"peer": KEYS[1], "offered": 2}, {"points": float("nan")}]
    with caplog.at_level("WARNING"):
        assert [(each.peer, each.offered) for each in PeerRecord.of_rows(rows)] == [(KEYS[1], 2)]
        assert [*Mine.of_rows([{"applied": -1}])] == [*RoundRecord.of_rows([{}])] == []
    assert caplog.text.count("skipping a row of the records") == 4
