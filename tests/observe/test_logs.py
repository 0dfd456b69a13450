"""The daemon's log: a reader that stalls does not block the node, and control characters are removed."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from p2ptrain.observe import logs
from p2ptrain.observe.logs import LINE_MAX, LINES_MAX, JsonText, PlainText, QueuedLines, TimedText, Unbuffered, plain

LINES = 3_000  # more than a pipe takes, or a queue
CHILD = """
import logging, os, sys
from p2ptrain.config import LoggingConfig
from p2ptrain.observe import logs
from p2ptrain.observe.progress import ProgressLine
from p2ptrain.observe.schema import Status

STATUS = Status.model_construct(
    round=1, phase="collect", loss=None, peers=[], roster=[], tokens_per_second=0.0,
    bytes={{}}, state_root="", complaints=[], applied_round=1,
)
logs.set_up(LoggingConfig(format="{form}"))
progress = ProgressLine("{form}", lambda: STATUS)
progress.start()
log = logging.getLogger("p2ptrain.daemon")
for number in range({lines}):
    log.info("line %d %s", number, "x" * 100)
    progress.tell()
log.error("the last")
print("went on", flush=True)
{then}
"""


@contextmanager
def child(form: str, then: str, stderr: int, lines: int = LINES) -> Iterator[subprocess.Popen[str]]:
    """Starts a child process that is killed at the end."""
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD.format(form=form, then=then, lines=lines)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**usual, "TERM": "xterm"},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


class Target(logging.Handler):
    """A handler that blocks until the test lets it continue."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting, self.is_open = threading.Event(), threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.is_waiting.set()
        assert self.is_open.wait(60)
        self.lines.append(self.format(record))


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.is_open.set()


def say(writer: QueuedLines, text: str, *arguments: object) -> None:
    writer.handle(logging.LogRecord("p2ptrain", logging.INFO, "", 0, text, arguments, None))


# ---------------------------------------------------------------------------------------------------
# A reader that stops reading


def test_what_nobody_takes_is_dropped_and_counted(target: Target) -> None:
    writer = QueuedLines(target)
    say(writer, "line 0")
    assert target.is_waiting.wait(60)
    for number in range(1, LINES):
        say(writer, "line %d", number)
    target.is_open.set()
    writer.flush()
    kept = [line for line in target.lines if line.startswith("line ")]
    assert kept == [f"line {number}" for number in range(LINES_MAX + 1)]
    assert [line for line in target.lines if line not in kept] == [
        f"{LINES - len(kept)} lines were dropped, because the reader of the log did not keep up"
    ]
    say(writer, "again")
    writer.flush()
    assert target.lines[-1] == "again"


def test_what_is_said_later_does_not_change_what_was_said_before(target: Target) -> None:
    writer, changing = QueuedLines(target), ["then"]
    say(writer, "it was %s", changing)
    changing[0] = "now"
    target.is_open.set()
    writer.flush()
    assert target.lines == ["it was ['then']"]


def test_waiting_for_a_reader_has_an_end(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.01)
    writer = QueuedLines(target)
    say(writer, "a")
    writer.flush()
    for _ in range(LINES):
        say(writer, "b")
    writer.flush()
    assert target.lines == []


