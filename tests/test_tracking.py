"""Figures of rounds: as JSON lines, for TensorBoard (by known values and its own reader), and that nothing waits."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemon_known import TEST_SECONDS, p2ptrain, swarm_in
from net_known import skipping_time
from test_memory_swarm import swarm as memory_swarm
from test_report import RUN, a_round

from p2ptrain.daemon import tensorboard, tracking
from p2ptrain.daemon.tensorboard import TensorBoard, crc32c, event_of, framed
from p2ptrain.daemon.tracking import FIGURES_NAME, OLD_FIGURES_NAME, WAITING_MAX, JsonLines, Tracking, figures_of


def events_in(path: Path) -> list[bytes]:
    """The records of a file, their lengths and checksums compared."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = content[12 : 12 + length]
        assert content[: 16 + length] == framed(event)
        found.append(event)
        content = content[16 + length :]
    return found


def the_file(directory: Path) -> Path:
    (path,) = directory.glob("*/events.out.tfevents.*")
    return path


def test_the_checksum_is_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the catalogues
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(bytes([0xFF] * 32)) == 0x62A8AB43
    assert crc32c(b"") == 0


def test_an_event_is_the_protobuf_that_tensorboard_reads() -> None:
    assert event_of(1.0, 300, [("a", 2.0)]).hex() == (
        "09"
        + struct.pack("<d", 1.0).hex()
        + "10ac02"
        + "2a0a"
        + "0a08"
        + "0a0161"
        + "15"
        + struct.pack("<f", 2.0).hex()
    )
    assert event_of(1.0, 1, [("a", float("nan")), ("b", float("inf"))]).endswith(b"\x2a\x00")


def test_the_figures_of_a_round_are_its_records() -> None:
    found = figures_of(a_round(3, refused={"late": 1, "bad payload": 2}))
    assert found["mine/loss"] == 4.25
    assert (found["round/seconds"], found["round/train_seconds"], found["round/refused"]) == (8.0, 4.0, 3.0)
    assert (found["bytes/sent"], found["bytes/received"], found["round/contributors"]) == (1_000.0, 2_000.0, 2.0)
    assert "mine/loss" not in figures_of(a_round(3, loss=None))


def test_rounds_are_appended_to_one_file_of_the_run(tmp_path: Path) -> None:
    made = Tracking(TensorBoard(tmp_path / "not yet", RUN))
    for number in range(1, 6):
        made.note(a_round(number))
    made.close()
    path = the_file(tmp_path / "not yet")
    assert path.parent.name == f"my-run-{RUN.run_id[:8]}"
    first, *rest = events_in(path)
    assert first.endswith(b"brain.Event:2")
    assert len(rest) == 5
    assert made.lost == 0


def lines_in(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / FIGURES_NAME).read_text().splitlines()]


def test_each_round_is_a_line_of_json_also_over_starts(tmp_path: Path) -> None:
    rounds = [a_round(number) for number in range(1, 6)]
    for part in (rounds[:3], rounds[3:]):
        made = Tracking(JsonLines(tmp_path))
        for each in part:
            made.note(each)
        made.close()
        assert made.lost == 0
    assert lines_in(tmp_path) == [
        {
            "round": each.round,
            "branch": each.branch.hex(),
            "root": each.root.hex(),
            "applied_at": each.applied_at,
            **figures_of(each),
        }
        for each in rounds
    ]


def test_a_figure_that_is_none_is_null_in_json(tmp_path: Path) -> None:
    JsonLines(tmp_path).write(a_round(1, loss=float("nan")))
    (line,) = lines_in(tmp_path)
    assert line["mine/loss"] is None
    assert "NaN" not in (tmp_path / FIGURES_NAME).read_text()


def test_a_line_that_was_cut_short_goes_and_takes_no_other_with_it(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path)
    writer.write(a_round(1))
    (tmp_path / FIGURES_NAME).write_bytes((tmp_path / FIGURES_NAME).read_bytes()[:-40])
    writer.write(a_round(2))
    writer.write(a_round(3))
    assert [each["round"] for each in lines_in(tmp_path)] == [2, 3]
    (tmp_path / FIGURES_NAME).write_bytes((tmp_path / FIGURES_NAME).read_bytes()[:-1])
    writer.write(a_round(4))
    assert [each["round"] for each in lines_in(tmp_path)] == [2, 4]


def test_the_lines_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JsonLines(tmp_path)
    writer.write(a_round(1))
    monkeypatch.setattr(tracking, "FIGURES_BYTES_MAX", 3 * (tmp_path / FIGURES_NAME).stat().st_size)
    for number in range(2, 11):
        writer.write(a_round(number))
    old = [json.loads(line)["round"] for line in (tmp_path / OLD_FIGURES_NAME).read_text().splitlines()]
    assert [*old, *(each["round"] for each in lines_in(tmp_path))] == [*range(7, 11)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([FIGURES_NAME, OLD_FIGURES_NAME])


def test_what_is_no_file_is_not_written_to_and_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / FIGURES_NAME)
    made = Tracking(JsonLines(tmp_path))
    with caplog.at_level(logging.WARNING, "p2ptrain.daemon"):
        made.note(a_round(1))
        made.close()
    assert made.lost == 1
    assert "figures.jsonl is no file; this is said once" in caplog.text


