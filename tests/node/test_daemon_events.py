"""The event log is complete after a node crashed, and after one hung and was killed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from p2ptrain.cli import app
from p2ptrain.core import events as ev
from p2ptrain.core.journal import Journal
from p2ptrain.core.node import Node
from p2ptrain.core.state import genesis
from p2ptrain.identity import Identity, RunSigner
from p2ptrain.node import persistence
from p2ptrain.node.persistence import EVENT_FILES_KEPT, EventFile
from p2ptrain.replay import FORMAT, REAL, Header, NotingSigner, Replayed, replay
from tests.helpers.core import run_of
from tests.helpers.driver import PEER, bench
from tests.helpers.net import skipping_time

ME = Identity(bytes(32))
RUN_ID = bytes(range(32))


def started() -> ev.Started:
    beginning = genesis(RUN_ID, (ME.key,), bytes(32))
    return ev.Started(Journal(beginning, 16).saved_at(0, beginning.root))


def file_in(directory: Path) -> tuple[EventFile, NotingSigner]:
    signer = NotingSigner(RunSigner(ME, RUN_ID))
    return EventFile(
        directory, signer, Header(FORMAT, run_of().canonical().decode(), RUN_ID, ME.key, "1", REAL)
    ), signer


def written(directory: Path, ticks: int, seed: str = "1") -> list[Path]:
    """Writes the log of a node that starts and ticks; returns the files that are left."""
    signer = NotingSigner(RunSigner(ME, RUN_ID))
    header = Header(FORMAT, run_of().canonical().decode(), RUN_ID, ME.key, seed, REAL)
    events = EventFile(directory, signer, header, lambda: 7)
    node = Node(run_of(), RUN_ID, ME.key, signer, Random(seed))
    events.note(1.0, started(), node.handle(started(), 1.0))
    for number in range(ticks):
        events.note(2.0 + number, ev.Tick(), node.handle(ev.Tick(), 2.0 + number))
    events.close()
    return sorted(directory.glob("*.jsonl"))


def test_what_was_noted_is_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    events, signer = file_in(tmp_path)
    node = Node(run_of(), RUN_ID, ME.key, signer, Random("1"))
    events.note(1.0, started(), node.handle(started(), 1.0))
    assert replay(events.path).events == 1
    assert replay(events.path).difference == ""
    events.close()


def test_only_the_last_files_are_kept(tmp_path: Path) -> None:
    for _ in range(EVENT_FILES_KEPT + 2):
        file_in(tmp_path)[0].close()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        f"{number:08d}.jsonl" for number in range(3, EVENT_FILES_KEPT + 3)
    ]


def test_a_log_that_is_full_goes_on_in_another_file_and_any_of_them_replays_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "EVENTS_BYTES_MAX", 4_000)
    paths = written(tmp_path, ticks=200)
    assert 2 < len(paths) < EVENT_FILES_KEPT
    assert all(path.stat().st_size < 5_000 for path in paths[1:])
    other_life = written(tmp_path, ticks=1, seed="2")[-1]
    for path in paths:
        assert replay(path) == Replayed(events=201, lives=1, difference="")
    assert replay(other_life) == Replayed(events=2, lives=1, difference="")


def test_of_an_endless_log_the_newest_is_kept_and_a_replay_says_where_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "EVENTS_BYTES_MAX", 4_000)
    paths = written(tmp_path, ticks=1_500)
    assert len(paths) == EVENT_FILES_KEPT
    assert sum(path.stat().st_size for path in paths) < EVENT_FILES_KEPT * 5_000
    found = replay(paths[-1])
    assert found.unrepeated > 200
    assert found == Replayed(0, 0, "", found.unrepeated, begins_at=7)
    told = CliRunner().invoke(app, ["replay", str(paths[0])])
    assert told.exit_code == 0
    assert told.output == (
        f"begins at round 7 of a process whose start is gone: {found.unrepeated} events are readable, "
        "and cannot be repeated\n"
    )


def test_a_log_that_cannot_be_written_ends_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events").write_text("")
    events, _ = file_in(tmp_path / "events")
    events.note(1.0, ev.Tick(), [])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot write the event log" in caplog.text


@skipping_time
async def test_an_event_that_the_core_does_not_survive_is_noted(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:

        def answer(event: ev.Event) -> list[ev.Effect]:
            assert not isinstance(event, ev.PeerSeen), "too much"
            return []

        each.node.answer = answer
        each.driver.intake.give(ev.PeerSeen(PEER))
        with pytest.raises(ExceptionGroup):
            await each.driver.run(each.started)
        assert each.handled == [(each.started, []), (ev.PeerSeen(PEER), None)]
