"""A swarm of real daemons with nodes that join, leave, die and sleep. The replicas stay the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from p2ptrain.identity import Identity
from p2ptrain.store.records import remembered_peers
from tests.helpers.daemons import TEST_SECONDS, DaemonSwarm, StartableDaemon, as_json, p2pds, p2ptrain, swarm_in

ROUNDS = 3  # that the others go on before something else happens
STATUS = {
    "run_id", "peer_id", "addresses", "round", "phase", "state_root", "loss", "peers", "roster", "fault_tolerance",
    "health", "http",
}  # fmt: skip

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[DaemonSwarm]:
    with swarm_in(tmp_path) as swarm:
        yield swarm
        assert swarm.compared() > ROUNDS
        for node in swarm.daemons:
            if node.is_running:
                counters = node.status()["counters"]
                assert {name for name in ("events dropped", "root mismatches") if counters.get(name)} == set()


def goes_on(*nodes: StartableDaemon) -> None:
    """Waits until all of them have applied some more rounds."""
    for node, number in [(node, node.applied + ROUNDS) for node in nodes]:
        node.until_applied(number)


def until_back(node: StartableDaemon, *others: StartableDaemon) -> float:
    """Waits until a node has caught up and is a member. Returns the seconds since it was started."""
    number = max(other.applied for other in others)
    node.until(lambda: node.applied >= number and node.is_member)
    return monotonic() - node.started_at


def remembered_by(node: StartableDaemon) -> list[str]:
    """Returns the addresses that a node would dial after a restart; each start here listens on a port of its own."""
    (directory,) = node.directory.glob("runs/*")
    return remembered_peers(directory)


def test_nodes_come_while_rounds_run_and_leave_and_come_again(swarm: DaemonSwarm) -> None:
    first = swarm.first().start().until_up()
    first.until_applied(ROUNDS)
    second, third = (swarm.joiner(name, first.address).start() for name in ("second", "third"))
    for node in (second, third):
        swarm.note(f"{node.name} from start to member", node.until_member())
    for node in (first, second, third):
        node.until(lambda node=node: (node.peers, len(node.status()["roster"])) == (2, 3))
    _look_at(first, second)

    status, out, _ = p2ptrain("leave", "--data-dir", second.directory)
    assert (status, out) == (0, "leaving: the daemon tells the others, saves its state and ends\n")
    assert second.until_ended() == 0
    third.signal(signal.SIGTERM)
    assert third.until_ended() == 0
    first.until(lambda: len(first.status()["roster"]) == 1)
    goes_on(first)
    for node in (second, third):
        node.start()
    for node in (second, third):
        swarm.note(f"{node.name} from start to member again", node.until_member())
    goes_on(first, second, third)
    third.signal(signal.SIGINT)
    assert third.until_ended() == 0
    assert third.text.splitlines()[-1].endswith("left: ended")
    _replay(swarm, second, third)


def _look_at(first: StartableDaemon, second: StartableDaemon) -> None:
    status = as_json("status", "--data-dir", first.directory)
    assert status.keys() >= STATUS
    assert status["fault_tolerance"] == {"crashes": 1, "liars": 0, "mode": "crash-only"}
    peers = as_json("peers", "--data-dir", first.directory)["peers"]
    (found,) = (each for each in peers if each["peer_id"] == second.ask()["peer_id"])
    assert (found["is_member"], found["addresses"]) == (True, [second.address])  # and not where its call came from
    runs = as_json("runs", "--bootstrap", second.address)
    assert [(run["run_id"], run["name"], run["members"]) for run in runs] == [(status["run_id"], "test", 3)]
    for command, told in (("status", f"peer id     {status['peer_id']}"), ("peers", "2 peers")):
        code, out, _ = p2ptrain(command, "--data-dir", first.directory)
        assert (code, told in out) == (0, True)


def _replay(swarm: DaemonSwarm, *ended: StartableDaemon) -> None:
    logs = [log for node in ended for log in node.events()]
    assert len(logs) == 4
    for log in logs[1:3]:
        status, out, _ = p2ptrain("replay", log)
        assert (status, out.rpartition(": ")[2]) == (0, "all effects are the same\n"), out


def test_in_a_run_by_invitation_a_stop_keeps_the_place_and_leaving_gives_it_up(
    swarm: DaemonSwarm, tmp_path: Path
) -> None:
    first = swarm.first(run="closed")
    first.directory.mkdir()
    key = Identity.make(first.directory / "identity.key").key.hex()
    run, invitation = tmp_path / "closed.toml", tmp_path / "second.invitation"
    invites = run.read_text().replace("[admission]", f'[admission]\npolicy = "invite"\nkeys = ["{key}"]')
    run.write_text(invites.replace("stall_seconds = 10", "stall_seconds = 600"))  # each waits for the other
    first.start().until_up()
    assert p2ptrain("invite", "--data-dir", first.directory, "--last-round", "100000", "--out", invitation)[0] == 0
    second = swarm.add("second", "join", "--bootstrap", first.address, "--invitation", invitation).start()
    second.until_member()

    for node in (second, first):
        for number in (signal.SIGTERM, signal.SIGINT):
            node.signal(number)
            assert node.until_ended() == 0
            assert node.text.splitlines()[-1].endswith("away: ended")
            node.arguments = ["join"]
            node.start()
            swarm.note(f"{node.name} from start to where the other is", until_back(node, first, second))
            goes_on(first, second)
            (other,) = {first, second} - {node}
            address = node.address
            other.until(lambda other=other, address=address: address in remembered_by(other))
    second.leave()
    second.start()
    second.until(lambda: any("not admitted" in each for each in second.status().get("health", ())))
    assert not second.status()["is_admitted"]


def test_whoever_is_killed_is_missed_by_nobody_and_comes_back(swarm: DaemonSwarm) -> None:
    first, second, third = swarm.of(3)
    third.kill()
    goes_on(first, second)
    third.start()
    swarm.note("a member back after a kill", until_back(third, first, second))

    first.kill()
    goes_on(second, third)
    first.start()
    swarm.note("the first back after a kill", until_back(first, second, third))
    goes_on(first, second, third)

    second.p2pd.kill()
    killed_at = monotonic()
    second.until(lambda: second.status()["bytes"]["p2pd restarts"] == 1)
    second.until(lambda: second.peers == 2)
    swarm.note("p2pd back after a kill, with the same peers", monotonic() - killed_at)
    assert monotonic() - killed_at < 10
    goes_on(first, second, third)
    assert "p2pd ended (status -9) and is being restarted" in second.text


def test_who_was_asleep_catches_up(swarm: DaemonSwarm) -> None:
    first, second, third = swarm.of(3)
    third.stop()
    asleep_since, number = monotonic(), first.applied
    first.until(lambda: monotonic() > asleep_since + 10)
    assert first.applied >= number + ROUNDS
    third.cont()
    woke_at, number = monotonic(), first.applied
    third.until(lambda: third.applied >= number and third.is_member)
    swarm.note("caught up after 10 s of sleep", monotonic() - woke_at)
    goes_on(first, second, third)
    for node in (first, second):  # a whole swarm asleep: nobody was away
        node.stop()
    third.stop()
    third.pause(6.0)
    for node in (first, second, third):
        node.cont()
    goes_on(first, second, third)
    assert {len(node.status()["roster"]) for node in (first, second, third)} == {3}


def test_the_second_interrupt_ends_at_once(swarm: DaemonSwarm) -> None:
    first, second = swarm.of(2)
    goes_on(first, second)
    second.kill()
    first.signal(signal.SIGINT)
    first.until_says("leaving the run, with the manifest of this round or the next; signal again to end at once")
    assert first.is_running  # it waits for the other, who should know
    first.signal(signal.SIGINT)
    asked_at = monotonic()
    assert first.until_ended() == 130
    swarm.note("ended by force", monotonic() - asked_at)
    assert p2pds(swarm.directory) == []
    for node in (first, second):
        node.start()
    goes_on(first, second)
