"""Figures of rounds: JSON lines, TensorBoard files (by known values and its own reader), and that nothing blocks."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.observe.schema import RoundRecord
from p2ptrain.observe.tracking import WAITING_MAX, TensorBoard, Tracking, line_of, tracked_of
from tests.helpers.daemons import TEST_SECONDS, p2ptrain, swarm_in
from tests.helpers.memory_swarm import swarm as memory_swarm
from tests.helpers.net import skipping_time
from tests.helpers.records import RUN, a_round

pytestmark_extra = [
    pytest.mark.tensorboard,
    pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the [tensorboard] extra"),
    pytest.mark.filterwarnings("default"),  # its own imports warn of each other
]


def with_tensorboard(test: Any) -> Any:
    for mark in pytestmark_extra:
        test = mark(test)
    return test


class Listing:
    """A tracker that writes the records to a file."""

    def __init__(self, directory: Path, run: RunConfig = RUN) -> None:
        self.directory = directory

    def write(self, record: RoundRecord) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "rounds").open("a") as file:
            file.write(f"{record.round}\n")

    def close(self) -> None: ...

    def kill(self) -> None: ...


def listed(directory: Path) -> list[int]:
    return [*map(int, (directory / "rounds").read_text().split())]


def test_the_figures_of_a_round_are_its_records() -> None:
    found = tracked_of(a_round(3, refused={"late": 1, "bad payload": 2}))
    assert found["mine/loss"] == 4.25
    assert (found["round/seconds"], found["round/train_seconds"], found["round/refused"]) == (8.0, 4.0, 3.0)
    assert (found["bytes/sent"], found["bytes/received"], found["round/contributors"]) == (1_000.0, 2_000.0, 2.0)
    assert (found["mine/tokens_so_far"], found["round/swarm_tokens_so_far"]) == (192.0, 576.0)
    assert (found["round/update_norm"], found["round/staleness"]) == (1.25, 0.5)
    assert "mine/loss" not in tracked_of(a_round(3, loss=None))


def test_the_lines_of_a_run_are_its_figures_and_a_figure_that_is_none_is_null() -> None:
    for each in (a_round(1), a_round(2, loss=float("nan"))):
        line = line_of(each)
        assert "NaN" not in line
        told = {
            "round": each.round,
            "branch": each.branch.hex(),
            "root": each.root.hex(),
            "applied_at": each.applied_at,
        }
        figures = {name: value if math.isfinite(value) else None for name, value in tracked_of(each).items()}
        assert json.loads(line) == told | figures


def test_figures_of_before_keep_their_names() -> None:
    """Renaming a figure would break its users' charts."""
    assert tracked_of(a_round(1)).keys() >= {
        "round/seconds", "round/train_seconds", "round/collect_seconds", "round/agree_seconds", "round/apply_seconds",
        "round/contributors", "round/tries", "round/late", "round/refused", "bytes/sent", "bytes/received",
        "mine/taken", "mine/tokens", "mine/loss", "mine/tokens_per_second", "mine/tokens_so_far",
        "round/swarm_tokens_so_far", "round/update_norm", "round/staleness",
    }  # fmt: skip
    untrained = tracked_of(a_round(1, loss=None, tokens=0, tokens_per_second=0.0))
    assert not {"mine/loss", "mine/tokens_per_second"} & untrained.keys()


def test_a_slow_disk_costs_figures_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, write = threading.Event(), Listing.write

    def slow(self: Listing, record: Any) -> None:
        released.wait(60)
        write(self, record)

    monkeypatch.setattr(Listing, "write", slow)
    made = Tracking(Listing(tmp_path))
    try:
        with caplog.at_level(logging.WARNING, "p2ptrain.observe"):
            for number in range(WAITING_MAX + 5):
                made.note(a_round(number % 200 + 1))
        assert made.lost == 5
        assert caplog.text.count("not tracked") == 1
    finally:
        released.set()
        made.close()
    assert len(listed(tmp_path)) == WAITING_MAX


