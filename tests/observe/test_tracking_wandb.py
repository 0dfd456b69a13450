"""Figures for Weights & Biases: with the wandb package, offline, and however its process ends."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.observe import tracking
from p2ptrain.observe.tracking import Tracking, WandbRun, tracked_of
from tests.helpers.daemons import TEST_SECONDS, swarm_in
from tests.helpers.records import RUN, a_round

SECONDS = 60  # within which a process starts or ends, also on a busy machine
with_wandb = [
    pytest.mark.wandb,
    pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the [wandb] extra"),
]
NODE = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.helpers.records import RUN, a_round
from p2ptrain.observe.tracking import Tracking
from p2ptrain.observe.tracking import WandbRun
made = Tracking(WandbRun(Path(sys.argv[1]), RUN))
made.note(a_round(1))
written = threading.Event()
made.jobs.put(written.set)
written.wait()
print(made._tracker.child.pid, flush=True)
sys.stdin.read()
"""


def wait_for(made: Tracking) -> None:
    """Waits until all that was handed in is written."""
    is_written = threading.Event()
    made.jobs.put(is_written.set)
    assert is_written.wait(SECONDS)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the child program, which needs wandb."""
    monkeypatch.setattr(tracking, "PROGRAM", tmp_path / "program.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    return tmp_path / "program.py"


def service_of(child: psutil.Process) -> psutil.Process:
    """Returns wandb's service process; processes that it starts earlier end at once."""
    while True:
        for each in child.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if each.name() == "wandb-core":
                    return each
        psutil.wait_procs([child], 0.05)


def rounds_in(directory: Path, project: str = f"my-run-{RUN.run_id[:8]}") -> list[dict[str, float]]:
    """Reads the only run in a directory with wandb's own reader."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    with closing(DataStore()) as store:
        store.open_for_scan(str(path))
        contents = [*iter(store.scan_data, None)]
    for content in contents:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append({name: value for name, value in items.items() if not name.startswith("_")})
        if record.WhichOneof("record_type") == "run":
            assert record.run.project == project
            assert {each.key: each.value_json for each in record.run.config.update if each.key != "_wandb"} == {
                "name": '"my-run"', "run_id": f'"{RUN.run_id}"',
            }  # fmt: skip
    return found


class TestWithWandb:
    pytestmark = with_wandb

    @pytest.mark.filterwarnings("default")  # its own imports warn
    def test_wandb_reads_what_was_written_and_nobody_was_called(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rounds = [a_round(1), a_round(2, loss=None), a_round(3, loss=float("nan")), a_round(2)]  # one is lived again
        with socket.create_server(("127.0.0.1", 0)) as proxy:  # whoever is called is called through it
            for name in ("HTTP_PROXY", "HTTPS_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
            made = Tracking(WandbRun(tmp_path / "not yet", RUN))
            for each in rounds:
                made.note(each)
            made.close()
            proxy.setblocking(False)
            with pytest.raises(BlockingIOError):
                proxy.accept()
        finite = [{name: value for name, value in tracked_of(each).items() if math.isfinite(value)} for each in rounds]
        assert rounds_in(tmp_path / "not yet") == [
            {"round": each.round, **figures} for each, figures in zip(rounds, finite, strict=True)
        ]
        assert made.lost == 0

    @pytest.mark.filterwarnings("default")
    def test_the_project_is_the_one_that_the_owner_names(self, tmp_path: Path) -> None:
        made = Tracking(WandbRun(tmp_path, RUN, "our models"))
        made.note(a_round(1))
        made.close()
        (told,) = rounds_in(tmp_path, "our models")
        assert (told["mine/tokens_so_far"], told["round/update_norm"], told["round/staleness"]) == (64, 1.25, 0.5)

    @pytest.mark.timeout(TEST_SECONDS)
    def test_a_real_daemon_has_written_its_rounds_when_it_ends(self, tmp_path: Path) -> None:
        with swarm_in(tmp_path) as swarm:
            node = (
                swarm.first(P2PTRAIN_TRACKING__WANDB=str(tmp_path / "figures"), P2PTRAIN_TRACKING__WANDB_PROJECT="ours")
                .start()
                .until_up()
            )
            node.until_applied(3)
            node.leave()
            assert "figures" not in node.text, "nothing was lost"
            content = b"".join(path.read_bytes() for path in tmp_path.glob("figures/wandb/offline-run-*/run-*.wandb"))
            assert content.count(b"mine/tokens_per_second") >= 3
            assert b"ours" in content

    def test_neither_the_process_nor_its_service_outlives_a_node_that_is_killed(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", NODE, str(tmp_path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
            assert node.stdout is not None
            child = psutil.Process(int(node.stdout.readline()))
            service = service_of(child)
            node.send_signal(signal.SIGKILL)
            _, alive = psutil.wait_procs([child, service], SECONDS)
            assert alive == []

    def test_a_service_that_died_costs_figures_and_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer = WandbRun(tmp_path, RUN)
        made = Tracking(writer)
        with caplog.at_level(logging.WARNING, "p2ptrain.observe"):
            made.note(a_round(1))
            wait_for(made)
            assert writer.child is not None
            child = psutil.Process(writer.child.pid)
            service_of(child).kill()
            made.close()
        assert not child.is_running()
        assert "may be lost" in caplog.text


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        WandbRun(tmp_path, RUN)
    fix = "Run: pip install 'p2ptrain[wandb]', or remove the key"
    assert (caught.value.key, caught.value.fix) == ("tracking.wandb", fix)


def test_a_process_that_ends_is_a_warning_in_its_own_words(
    tmp_path: Path, program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program.write_text("import sys\nsys.stdin.readline()\nsys.exit('no such thing\\n')\n")
    writer = WandbRun(tmp_path, RUN)
    made = Tracking(writer)
    with caplog.at_level(logging.WARNING, "p2ptrain.observe"):
        made.note(a_round(1))
        made.jobs.put(lambda: writer.child and writer.child.wait(SECONDS))
        wait_for(made)
        for number in range(2, 6):
            made.note(a_round(number))
        made.close()
    assert made.lost == 4
    assert caplog.text.count("not tracked: wandb ended: no such thing (logged only once)") == 1


def test_what_a_process_says_is_bounded_and_ends_with_its_last_words(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It writes 64 MB while no round ends, and then a long line."""
    program.write_text(
        "import os, sys\n"
        "sys.stdin.readline()\n"
        "for _ in range(1_024):\n"
        "    os.write(2, b'x' * 65_535 + b'\\n')\n"
        "open('all said', 'w').close()\n"
        "sys.stdin.readline()\n"
        "sys.exit('Y' * 65_536 + ' the end')\n"
    )
    monkeypatch.chdir(tmp_path)
    writer = WandbRun(tmp_path, RUN)
    made = Tracking(writer)
    with caplog.at_level(logging.WARNING, "p2ptrain.observe"):
        made.note(a_round(1))
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "all said").exists():
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        made.note(a_round(2))
        made.jobs.put(lambda: writer.child and writer.child.wait(SECONDS))
        wait_for(made)
        made.close()
    assert caplog.text.count("Y") == tracking.WORDS_BYTES_MAX - len(" the end\n")
    assert "Y the end" in caplog.text
    assert "wandb output" not in [each.name for each in threading.enumerate()]


