"""The event log is complete after a node crashed, and after one hung and was killed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.journal import Journal
from p2ptrain.core.node import Node
from p2ptrain.core.state import genesis
from p2ptrain.identity import Identity, RunSigner
from p2ptrain.node.event_log import FILES_KEPT, EventFile
from p2ptrain.replay import FORMAT, REAL, Header, NotingSigner, replay
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


def test_what_was_noted_is_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    events, signer = file_in(tmp_path)
    node = Node(run_of(), RUN_ID, ME.key, signer, Random("1"))
    events.note(1.0, started(), node.handle(started(), 1.0))
    assert replay(events.path).events == 1
    assert replay(events.path).difference == ""
    events.close()


def test_only_the_last_files_are_kept(tmp_path: Path) -> None:
    for _ in range(FILES_KEPT + 2):
        file_in(tmp_path)[0].close()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"{number:08d}.jsonl" for number in (3, 4, 5)]


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
        each.driver.give(ev.PeerSeen(PEER))
        with pytest.raises(ExceptionGroup):
            await each.driver.run(each.started)
        assert each.handled == [(each.started, []), (ev.PeerSeen(PEER), None)]