def test_a_disk_that_takes_nothing_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    made = Tracking(Listing(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "p2ptrain.observe"):
        made.note(a_round(1))
        made.note(a_round(2))
        is_written = threading.Event()
        made.jobs.put(is_written.set)
        assert is_written.wait(TEST_SECONDS)
    assert made.lost == 2
    assert caplog.text.count("not tracked") == 1
    (tmp_path / "file").unlink()
    made.note(a_round(3))
    made.close()
    assert listed(tmp_path / "file") == [3]


def test_a_file_server_that_is_away_does_not_keep_a_node_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorBoard's files have no process that could be killed."""
    for name in ("CLOSE_SECONDS", "KILL_SECONDS"):
        monkeypatch.setattr(f"p2ptrain.observe.tracking.{name}", 0.1)
    released, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(Listing, "write", lambda *_: released.wait(TEST_SECONDS))
    monkeypatch.setattr(Listing, "close", lambda _: ended.set())
    made = Tracking(Listing(tmp_path))
    made.note(a_round(1))
    [thread] = [each for each in threading.enumerate() if each.name.startswith("tracking")]
    try:
        made.close()
        assert thread.is_alive() and thread.daemon, "Python would wait for it"
        assert "took too long" in caplog.text
    finally:
        released.set()
    assert ended.wait(TEST_SECONDS)
    thread.join(TEST_SECONDS)


@skipping_time
async def test_each_new_round_of_a_node_is_heard_of(tmp_path: Path) -> None:
    heard: list[int] = []
    async with memory_swarm(tmp_path / "swarm", (lambda record: heard.append(record.round),)) as made:
        await made.reach(6)
        rounds = made.nodes[0].daemon.records
        assert heard == [*range(heard[0], heard[-1] + 1)]
        assert len(heard) >= 4
        assert [record.round for record in rounds.last(len(heard))] == heard


@pytest.mark.timeout(TEST_SECONDS)
def test_a_real_daemon_is_tracked_and_reported(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        node = swarm.first().start().until_up()
        node.until_applied(4)
        node.leave()
        page = tmp_path / "page.html"
        assert p2ptrain("report", "--data-dir", node.directory, "--out", page)[0] == 0
        recorded = int(re.findall(r"([0-9,]+) recorded, 1 to", page.read_text())[0])
        assert recorded >= 4
        assert "NOT as agreed" not in page.read_text()
        assert "as agreed" in page.read_text()
        assert p2ptrain("report", "--data-dir", node.directory, "--jsonl", "--out", tmp_path / "lines")[0] == 0
        lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
        assert len(lines) == recorded
        assert all(re.fullmatch("[0-9a-f]{64}", each["root"]) and each["mine/loss"] > 0 for each in lines[1:])


@with_tensorboard
def test_a_round_that_tensorboard_cannot_write_costs_that_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import tensorboard.summary.writer.record_writer as framed

    def other(file: Any) -> None:
        raise TypeError("another release")

    made = Tracking(TensorBoard(tmp_path, RUN))
    made.note(a_round(1))
    with monkeypatch.context() as changed, caplog.at_level(logging.WARNING, "p2ptrain.observe"):
        is_written = threading.Event()
        made.jobs.put(is_written.set)
        assert is_written.wait(TEST_SECONDS)
        changed.setattr(framed, "RecordWriter", other)
        made.note(a_round(2))
        is_written = threading.Event()
        made.jobs.put(is_written.set)
        assert is_written.wait(TEST_SECONDS)
    assert "not tracked: another release" in caplog.text
    made.note(a_round(3).model_copy(update={"applied_at": 1.8e9}))
    made.close()
    assert (made.lost, len([*the_file_directory(tmp_path).iterdir()])) == (1, 2), (
        "a file that may end amid an event is left"
    )


@with_tensorboard
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = Tracking(TensorBoard(tmp_path, RUN))
    rounds = [a_round(number).model_copy(update={"round": number * 1_000}) for number in range(1, 6)]
    for each in rounds:
        made.note(each)
    made.close()
    again = Tracking(TensorBoard(tmp_path, RUN))  # the node was started again
    again.note(a_round(6).model_copy(update={"round": 6_000, "applied_at": 1.8e9}))
    again.close()
    read = EventAccumulator(str(the_file_directory(tmp_path)))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(tracked_of(rounds[0]))
    found = [(each.step, each.wall_time, each.value) for each in read.Scalars("mine/loss")]
    assert found == [(each.round, each.applied_at, each.loss) for each in rounds] + [(6_000, 1.8e9, 3.5)]
    assert [each.value for each in read.Scalars("mine/tokens_so_far")] == [64.0 * number for number in range(1, 7)]
    assert [each.value for each in read.Scalars("round/update_norm")] == [1.25] * 6


def test_without_its_package_a_directory_for_tensorboard_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"tracking\.tensorboard.*needs tensorboard.*pip install 'p2ptrain\[tensorboard\]'"
    ):
        TensorBoard(tmp_path, RUN)


def the_file_directory(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path
