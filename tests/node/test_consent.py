"""What a run asks is shown before anything is fetched, and the owner's answer is taken at a terminal alone."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from p2ptrain.config import NodeConfig, RunConfig, WorldConfig, load_run_config
from p2ptrain.config.node import StorageConfig
from p2ptrain.exact.outer import TAIL_BYTES
from p2ptrain.net import questions
from p2ptrain.node import consent
from p2ptrain.node.consent import (
    WATCH_SECONDS,
    RoundsSeen,
    ask,
    exchanged_bytes,
    messages_bytes,
    takes_part,
    terms_of,
    watch_rounds,
)
from p2ptrain.node.find import RunSources
from p2ptrain.node.home import Home
from p2ptrain.train.memory import PROCESS_BYTES, need_of
from p2ptrain.visible import count_of
from tests.helpers.core import KEYS
from tests.helpers.memory_network import Network
from tests.helpers.net import skipping_time

RUN = RunConfig.model_validate({"name": "tiny", "model": {"preset": "1m"}}).sealed(
    manifest="1" * 64, initial_root="2" * 64, founders=[KEYS[0].hex()]
)
RUN_ID = RUN.id
NEED = need_of(RUN)
ME, PEER = KEYS[:2]
ROOT = Path(__file__).parents[2]


def mine(directory: Path) -> NodeConfig:
    return NodeConfig(storage=StorageConfig(directory=str(directory)))


# ---------------------------------------------------------------------------------------------------
# What a run asks


def test_a_run_asks_for_what_its_model_and_its_members_take(tmp_path: Path) -> None:
    terms = terms_of(RUN, Home(mine(tmp_path)), 3, RoundsSeen(2, 5.0))
    assert [*terms] == ["run", "model", "memory", "disk", "traffic", "at first"]
    assert terms["run"] == f"tiny, {RUN.run_id}"
    assert terms["model"] == f"1m (builtin), {NEED.parameters:,} parameters"
    assert "MB of main memory, " in terms["memory"] and terms["memory"].endswith(" are free")
    assert " MB, and data as far as there is room; " in terms["disk"]
    hourly = 3_600 / 2.5 * (exchanged_bytes(NEED, 4) + messages_bytes(RUN, 4))
    assert terms["traffic"] == (
        f"about {count_of(hourly)} an hour each way: 3 contributions of {NEED.payload:,} bytes and 3.6 KB of messages "
        "in a round of 2.5 s"
    )
    assert terms["at first"] == f"{count_of(NEED.state)} of weights are fetched, and data as it is needed"


def test_a_run_of_own_data_says_what_leaves_the_machine(tmp_path: Path) -> None:
    raw = {**RUN.model_dump(), "data": {"source": "own", "manifest": "1" * 64}}
    raw["admission"] |= {"policy": "allowlist", "keys": (KEYS[0].hex(),)}
    terms = terms_of(RunConfig.model_validate(raw), Home(mine(tmp_path)), 3, None)
    assert terms["data"] == "your own, of which nothing is sent; but contributions, which are sent, are made of it"
    assert terms["audits"] == (
        "none: nobody can tell whether members train, because nobody else has the data behind a contribution"
    )
    assert " MB, and held-out data as far as there is room" in terms["disk"]
    assert terms["at first"].endswith(" of weights are fetched, and held-out data as it is needed")


def test_an_open_run_without_audits_says_that_whoever_joins_counts(tmp_path: Path) -> None:
    few = RUN.model_copy(update={"recipe": RUN.recipe.model_copy(update={"local_steps": 1})})
    count = few.recipe.round_sequences
    assert terms_of(few, Home(mine(tmp_path)), 3, None)["audits"] == (
        f"none: nobody can tell whether members train, because a contribution is made of {count} sequences, and "
        "32 are needed, and whoever joins counts at once"
    )


@pytest.mark.parametrize(
    ("seen", "begins", "ends"),
    [
        (None, "about ", "; how long rounds take is not known yet"),
        (RoundsSeen(0, 5.04), "less than ", " in a round of more than 5 s"),
        (RoundsSeen(1, 5.0), "about ", " in a round of 5.0 s"),
    ],
)
def test_traffic_says_what_is_measured_and_what_is_not(seen: RoundsSeen | None, begins: str, ends: str) -> None:
    text = consent.traffic_text(RUN, NEED, 1, seen)
    assert text.startswith(begins) and text.endswith(ends)
    assert ("an hour" in text) == (seen is not None)
    assert f": 1 contribution of {NEED.payload:,} bytes and " in text


@pytest.mark.parametrize(("nodes", "measured"), [(4, 4_446), (8, 9_371), (16, 22_976), (24, 32_555)])
def test_messages_are_estimated_as_daemons_were_measured(nodes: int, measured: int) -> None:
    assert 0.6 < messages_bytes(RUN, nodes) / measured < 1.1  # benchmarks/README.md, tiny models


def test_traffic_is_that_of_the_most_who_may_contribute() -> None:
    most = RUN.admission.contributors_max - 1
    assert f": {most:,} contributions of" in consent.traffic_text(RUN, NEED, 65_536, None)
    assert ": 1 contribution of" in consent.traffic_text(RUN, NEED, 0, None)  # nobody has said how many there are


# ---------------------------------------------------------------------------------------------------
# The pace of a run


def peer_in_round(network: Network, began: float, seconds: float) -> questions.Runs:
    number = int((asyncio.get_running_loop().time() - began) / seconds)
    return questions.Runs((questions.RunInfo(RUN_ID, "tiny", 100 + number, 3),))


@skipping_time
async def test_rounds_are_counted_for_some_seconds() -> None:
    network = Network(latency_seconds=0.01)
    me, peer = network.transport(ME), network.transport(PEER)
    began = asyncio.get_running_loop().time()
    await questions.serve(peer, lambda who, question: peer_in_round(network, began, 2.0))
    await me.connect(network.address(PEER))
    seen = await watch_rounds(me, RunSources((), [PEER]), RUN_ID)
    assert seen is not None
    assert (seen.rounds, seen.seconds) == (2, pytest.approx(WATCH_SECONDS, abs=0.2))
    assert await watch_rounds(me, RunSources((), [PEER]), bytes(32)) is None  # it is in another run
    assert await watch_rounds(me, RunSources((), []), RUN_ID) is None
    await peer.close()
    assert await watch_rounds(me, RunSources((), [PEER]), RUN_ID) is None
    await me.close()


@skipping_time
async def test_without_a_terminal_the_log_says_it_in_one_line_and_nobody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consent, "is_at_terminal", lambda: False)
    network = Network()
    me = network.transport(ME)
    sources = RunSources((), [PEER], questions.RunInfo(RUN_ID, "tiny", 7, 3))
    before = asyncio.get_running_loop().time()
    with caplog.at_level(logging.INFO, "p2ptrain.node"):
        assert await takes_part(me, RUN, sources, Home(mine(tmp_path)), asks=True)
        assert await takes_part(me, RUN, sources, Home(mine(tmp_path)), asks=False)
    assert asyncio.get_running_loop().time() == before
    first, again = (record.getMessage() for record in caplog.records)
    assert first == again
    assert first.startswith(f"what the run asks: run tiny, {RUN.run_id}; model 1m (builtin), ")
    assert "3 contributions" in first and "\n" not in first
    caplog.clear()
    directory = Home(mine(tmp_path)).of_run(RUN_ID)
    directory.mkdir(parents=True)
    (directory / "run.json").write_bytes(RUN.canonical())
    with caplog.at_level(logging.INFO, "p2ptrain.node"):
        assert await takes_part(me, RUN, sources, Home(mine(tmp_path)), asks=True)
    assert caplog.records == []  # it has taken part before
    await me.close()


# ---------------------------------------------------------------------------------------------------
# The question


class Person:
    """A person at a terminal, who gives each answer when the question is asked."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self.seen = b""

    def hears(self, *answers: bytes) -> bool:
        thread = threading.Thread(target=self._answer, args=answers)
        thread.start()
        try:
            return ask("table\n", self.theirs, self.theirs)
        finally:
            thread.join()

    def _answer(self, *answers: bytes) -> None:
        for number, answer in enumerate(answers, start=1):
            while self.seen.count(consent.QUESTION) < number:
                self.seen += os.read(self.ours, 4_096)
            os.write(self.ours, answer)

    def sees_at_last(self) -> bytes:
        os.write(self.theirs, b"the end")
        while not self.seen.endswith(b"the end"):
            self.seen += os.read(self.ours, 4_096)
        return self.seen

    def close(self) -> None:
        for each in (self.ours, self.theirs):
            with suppress(OSError):
                os.close(each)