def test_where_the_older_lines_cannot_be_put_aside_no_more_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / OLD_FIGURES_NAME).mkdir()
    made = Tracking(JsonLines(tmp_path))
    monkeypatch.setattr(tracking, "FIGURES_BYTES_MAX", 1_000)
    for number in range(1, 9):
        made.note(a_round(number))
    made.close()
    assert made.lost == 8 - len(lines_in(tmp_path)) > 0


def test_a_slow_disk_costs_figures_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, write = threading.Event(), TensorBoard.write

    def slow(self: TensorBoard, record: Any) -> None:
        released.wait(60)
        write(self, record)

    monkeypatch.setattr(TensorBoard, "write", slow)
    made = Tracking(TensorBoard(tmp_path, RUN))
    try:
        with caplog.at_level(logging.WARNING, "p2ptrain.daemon"):
            for number in range(WAITING_MAX + 5):
                made.note(a_round(number % 200 + 1))
        assert made.lost == 5
        assert caplog.text.count("not tracked") == 1
    finally:
        released.set()
        made.close()
    assert len(events_in(the_file(tmp_path))) == WAITING_MAX + 1


def test_a_disk_that_takes_nothing_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    made = Tracking(TensorBoard(tmp_path / "file", RUN))
    with caplog.at_level(logging.WARNING, "p2ptrain.daemon"):
        made.note(a_round(1))
        made.note(a_round(2))
        made._thread.submit(lambda: None).result()
    assert made.lost == 2
    assert caplog.text.count("not tracked") == 1
    (tmp_path / "file").unlink()
    made.note(a_round(3))
    made.close()
    assert len(events_in(the_file(tmp_path / "file"))) == 2


@skipping_time
async def test_each_new_round_of_a_node_is_tracked(tmp_path: Path) -> None:
    async with memory_swarm(tmp_path / "swarm") as made:
        await made.reach(2)
        heard: list[int] = []
        rounds = made.nodes[0].daemon.rounds
        rounds.on_round.append(lambda record: heard.append(record.round))
        await made.reach(made.newest + 4)
        assert heard == [*range(heard[0], heard[-1] + 1)]
        assert len(heard) >= 4
        assert [record.round for record in rounds.last(len(heard))] == heard


@pytest.mark.timeout(TEST_SECONDS)
def test_a_real_daemon_is_tracked_watched_and_reported(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        node = swarm.first(P2PTRAIN_TRACKING__TENSORBOARD=str(tmp_path / "figures")).start().until_up()
        node.until_applied(4)
        status, out, err = p2ptrain("top", "--data-dir", node.directory)
        assert (status, err) == (0, "")
        for part in ("test  round ", "nats a token", "root", "of the time", "loss "):
            assert part in out, out
        node.leave()
        page = tmp_path / "page.html"
        assert p2ptrain("report", "--data-dir", node.directory, "--out", page)[0] == 0
        recorded = int(re.findall(r"([0-9,]+) recorded, 1 to", page.read_text())[0])
        assert recorded >= 4
        assert "NOT as agreed" not in page.read_text()
        assert "as agreed" in page.read_text()
        assert len(events_in(the_file(tmp_path / "figures"))) == recorded + 1
        lines = lines_in(next((node.directory / "runs").iterdir()))  # which nobody has asked for
        assert len(lines) == recorded
        assert all(re.fullmatch("[0-9a-f]{64}", each["root"]) and each["mine/loss"] > 0 for each in lines[1:])


@pytest.mark.tensorboard
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the [tensorboard] extra")
@pytest.mark.filterwarnings("default")  # its own imports warn of each other
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = Tracking(TensorBoard(tmp_path, RUN))
    rounds = [msgspec.structs.replace(a_round(number), round=number * 1_000) for number in range(1, 6)]
    for each in rounds:
        made.note(each)
    made.close()
    again = Tracking(TensorBoard(tmp_path, RUN))  # the node was started again
    again.note(msgspec.structs.replace(a_round(6), round=6_000, applied_at=1.8e9))
    again.close()
    read = EventAccumulator(str(the_file_directory(tmp_path)))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(figures_of(rounds[0]))
    found = [(each.step, each.wall_time, each.value) for each in read.Scalars("mine/loss")]
    assert found == [(each.round, each.applied_at, each.loss) for each in rounds] + [(6_000, 1.8e9, 3.5)]
    assert tensorboard.VERSION == b"brain.Event:2"


def the_file_directory(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path
