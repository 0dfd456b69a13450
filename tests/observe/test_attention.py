"""What to look at first in a swarm of 4 to 256 nodes, and how the terminal shows it."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.core.complaints import Code, complaint
from p2ptrain.observe.attention import CONCERNS_MAX, LOOKS, looked_at
from p2ptrain.observe.progress import NODES_SHOWN, WIDTH, swarm_lines
from p2ptrain.observe.schema import Peer, PeerList
from tests.helpers.web import PEER

WELL = {
    "points": 0.0, "refused": {}, "observed": {}, "rounds_lately": 50, "taken_lately": 50,
    "tokens_per_second_mean": 500.0, "staleness_mean": 0.2, "heard_seconds": 3.0,
}  # fmt: skip
WORSE: list[tuple[dict[str, Any], str]] = [
    ({"is_elsewhere": True}, "on another branch"),
    ({"heard_seconds": 7_300.0}, "silent for 2 h 1 min"),
    ({"standing": "suspended"}, "suspended"),
    ({"is_greylisted": True}, "kept away"),
    ({"taken_lately": 20}, "missed 30 of 50"),
    ({"tokens_per_second_mean": 5e6}, "of the work"),
    ({"tokens_per_second_mean": 40.0}, "12 times slower"),
    ({"staleness_mean": 4.25}, "4.2 rounds of delay"),
    ({"standing": "on trial"}, "on trial"),
]


def node(number: int, **changes: Any) -> Peer:
    told = {name: value for name, value in PEER.items() if name != "peer_id"} | WELL | changes
    return Peer(**told, peer=number.to_bytes(32, "big"))


def swarm(count: int, **bad: dict[str, Any]) -> PeerList:
    """Looks at a swarm of so many nodes, the last of which is this one; `bad` are changes, by n and number."""
    nodes = [node(number, **bad.get(f"n{number}", {})) for number in range(1, count + 1)]
    return looked_at(nodes[:-1], nodes[-1])


@pytest.mark.parametrize("count", [4, 256])
@pytest.mark.parametrize(("changes", "reason"), WORSE)
def test_a_node_that_needs_a_look_comes_first_with_the_reason_and_a_next_step(
    count: int, changes: dict[str, Any], reason: str
) -> None:
    found = swarm(count, n3=changes)
    first, *others = found.peers
    (said,) = first.reasons
    assert said.endswith(reason) and not any(each.reasons for each in others)
    (concern,) = found.concerns
    assert (concern.peers, concern.advice != "") == ([first.peer_id], True)
    assert concern.text.startswith("1 node ") and concern.text.endswith(f"…{first.peer_id[-8:]}")


def test_a_swarm_that_is_well_gives_no_reason_and_neither_do_strangers_and_newcomers() -> None:
    assert (swarm(7).concerns, [each.reasons for each in swarm(7).peers]) == ([], [[]] * 6)
    stranger = {"is_admitted": False, "is_member": False, "standing": "", "heard_seconds": None, "rounds_lately": 0}
    assert swarm(7, n1=stranger, n2={"rounds_lately": 9, "taken_lately": 0}).concerns == []
    without_seat = {"is_member": False, "heard_seconds": 900.0}
    assert swarm(7, n1=without_seat).concerns == [], "no quorum waits for it"
    near = {"taken_lately": 26, "tokens_per_second_mean": 130.0, "staleness_mean": 2.9, "heard_seconds": 44.0}
    assert swarm(7, n1=near).concerns == [], "on home lines this is usual"
    assert swarm(2, n1={"tokens_per_second_mean": 1.0}).concerns == [], "two speeds say nothing"


def test_what_costs_most_stands_first_and_a_node_counts_once() -> None:
    bad = {f"n{number}": changes for number, (changes, _) in enumerate(WORSE, 1)}
    bad["n9"] = {"heard_seconds": 60.0, "taken_lately": 0, "standing": "on trial"}
    found = swarm(40, **{name: bad[name] for name in reversed(bad)})
    assert len(found.concerns) == CONCERNS_MAX
    assert [title in each.text for (title, _), each in zip(LOOKS, found.concerns, strict=False)] == [
        True
    ] * CONCERNS_MAX
    assert [len(each.peers) for each in found.concerns] == [1, 2, 2, 1, 1]
    worst = [each.reasons[0] for each in found.peers if each.reasons]
    assert worst[:3] == ["on another branch", "silent for 2 h 1 min", "silent for 1 min"]
    assert found.peers[2].reasons == ["silent for 1 min", "missed 50 of 50", "on trial"]


def test_complaints_about_the_swarm_come_before_its_nodes_and_others_are_left_to_the_status() -> None:
    nodes = [node(number) for number in range(1, 4)]
    told = [complaint(Code.QUORUM_NEAR, heard=3, members=4, quorum=3), complaint(Code.DEGRADED, why="it is full")]
    found = looked_at([node(9, is_elsewhere=True), *nodes[1:]], nodes[0], told)
    assert [each.peers == [] for each in found.concerns] == [True, False]
    assert found.concerns[0].text == told[0].text


def lines(found: PeerList, everyone: bool = False) -> list[str]:
    return swarm_lines(found.model_dump(mode="json"), everyone).splitlines()


def test_a_node_has_the_name_of_its_owner_beside_it_and_its_release_if_that_is_another() -> None:
    told = {"n1": {"owner": "Ada"}, "n2": {"release": "0.2.0", "taken_lately": 20}, "n3": {"release": "0.1.0"}}
    found = swarm(4, **told, n4={"release": "0.1.0"})
    ends = [each.split("  ")[-1] for each in lines(found)[-5:-1]]
    assert [ends[0], ends[2][-3:]] == ["missed 30 of 50, 0.2.0", "Ada"]
    assert not [each for each in lines(found) if "0.1.0" in each]


def test_a_terminal_of_80_columns_shows_256_nodes_the_worst_first_and_this_one() -> None:
    bad = {f"n{number}": {"heard_seconds": 1e6, "taken_lately": 0} for number in range(1, 100)}
    huge = {"tokens_per_second_mean": 1.2e9, "latency_seconds": 9.9, "staleness_mean": 64.0}
    found = swarm(256, **bad, n200=huge)
    short, full = lines(found), lines(found, everyone=True)
    assert max(map(len, full)) <= WIDTH and max(map(len, short)) <= WIDTH
    assert short[0] == "look first at" and short[1].startswith("1. 99 nodes with a seat and not heard: …")
    head = next(number for number, line in enumerate(short) if line.startswith("node "))
    rows = short[head + 1 : head + 1 + NODES_SHOWN]
    assert all(row.endswith("silent for 11 d 13 h +1") for row in rows)
    assert short[-2:] == ["and 236 more: --all", "256 nodes, of which 256 have a seat"]
    assert sum(line.startswith("…") for line in full) == 255
    (mine,) = [line for line in full if line.startswith("this node")]
    assert mine.split()[2:] == ["seat", "3", "s", "500", "42", "ms", "50/50", "0.2"]


def test_a_swarm_that_is_well_is_said_to_be_in_one_line() -> None:
    assert lines(swarm(4))[0] == "nothing to look at"