@pytest.fixture
def person() -> Iterator[Person]:
    made = Person()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answers", "takes"),
    [
        ([b"\n"], True),
        ([b"y\n"], True),
        ([b" YES \n"], True),
        ([b"n\n"], False),
        ([b"No\n"], False),
        ([b"\x04"], False),  # Ctrl-D
        ([b"what?\n", b"\xff\n", b"n\n"], False),
        ([b"perhaps\n", b"\n"], True),
    ],
)
def test_an_answer_is_yes_or_no_and_what_is_neither_is_asked_again(
    person: Person, answers: list[bytes], takes: bool
) -> None:
    assert person.hears(*answers) is takes
    assert person.seen.startswith(b"table\r\n" + consent.QUESTION)
    assert (consent.DECLINED.strip() in person.sees_at_last()) is not takes


def test_what_was_typed_before_the_question_is_no_answer(person: Person) -> None:
    os.write(person.ours, b"y\n\n")
    assert not person.hears(b"n\n")


@skipping_time
async def test_a_terminal_that_is_gone_takes_part_in_nothing(
    tmp_path: Path, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = Network().transport(ME)
    monkeypatch.setattr(consent, "is_at_terminal", lambda: True)
    os.close(person.ours)
    monkeypatch.setattr(consent, "ask", lambda table: ask(table, person.theirs, person.theirs))
    assert not await takes_part(me, RUN, RunSources((), []), Home(mine(tmp_path)), asks=True)
    await me.close()


IN_FRONT_AND_BEHIND = """
import fcntl, os, sys, termios
from p2ptrain.node.consent import is_at_terminal
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
in_front = is_at_terminal()
if (behind := os.fork()) == 0:
    os.setpgid(0, 0)  # as a shell does with what it runs in the background
    os._exit(is_at_terminal())
_, status = os.waitpid(behind, 0)
os._exit(0 if in_front and status == 0 else 1)
"""


def test_only_who_is_in_front_at_a_terminal_is_asked(person: Person) -> None:
    assert not consent.is_at_terminal()  # as a test runs
    done = subprocess.run(
        [sys.executable, "-c", IN_FRONT_AND_BEHIND], stdin=person.theirs, stdout=person.theirs, check=False, cwd=ROOT
    )
    assert done.returncode == 0


def test_the_page_shows_what_is_asked(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/join-from-home.md").read_text()
    run = load_run_config(ROOT / "examples/tiny.toml").sealed(
        manifest="1" * 64, initial_root="2" * 64, founders=[KEYS[0].hex()]
    )
    shown = terms_of(run, Home(mine(tmp_path)), 3, RoundsSeen(2, 5.0))
    for what in ("model", "traffic", "at first"):
        assert f"\n{what:<{consent.WIDTH}}  {shown[what]}\n" in page


def test_a_region_tells_that_a_second_run_is_joined_and_what_that_takes(tmp_path: Path) -> None:
    region = RUN.model_copy(update={"world": WorldConfig(run="ab" * 32)})
    terms, alone = (terms_of(run, Home(mine(tmp_path)), 3, None) for run in (region, RUN))
    assert terms["world"] == f"also a node in run {'ab' * 32}, of which this run is a region"
    assert "world" not in alone
    need, without = need_of(region), need_of(RUN)
    assert need.main("cpu") - without.main("cpu") > PROCESS_BYTES, "the world node is a process of its own"
    assert "the world's run" in need.formula("cpu")
    assert need.payload == without.payload + TAIL_BYTES