def test_a_reader_that_has_gone_ends_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    lines = logs.LineHandler(Unbuffered(write))
    lines.setFormatter(TimedText())
    writer = QueuedLines(lines)
    for _ in range(3):
        say(writer, "a")
    writer.flush()
    os.close(write)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_node_goes_on_when_nobody_reads_and_all_that_fits_is_there_for_who_does(form: str) -> None:
    with child(form, "sys.stdin.read()", subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "went on\n"
        _, err = process.communicate()
    found = err.splitlines()
    assert process.returncode == 0
    assert sum("line " in each for each in found) > LINES_MAX
    assert ("line 0 " in found[0], "lines were dropped" in err) == (True, True)
    if form == "json":
        assert {json.loads(each)["level"] for each in found} == {"info", "warning"}


@pytest.mark.parametrize(("then", "status"), [("", 0), ("raise ValueError('an error that ends it')", 1)])
def test_what_is_said_last_comes_out(then: str, status: int) -> None:
    with child("text", then, subprocess.PIPE, lines=10) as process:
        _, err = process.communicate()
    assert process.returncode == status
    assert [line[9:] for line in err.splitlines() if "the last" in line] == ["error: the last"]
    assert ("an error that ends it" in err) == bool(status)


def test_a_node_whose_lines_nobody_reads_can_end() -> None:
    read, write = os.pipe()
    with child("text", "logs.FLUSH_SECONDS = 0.1", write) as process:
        assert process.communicate() == ("went on\n", None)
    assert process.returncode == 0
    os.close(read)
    os.close(write)


def test_a_node_goes_on_and_can_end_when_its_terminal_takes_nothing() -> None:
    ours, its = pty.openpty()
    with child("auto", "logs.FLUSH_SECONDS = 0.1; progress.stop()", its) as process:
        assert process.communicate() == ("went on\n", None)
    assert process.returncode == 0
    os.close(its)
    os.close(ours)


def test_on_a_terminal_all_is_shown_in_order_and_the_line_goes() -> None:
    ours, its = pty.openpty()
    shown = bytearray()

    def read() -> None:
        while chunk := os.read(ours, 65_536):
            shown.extend(chunk)
            if b"the end of it" in chunk:
                return

    reading = threading.Thread(target=read)
    reading.start()
    with child("auto", "progress.stop(); os.write(2, b'the end of it')", its, lines=5) as process:
        assert process.communicate() == ("went on\n", None)
    reading.join(60)
    text = shown.decode()
    said = ("line \x1b[1;36m0", "line \x1b[1;36m4", "ERROR", "the last", "the end of it")  # rich colours numbers
    places = [text.index(each) for each in said]
    assert places == sorted(places)
    assert "round 1 collect" in text
    assert "\x1b[?25h" in text[text.index("the last") :]  # the cursor is back
    assert text.endswith("\x1b[2K" + "the end of it")  # in place of the line
    os.close(its)
    os.close(ours)


# ---------------------------------------------------------------------------------------------------
# What a terminal must not obey


def test_what_a_peer_makes_us_write_is_neither_endless_nor_obeyed_by_a_terminal() -> None:
    record = logging.LogRecord("p2ptrain", logging.WARNING, "", 0, "a\x1b[2J\r%s", ("x" * 10_000,), None)
    for form in (PlainText(), TimedText(), JsonText()):
        text = form.format(record)
        assert len(text) < LINE_MAX + 200
        assert "\x1b" not in text
        assert "\\u001b" not in text
        assert "\r" not in text
    assert TimedText().format(record)[8:].startswith(" warning: a?[2J?xxx")


def test_the_end_of_a_long_traceback_is_kept(target: Target) -> None:
    def even(depth: int) -> int:  # two by turns: frames that repeat are left out
        return odd(depth - 1) if depth else int("a word")

    def odd(depth: int) -> int:
        return even(depth - 1)

    with pytest.raises(ValueError) as raised:
        even(100)
    info = raised.type, raised.value, raised.tb
    target.setFormatter(PlainText())
    target.is_open.set()
    writer = QueuedLines(target)
    writer.handle(logging.LogRecord("p2ptrain", logging.ERROR, "", 0, "a %s", ("bug",), info))
    writer.flush()
    (text,) = target.lines
    assert text.startswith("a bug\n")
    assert text.endswith("ValueError: invalid literal for int() with base 10: 'a word'")
    assert len(text) == len("a bug\n") + LINE_MAX


def test_no_control_character_and_none_that_turns_the_writing_is_left() -> None:
    controls = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0))]
    turning = [chr(each) for each in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))]
    assert plain("".join(controls)) == "?" * 10 + "\n" + "?" * (len(controls) - 11)
    assert plain("".join(turning)) == "?" * len(turning)
    words = "12 peers · naïve, 節點, ελληνικά, עברית 🙂"
    assert plain(words) == words


def test_a_json_line_is_read_by_people_too_and_obeyed_by_no_terminal() -> None:
    record = logging.LogRecord("p2ptrain", logging.INFO, "x", 1, "round 3 · ß %s", ("\x1b]0;\x07\x9b\u202e\n",), None)
    line = JsonText().format(record)
    assert "round 3 · ß" in line
    assert json.loads(line)["message"] == "round 3 · ß ?]0;???\n"
    assert line.isprintable()