def test_a_process_that_does_not_end_is_killed(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.2)
    program.write_text("import threading\nthreading.Event().wait()\n")
    writer = WandbRun(tmp_path, RUN)
    made = Tracking(writer)
    with caplog.at_level(logging.WARNING, "p2ptrain.observe"):
        for number in range(1, 201):
            made.note(a_round(number))  # more than a pipe holds: its thread waits, and this one does not
        made.close()
    assert writer.child is not None
    assert writer.child.returncode == -signal.SIGKILL
    assert "took too long" in caplog.text


def test_it_is_offline_unless_there_is_a_key_and_tells_nothing_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(
        "import json, pathlib, types\n"
        "def Settings(**told):\n"
        "    pathlib.Path(__file__).with_name('told.json').write_text(json.dumps(told))\n"
        "class Run:\n"
        "    define_metric = log = finish = lambda self, *_, **__: None\n"
        "def init(**told): return Run()\n"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = {}
    for mode, key in (("", ""), ("", "k"), ("offline", "k")):
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setenv("WANDB_API_KEY", key)
        made = Tracking(WandbRun(tmp_path, RUN))
        made.note(a_round(1))
        made.close()
        assert made.lost == 0
        told[mode, key] = json.loads((tmp_path / "told.json").read_text())
    assert {each: what["mode"] for each, what in told.items()} == {
        ("", ""): "offline", ("", "k"): "online", ("offline", "k"): "offline",
    }  # fmt: skip
    for name in ("disable_git", "disable_code", "x_disable_stats", "x_disable_meta", "x_disable_machine_info"):
        assert told["", ""][name] is True
    assert os.environ.get("WANDB_SILENT") is None, "what is set for the child is set for it alone"
