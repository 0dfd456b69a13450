"""Simulated machines: effects in their order, the disk, the device, clocks and sleep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from p2ptrain.core import events as ev
from p2ptrain.core import history as history_module
from p2ptrain.core.history import BranchStart, Entry, History, encode_history
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import Certificate
from p2ptrain.core.state import AgreedState, Taken
from p2ptrain.sim.cluster import DIAL_SECONDS, HISTORY_SECONDS, TICKS_MAX, Cluster
from p2ptrain.sim.ledger import Violation
from p2ptrain.sim.machine import HELD_UP_MAX, Disk, HeldPayloads, SavedState
from tests.helpers.sim import ScriptedCore, announcement, begin_faults, do, of_kind, scripted, vote

FIRST = SavedState(0, b"f" * 32, b"")

# ---------------------------------------------------------------------------------------------------
# The disk and the order of effects


def test_what_follows_a_persist_waits_for_the_disk_and_what_comes_before_does_not() -> None:
    cluster, scripts = scripted(disk={"fsync_seconds": 1.0})
    first, second, third = (vote(cluster, 0, view) for view in range(3))
    do(cluster, 0, ev.Publish(first), ev.Persist(ev.Said(second)), ev.Publish(second))
    do(cluster, 0, ev.Persist(ev.Said(third)), ev.Publish(third))
    assert cluster.nodes[0].disk.said == []
    cluster.run()
    times = [at for at, _ in scripts[1].heard]
    assert times[0] == 0.01
    assert times[1] > 0.02  # not at once
    assert times[1] < times[2]  # the second was not there when the write began
    assert [record.envelope for _, record in cluster.nodes[0].disk.said] == [second, third]


def test_all_that_waits_when_the_disk_is_free_goes_in_one_write() -> None:
    cluster, scripts = scripted(disk={"fsync_seconds": 1.0})
    envelopes = [vote(cluster, 0, view) for view in range(3)]
    do(cluster, 0, *(effect for each in envelopes for effect in (ev.Persist(ev.Said(each)), ev.Publish(each))))
    cluster.run()
    assert len({at for at, _ in scripts[1].heard}) == 1
    assert len(cluster.nodes[0].disk.said) == 3


@pytest.mark.parametrize(("kept", "there"), [(0.0, 0), (1.0, 2)])
def test_a_crash_loses_what_was_not_written_and_perhaps_what_was_being_written(kept: float, there: int) -> None:
    cluster, scripts = scripted(disk={"fsync_seconds": 1.0, "kept": kept})
    envelopes = [vote(cluster, 0, view) for view in range(2)]
    do(cluster, 0, *(effect for each in envelopes for effect in (ev.Persist(ev.Said(each)), ev.Publish(each))))
    cluster.kill(cluster.nodes[0])
    cluster.run()
    assert len(cluster.nodes[0].disk.said) == there
    assert [event for _, event in scripts[1].heard] == []  # nothing is said by the dead
    assert not cluster.nodes[0].alive


def test_a_fuse_kills_between_two_effects() -> None:
    cluster, scripts = scripted()
    cluster.nodes[0].process.light_fuse(2)
    do(cluster, 0, *(ev.Publish(vote(cluster, 0, view)) for view in range(4)))
    cluster.run()
    assert not cluster.nodes[0].alive
    assert len(scripts[1].heard) == 2


def test_a_disk_keeps_what_is_said_for_later_rounds_only() -> None:
    cluster, _ = scripted()
    disk = cluster.nodes[0].disk
    for number in (1, 2):
        envelope = announcement(cluster, 0, number)
        received = cluster.decode(envelope)
        assert received is not None
        disk.write(ev.Said(envelope), received.message)
    empty = certified(disk.state, b"1")  # and so the first announcement may still be taken
    disk.write(empty, None)
    assert [message.round for message, _ in disk.said] == [1, 2]  # type: ignore[union-attr]
    full = certified(disk.state, b"2")
    disk.write(replace(full, state=replace(full.state, filled=(2,))), None)
    assert [message.round for message, _ in disk.said] == []  # type: ignore[union-attr]


def certified(state: AgreedState, salt: bytes = b"") -> ev.Certified:
    """Makes an unsigned round on top of a state; the simulated disk does not check signatures."""
    manifest = Manifest(
        state.branch, state.round + 1, state.head, state.digest, 0, salt.ljust(32), (), (), (), (), (), (), b"", (), ()
    )
    entry = Entry(manifest, Certificate(state.branch, state.round + 1, 0, manifest.digest, b"\1", (bytes(64),)))
    return ev.Certified(entry, replace(state, round=state.round + 1, head=manifest.digest))


def test_a_disk_replaces_what_came_after_the_state_that_a_round_follows() -> None:
    cluster, _ = scripted()
    disk = Disk(FIRST, cluster.setup.genesis, kept=3, staleness=0)
    first = certified(cluster.setup.genesis, b"1")
    second, other = certified(first.state, b"2"), certified(first.state, b"other")
    third = certified(other.state, b"3")
    for record in (first, second, other, third):
        disk.write(record, None)
    assert disk.history == [first, other, third]
    fourth = certified(third.state, b"4")
    disk.write(fourth, None)
    assert (disk.base, disk.history) == (first.state, [other, third, fourth])
    fifth = certified(fourth.state, b"5")
    ahead = certified(fifth.state, b"6")
    with pytest.raises(AssertionError, match="follows a saved state"):
        disk.write(ahead, None)
    disk.write(replace(ahead, trunk=ev.Trunk((), (), (), fifth.state)), None)  # a jump
    assert (disk.base, disk.state) == (fifth.state, ahead.state)


def test_a_checkpoint_that_is_not_on_the_saved_history_is_passed_over() -> None:
    cluster, _ = scripted()
    disk = Disk(FIRST, cluster.setup.genesis, kept=9, staleness=0)
    first, second = (
        certified(cluster.setup.genesis, b"1"),
        certified(certified(cluster.setup.genesis, b"1").state, b"2"),
    )
    disk.write(first, None)
    assert disk.saved().applied_round == 0
    disk.save_checkpoint(SavedState(1, b"r" * 32, first.state.head))
    disk.save_checkpoint(SavedState(2, b"x" * 32, second.state.head))  # of a branch that has lost
    assert (disk.saved().applied_round, disk.saved().applied_root) == (1, b"r" * 32)
    disk.write(second, None)
    assert disk.saved().applied_round == 2


def test_a_shelf_keeps_payloads_for_so_many_rounds_at_least() -> None:
    held_payloads = HeldPayloads(rounds=10)
    held_payloads.add(b"a")
    held_payloads.turn(10)
    assert b"a" in held_payloads
    held_payloads.add(b"b")
    held_payloads.turn(19)
    assert b"a" in held_payloads
    held_payloads.turn(20)
    assert [name in held_payloads for name in (b"a", b"b")] == [False, True]


# ---------------------------------------------------------------------------------------------------
# Payloads, states and histories


def test_a_payload_comes_from_the_first_source_that_has_it() -> None:
    cluster, scripts = scripted(4)
    keys = [node.key for node in cluster.nodes]
    name, payload = cluster.payloads.make(cluster.nodes[3], 1, 0)
    cluster.nodes[3].held_payloads.add(name)
    cluster.kill(cluster.nodes[1])
    do(cluster, 0, ev.Fetch(name, 40, (keys[1], keys[2], keys[3])))
    cluster.run()
    failed = of_kind(scripts[0], ev.FetchFailed)
    assert [(event.peer, event.why) for _, event in failed] == [
        (keys[1], "cannot be reached"),
        (keys[2], "does not have it"),
    ]
    assert failed[0][0] >= DIAL_SECONDS
    assert [event for _, event in of_kind(scripts[0], ev.PayloadArrived)] == [
        ev.PayloadArrived(name, True, keys[3], 40, payload.content)
    ]
    assert name in cluster.nodes[0].held_payloads


def test_a_bad_payload_arrives_as_bad() -> None:
    cluster, scripts = scripted()
    name, payload = cluster.payloads.make(cluster.nodes[1], 1, 0, good=False)
    cluster.nodes[1].held_payloads.add(name)
    do(cluster, 0, ev.Fetch(name, 40, (cluster.nodes[1].key,)))
    cluster.run()
    assert scripts[0].heard[-1][1] == ev.PayloadArrived(name, False, cluster.nodes[1].key, 40, payload.content)


def test_a_large_payload_takes_its_time() -> None:
    links = {"latency_seconds": 0.01, "jitter_seconds": 0.0, "bytes_per_second": 1e6}
    cluster, scripts = scripted(links=links, training={"payload_bytes": 2_000_000})
    name, payload = cluster.payloads.make(cluster.nodes[1], 1, 0)
    assert payload.attachment == b""
    cluster.nodes[1].held_payloads.add(name)
    do(cluster, 0, ev.Fetch(name, 2_000_000, (cluster.nodes[1].key,)))
    cluster.run()
    assert scripts[0].heard[-1][0] == pytest.approx(2.02, abs=0.01)


def test_a_history_that_does_not_come_fails() -> None:
    cluster, scripts = scripted()
    keys = [node.key for node in cluster.nodes]
    cluster.kill(cluster.nodes[2])
    for peer in keys[1:]:
        do(cluster, 0, ev.AskHistory(peer, cluster.setup.run_id, 0))
    cluster.run()
    assert scripts[1].heard[0][1] == ev.HistoryAsked(keys[0], cluster.setup.run_id, 0)
    assert of_kind(scripts[0], ev.HistoryFailed) == [
        (DIAL_SECONDS, ev.HistoryFailed(keys[2], "no answer")),
        (HISTORY_SECONDS, ev.HistoryFailed(keys[1], "no answer")),
    ]


def test_a_history_arrives_as_it_was_sent_and_only_where_it_was_asked_for() -> None:
    cluster, scripts = scripted()
    keys = [node.key for node in cluster.nodes]
    history = History((BranchStart(cluster.setup.run_id, 0),), 0, (), None, ())
    scripts[1].replies[ev.HistoryAsked] = lambda asked: [
        ev.SendHistory(asked.peer, history),
        ev.SendHistory(keys[2], history),
    ]
    do(cluster, 0, ev.AskHistory(keys[1], cluster.setup.run_id, 0))
    cluster.run()
    assert [event for _, event in scripts[0].heard] == [ev.HistoryArrived(keys[1], history)]
    assert scripts[2].heard == []


def test_a_history_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, scripts = scripted()
    keys = [node.key for node in cluster.nodes]
    history = History((BranchStart(cluster.setup.run_id, 0),), 0, (), None, ())
    monkeypatch.setattr(history_module, "HISTORY_BYTES_MAX", len(encode_history(history)) - 1)
    scripts[1].replies[ev.HistoryAsked] = lambda asked: [ev.SendHistory(asked.peer, history)]
    do(cluster, 0, ev.AskHistory(keys[1], cluster.setup.run_id, 0))
    cluster.run()
    assert [event for _, event in scripts[0].heard] == [ev.HistoryFailed(keys[1], "no answer")]


def test_a_history_in_another_encoding_fails() -> None:
    cluster, scripts = scripted()
    cluster.nodes[0].process.questions[1] = 5
    cluster.executor._history_came(cluster.nodes[0], cluster.nodes[1], b"\x00")
    assert isinstance(scripts[0].heard[0][1], ev.HistoryFailed)


def test_a_state_is_fetched_from_a_source_that_has_it() -> None:
    cluster, scripts = scripted()
    root = b"r" * 32
    cluster.nodes[2].state.kept[7, root] = None
    sources = tuple(node.key for node in cluster.nodes[1:])
    first, second = ev.CatchUp(((9, root),), sources), ev.CatchUp(((8, root), (7, root)), sources, 1)
    do(cluster, 0, first, second)  # which ends the first
    cluster.run()
    do(cluster, 0, ev.CatchUp(((8, root),), sources, 2))
    cluster.run()
    assert [event for _, event in scripts[0].heard] == [
        ev.CaughtUp(7, root, 1),
        ev.CatchUpFailed("nobody has it", 2),
    ]
    assert (cluster.nodes[0].state.round, cluster.nodes[0].state.root) == (7, root)


def manifest(cluster: Cluster, taken: Sequence[Taken] = ()) -> Manifest:
    state = cluster.setup.genesis
    return Manifest(
        state.branch, 1, state.head, state.digest, 0, state.root, tuple(taken), (), (), (), (), (), b"", (), ()
    )


def test_the_same_manifest_makes_the_same_state_of_the_same_state() -> None:
    cluster, scripts = scripted()
    for index in range(2):
        do(cluster, index, ev.Apply(manifest(cluster)))
    cluster.run()
    one, other = (script.heard[0][1] for script in scripts[:2])
    assert isinstance(one, ev.Applied)
    assert one == other
    assert (one.branch, one.round) == (cluster.setup.run_id, 1)
    assert one.root not in (cluster.setup.genesis.root, bytes(32))
    assert cluster.nodes[0].state.applied == [(cluster.setup.run_id, 1, 1, manifest(cluster).digest)]
    assert cluster.nodes[0].state.root == one.root


def test_the_same_manifest_makes_another_state_of_another_state() -> None:
    cluster, scripts = scripted()
    cluster.nodes[1].state.root = b"x" * 32
    for index in range(2):
        do(cluster, index, ev.Apply(manifest(cluster)))
    cluster.run()
    one, other = (script.heard[0][1] for script in scripts[:2])
    assert isinstance(one, ev.Applied)
    assert isinstance(other, ev.Applied)
    assert one.root != other.root


def test_applying_without_a_payload_is_caught() -> None:
    cluster, _ = scripted()
    name, _ = cluster.payloads.make(cluster.nodes[1], 1, 0)
    apply = ev.Apply(manifest(cluster, [Taken(cluster.nodes[1].key, 1, 0, name, 40, 1, name[:16])]))
    with pytest.raises(Violation, match="node 0 applies round 1 and lacks a payload"):
        do(cluster, 0, apply)


def test_applying_to_another_state_is_caught() -> None:
    cluster, _ = scripted()
    do(cluster, 0, ev.Apply(manifest(cluster)), ev.Apply(manifest(cluster)))
    with pytest.raises(Violation, match="applies round 1 to the state of round 1"):
        cluster.run()


# ---------------------------------------------------------------------------------------------------
# Training


def test_training_takes_its_time_and_ends_with_a_new_payload() -> None:
    slow = [{"nodes": [1], "times": 3.0}]
    cluster, scripts = scripted(training={"seconds": 2.0, "spread": 0.0, "slow": slow})
    for index in range(2):
        do(cluster, index, ev.Train(1, 0, 0, 1))
    cluster.run()
    (at, one), (later, other) = scripts[0].heard[0], scripts[1].heard[0]
    assert isinstance(one, ev.TrainingFinished)
    assert isinstance(other, ev.TrainingFinished)
    assert (at, later) == (2.0, 6.0)
    assert (one.round, one.payload_bytes, len(one.attachment)) == (1, 40, 40)
    assert one.payload != other.payload
    assert one.payload in cluster.nodes[0].held_payloads


def test_training_twice_at_a_time_is_caught() -> None:
    cluster, _ = scripted()
    do(cluster, 0, ev.Train(1, 0, 0, 1))
    with pytest.raises(Violation, match="began to train for round 2 while it was training"):
        do(cluster, 0, ev.Train(2, 0, 0, 1))


def test_a_crash_ends_the_training() -> None:
    cluster, scripts = scripted()
    do(cluster, 0, ev.Train(1, 0, 0, 1))
    cluster.kill(cluster.nodes[0])
    cluster.run()
    assert scripts[0].heard == []


def test_a_stalled_device_is_done_when_the_stall_is_over() -> None:
    fault = {"kind": "stall", "at": 0.5, "until": 30.0, "nodes": [0]}
    cluster, scripts = scripted(fault=[fault])
    begin_faults(cluster)
    do(cluster, 0, ev.Train(1, 0, 0, 1))
    cluster.run()
    assert [at for at, event in scripts[0].heard if isinstance(event, ev.TrainingFinished)] == [30.0]


# ---------------------------------------------------------------------------------------------------
# Clocks


def due(script: ScriptedCore, *deadlines: float) -> None:
    """Has the script request timers at these local times, one after the other."""
    waiting = list(deadlines)

    def next_one(_: ev.Tick) -> list[ev.Effect]:
        script.deadline = waiting.pop(0) if waiting else None
        return []

    next_one(ev.Tick())
    script.replies[ev.Tick] = next_one


def test_a_tick_comes_when_it_is_due_on_the_nodes_own_clock() -> None:
    cluster, scripts = scripted()
    node = cluster.nodes[0]
    node.clock.offset, node.clock.rate = 1_000.0, 2.0
    due(scripts[0], 1_010.0, 1_040.0)
    cluster.give(node, ev.Asked(b"", ()))
    cluster.run()
    assert [round(now, 4) for now in scripts[0].times] == [1_000.0, 1_010.0, 1_040.0]
    assert [at for at, event in scripts[0].heard if isinstance(event, ev.Tick)] == pytest.approx([5.0, 20.0], abs=1e-4)


def test_a_clock_that_jumps_takes_its_deadlines_along() -> None:
    cluster, scripts = scripted()
    node = cluster.nodes[0]
    node.clock.offset = 0.0
    due(scripts[0], 50.0)
    cluster.give(node, ev.Asked(b"", ()))
    cluster.calendar.at(10.0, cluster.set_clock, node, 35.0, 1.0)  # local time 45 now
    cluster.run()
    assert [at for at, event in scripts[0].heard if isinstance(event, ev.Tick)] == pytest.approx([15.0], abs=1e-4)


def test_a_deadline_that_moves_away_gives_no_early_tick() -> None:
    cluster, scripts = scripted()
    node = cluster.nodes[0]
    node.clock.offset = 0.0
    due(scripts[0], 5.0)
    cluster.give(node, ev.Asked(b"", ()))
    scripts[0].deadline = 20.0  # nobody has been told yet
    cluster.run()
    assert [at for at, event in scripts[0].heard if isinstance(event, ev.Tick)] == pytest.approx([20.0], abs=1e-4)


def test_a_busy_loop_is_caught() -> None:
    cluster, scripts = scripted()
    node = cluster.nodes[0]
    scripts[0].deadline = node.clock.local(1.0)
    cluster.give(node, ev.Asked(b"", ()))
    with pytest.raises(Violation, match="busy loop"):
        cluster.run()
    assert len(scripts[0].heard) == TICKS_MAX + 2


def test_a_machine_that_sleeps_hears_everything_when_it_wakes_up() -> None:
    fault = {"kind": "sleep", "at": 1.0, "until": 60.0, "nodes": [0]}
    cluster, scripts = scripted(fault=[fault])
    begin_faults(cluster)
    do(cluster, 0, ev.Train(1, 0, 0, 1))
    for time, view in ((0.5, 0), (10.0, 1), (20.0, 2)):
        cluster.calendar.at(time, do, cluster, 1, ev.Publish(vote(cluster, 1, view)))
    cluster.run()
    views = [(at, event.received.message.view) for at, event in of_kind(scripts[0], ev.MessageReceived)]
    assert views == [(0.51, 0), (60.0, 1), (60.0, 2)]
    assert [at for at, _ in of_kind(scripts[0], ev.TrainingFinished)] == [60.0]


def test_what_waits_for_a_machine_that_sleeps_is_bounded() -> None:
    cluster, _ = scripted()
    node = cluster.nodes[0]
    node.process.sleep(50.0)
    for _ in range(HELD_UP_MAX + 10):
        cluster.give(node, ev.Tick())
    assert len(node.process.held_up) == HELD_UP_MAX
