"""What a person is told of: seats, branches and complaints, each once."""

from __future__ import annotations

from logging import INFO, WARNING

import msgspec

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.identity import peer_id_of
from p2ptrain.observe.news import DROPS_SECONDS, LOOKS, NAMES_MAX, Drops, News
from tests.helpers.core import KEYS, ROOT0, RUN

DISK, BEHIND = complaint(Code.DEGRADED, why="the disk is full"), complaint(Code.CATCHING_UP)


def state(members: int = 3, branch: bytes = RUN) -> AgreedState:
    return msgspec.structs.replace(genesis(branch, KEYS[:members], ROOT0), round=8)


def test_nothing_new_is_nothing_said() -> None:
    news = News()
    assert [news.look(state(), []) for _ in range(9)] == [[]] * 9


def test_who_comes_and_who_goes_is_named() -> None:
    news = News()
    news.look(state(1), [])
    ids = [peer_id_of(key) for key in KEYS]
    assert news.look(state(3), []) == [(INFO, f"{', '.join(sorted(ids[1:3]))} got a seat: 3 members")]
    assert news.look(state(1), []) == [(INFO, f"{', '.join(sorted(ids[1:3]))} lost a seat or left: 1 member")]
    [(_, text)] = news.look(state(NAMES_MAX + 3), [])
    assert text.endswith(f" and 2 more got a seat: {NAMES_MAX + 3} members")


def test_another_branch_is_told_as_trouble() -> None:
    news = News()
    news.look(state(3), [])
    lines = news.look(state(2, b"b" * 32), [])
    assert lines[0] == (WARNING, f"went on from round 9 on branch {'62' * 8}, 2 members")
    assert len(lines) == 2


def test_a_complaint_is_told_when_it_lasts_and_when_it_is_over() -> None:
    news = News()
    told = [news.look(state(), [DISK, BEHIND]) for _ in range(LOOKS + 2)]
    assert told == [[]] * (LOOKS - 1) + [[(WARNING, DISK.text), (INFO, "catching up")]] + [[]] * 2
    assert news.look(state(), [BEHIND]) == [(INFO, f"over: {DISK.text}")]


def test_a_complaint_that_passes_at_once_is_not_told() -> None:
    news = News()
    for _ in range(5):
        assert news.look(state(), [DISK]) == []
        assert news.look(state(), []) == []


def test_a_complaint_whose_figures_change_is_told_once() -> None:
    news = News()
    disks = [complaint(Code.DEGRADED, why=f"{number} bytes are left") for number in range(9)]
    told = [line for disk in disks for line in news.look(state(), [disk])]
    assert told == [(WARNING, disks[LOOKS - 1].text)]
    assert news.look(state(), []) == [(INFO, f"over: {disks[LOOKS - 1].text}")]


def test_what_is_dropped_is_told_at_once_and_then_now_and_then() -> None:
    drops, key = Drops(), KEYS[1]
    assert drops.look(0, b"", 0.0) == []
    text = "had no room and were dropped: what this node misses, it asks for again"
    assert drops.look(1_200, b"", 5.0) == [(WARNING, f"1,200 messages of peers {text}")]
    assert drops.look(1_300, key, 5.0 + DROPS_SECONDS - 1.0) == []
    of_peer = text.replace("dropped", f"dropped, lately of {peer_id_of(key)}")
    assert drops.look(1_301, key, 5.0 + DROPS_SECONDS) == [(WARNING, f"101 messages of peers {of_peer}")]
    assert drops.look(1_301, key, 5.0 + 9 * DROPS_SECONDS) == []
