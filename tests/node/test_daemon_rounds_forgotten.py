"""The rounds' records stay correct when the core forgets its tallies; a wrong count is logged."""

from __future__ import annotations

from pathlib import Path

from p2ptrain.core import events as ev
from p2ptrain.core.tally import AUTHORS_MAX
from tests.helpers.core import KEYS
from tests.helpers.rounds import WatchedCore


def test_what_the_core_forgets_of_a_peer_is_not_taken_from_what_was_counted(tmp_path: Path) -> None:
    watched = WatchedCore(tmp_path)
    bench, gone = watched.bench, KEYS[9]
    bench.do(ev.PeerSeen(gone))
    tallies = bench.parts.pools.tallies
    known = tallies.of(gone)
    known.offered, known.applied, known.late, known.refused = 7, 6, 3, {"bad payload": 2}
    bench.do(ev.PeerSeen(KEYS[10]))
    tallies.of(KEYS[10]).refused = {"too many at once": 1}
    watched.round()
    for number in range(AUTHORS_MAX):
        tallies.of(number.to_bytes(32, "big"))
    watched.round()
    assert tallies.by_author.get(gone) is None
    tallies.of(gone).late = 1
    watched.round()
    tallies.of(KEYS[10]).refused = {"too many at once": 1}
    watched.round()
    assert [each.late for each in watched.rounds.last()] == [3, 0, 1, 0]
    assert [each.refused for each in watched.rounds.last()] == [
        {"bad payload": 2, "too many at once": 1},
        {},
        {},
        {"too many at once": 1},
    ]
    record = watched.rounds.peers.by_key[gone]
    assert (record.offered, record.applied, record.late, record.refused) == (7, 6, 4, {"bad payload": 2})
    assert (watched.rounds.mine.applied, watched.rounds.mine.applied_of_all) == (4, 4 * 4 + 6)
