"""The order of effects: the queue itself, and its use by both the daemon and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core import events as ev
from p2ptrain.core.effect_queue import EffectQueue
from tests.helpers.driver import bench, doing
from tests.helpers.net import skipping_time, until
from tests.helpers.sim import do, scripted


def persist(number: int) -> ev.Persist:
    return ev.Persist(ev.Observed(bytes([number])))


def leave(number: int) -> ev.Return:
    return ev.Return(number)


def records(*numbers: int) -> list[ev.Record]:
    return [persist(number).record for number in numbers]


# ---------------------------------------------------------------------------------------------------
# The queue


def test_what_follows_a_persist_waits_and_all_that_waits_is_written_at_once() -> None:
    queue, done = EffectQueue[ev.Effect](), list[ev.Effect]()
    queue.add([leave(1), persist(2), leave(3), persist(4), leave(5)])
    assert queue.carry_out(done.append) == records(2, 4)
    assert done == [leave(1)]
    queue.add([persist(6), leave(7)])
    assert queue.carry_out(done.append) == [], "one write at a time"
    queue.written()
    assert queue.carry_out(done.append) == records(6)
    assert done == [leave(1), persist(2), leave(3), persist(4), leave(5)]
    queue.written()
    assert queue.carry_out(done.append) == []
    assert done[-2:] == [persist(6), leave(7)]
    assert len(queue) == 0


def test_what_an_effect_leads_to_comes_after_those_that_wait() -> None:
    queue, done = EffectQueue[ev.Effect](), list[ev.Effect]()

    def act(effect: ev.Effect) -> None:
        done.append(effect)
        if effect == leave(1):
            queue.add([leave(3)])
            assert queue.carry_out(act) == []

    queue.add([leave(1), leave(2)])
    assert queue.carry_out(act) == []
    assert done == [leave(1), leave(2), leave(3)]


def test_a_process_that_ends_leaves_nothing_behind() -> None:
    queue, done = EffectQueue[ev.Effect](), list[ev.Effect]()
    queue.add([leave(1), leave(2), persist(3)])
    assert queue.carry_out(lambda effect: queue.clear()) == []
    queue.add([persist(4), leave(5)])
    assert queue.carry_out(done.append) == records(4)
    queue.clear()
    assert (len(queue), queue.writing, queue.carry_out(done.append), done) == (0, [], [], [])


@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=20), st.data())
def test_no_effect_overtakes_another_or_a_record_before_it(batches: list[list[bool]], data: st.DataObject) -> None:
    """Each batch says which of its effects are records; the test chooses when writes end."""
    queue, done, disk, given = EffectQueue[ev.Effect](), list[int](), list[int](), list[ev.Effect]()

    def number_of(effect: ev.Effect) -> int:
        return effect.round if isinstance(effect, ev.Return) else effect.record.scores[0]  # type: ignore[union-attr]

    def act(effect: ev.Effect) -> None:
        done.append(number_of(effect))
        persisted = [number_of(each) for each in given[: len(done)] if isinstance(each, ev.Persist)]
        assert disk[: len(persisted)] == persisted

    for batch in [*batches, [], []]:
        effects = [persist(len(given) + at) if each else leave(len(given) + at) for at, each in enumerate(batch)]
        given += effects
        queue.add(effects)
        queue.carry_out(act)
        if queue.writing and (not batch or data.draw(st.booleans())):
            disk += [record.scores[0] for record in queue.writing]  # type: ignore[union-attr]
            queue.written()
            queue.carry_out(act)
    while queue.writing:
        disk += [record.scores[0] for record in queue.writing]  # type: ignore[union-attr]
        queue.written()
        queue.carry_out(act)
    assert done == [*range(len(given))]


# ---------------------------------------------------------------------------------------------------
# Both drivers


BATCHES = [[leave(1), persist(2), leave(3)], [leave(4)], [persist(5), persist(6), leave(7), persist(8)], [leave(9)]]


async def by_the_daemon(folder: Path, batches: Sequence[Sequence[ev.Effect]]) -> list[Any]:
    """What its driver does, and in what order: rounds of `Return`, and lists of records that are written."""
    done: list[Any] = []
    async with bench(folder) as each:
        each.persistence.disk_seconds = 1.0
        write = each.store.write
        each.store.write = lambda given: (done.append([*given]), write(given))  # type: ignore[method-assign]
        each.driver.worker.settled = lambda number, uncounted: done.append(number)  # type: ignore[method-assign]
        async with each.running():
            for batch in batches:
                doing(each, *batch)
            await until(lambda: not len(each.driver.effects))
    return done


def by_the_simulator(batches: Sequence[Sequence[ev.Effect]]) -> list[Any]:
    done: list[Any] = []
    cluster, _ = scripted(1, disk={"fsync_seconds": 1.0})
    write = cluster.executor.write
    cluster.executor.write = lambda node, given: (done.append([*given]), write(node, given))  # type: ignore[method-assign]
    cluster.executor._actions[ev.Return] = lambda node, effect: done.append(effect.round)
    for batch in batches:
        do(cluster, 0, *batch)
    cluster.run()
    return done


@skipping_time
async def test_the_daemon_and_the_simulator_have_one_order(tmp_path: Path) -> None:
    together = [[each for batch in BATCHES for each in batch]]
    expected = [1, records(2, 5, 6, 8), 3, 4, 7, 9]
    assert by_the_simulator(together) == await by_the_daemon(tmp_path, together) == expected


@skipping_time
async def test_neither_goes_round_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a queue that turns the order round, and never writes, both do just that."""

    def turned(self: EffectQueue[Any], act: Any) -> list[ev.Record]:
        waiting = [each for each in self._waiting if not isinstance(each, ev.Persist)]
        self.clear()
        for effect in reversed(waiting):
            act(effect)
        return []

    together = [[each for batch in BATCHES for each in batch]]
    monkeypatch.setattr(EffectQueue, "carry_out", turned)
    assert by_the_simulator(together) == await by_the_daemon(tmp_path, together) == [9, 7, 4, 3, 1]
