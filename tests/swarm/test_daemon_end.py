"""A second signal ends a daemon at once, whatever it is doing, and its files stay consistent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.daemons import TEST_SECONDS, swarm_in

ROOT = Path(__file__).parents[2]
AT_ONCE_SECONDS = 20.0  # on a busy machine; the write below takes a minute
SLOW = """
import pathlib, threading
from p2ptrain import files

rename = files.rename

def slow(partial, path):
    if "round-" in path.name and not path.name.endswith("round-0"):
        pathlib.Path({marker!r}).touch()
        threading.Event().wait(60)
    rename(partial, path)

files.rename = slow
"""


@pytest.mark.timeout(TEST_SECONDS)
def test_the_second_signal_does_not_wait_for_a_checkpoint_and_the_directory_opens(tmp_path: Path) -> None:
    marker, place = tmp_path / "writing", tmp_path / "place"
    place.mkdir()
    (place / "sitecustomize.py").write_text(SLOW.format(marker=str(marker)))
    with swarm_in(tmp_path) as swarm:
        node = swarm.first(PYTHONPATH=f"{place}{os.pathsep}{ROOT}").start().until_up()
        node.until_applied(9)
        node.until(marker.exists)
        node.signal(signal.SIGINT)
        node.until_says("leaving the run, with the manifest of this round or the next; signal again to end at once")
        began = time.monotonic()
        node.signal(signal.SIGINT)
        assert node.until_ended(AT_ONCE_SECONDS) == 130
        assert time.monotonic() - began < AT_ONCE_SECONDS
        assert "Traceback" not in node.text
        (run,) = (node.directory / "runs").iterdir()
        assert [path.suffix for path in (run / "checkpoints").iterdir() if "round-8" in path.name] == [".partial"]
        del node.own["PYTHONPATH"]
        node.start().until_applied(18)
