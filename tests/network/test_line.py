"""Hosts that a relay joins have the line that was asked for, and the benchmarks on it run to their end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.sim.scenario import Line
from tests.helpers.benchmarks import load
from tests.helpers.daemons import TINY_MODEL

RATE, DELAY, LOSS = 10.0, 0.1, 0.2
BYTES = 4_000_000  # 3.2 s at that rate
SERVER = """
import socket, time
server = socket.create_server(("0.0.0.0", 9000))
print("up", flush=True)
line, _ = server.accept()
total, began = 0, time.monotonic()
while read := line.recv(65536):
    total += len(read)
print(total, time.monotonic() - began, flush=True)
"""
CLIENT = """
import socket, sys, time
began = time.monotonic()
line = socket.create_connection((sys.argv[1], 9000))
print(time.monotonic() - began)
line.sendall(bytes(int(sys.argv[2])))
"""
LISTENER = """
import socket
line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
line.bind(("0.0.0.0", 9000))
print("up", flush=True)
line.settimeout(5)
count = 0
try:
    while line.recv(100):
        count += 1
except TimeoutError:
    print(count, flush=True)
"""
SPEAKER = """
import socket, sys
line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(500):
    line.sendto(b"hello", (sys.argv[1], 9000))
"""
TINY = f"""\
name = "tiny"
{TINY_MODEL}[recipe]
name = "local"
sequences_per_pass = 4
[admission]
probation_rounds = 1
"""
pytestmark = [
    pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("network"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def possible() -> Iterator[None]:
    if why := load("relay").why_impossible():
        pytest.skip(f"no line between hosts: {why}")
    yield


def talk(hosts: Any, server: str, client: str, *arguments: str) -> tuple[str, str]:
    """Runs a server on one host and a client on the other; returns what they say."""
    there = subprocess.Popen([*hosts.prefix(1), sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
    with there:
        assert there.stdout is not None
        assert there.stdout.readline() == "up\n"
        command = [*hosts.prefix(0), sys.executable, "-c", client, load("relay").address(1), *arguments]
        here = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return there.stdout.read(), here.stdout


def test_a_connection_has_the_delay_and_nearly_the_rate_asked_for() -> None:
    with load("relay").hosts_on([Line(RATE, RATE, DELAY)], 2) as hosts:
        told, met = talk(hosts, SERVER, CLIENT, str(BYTES))
        sender, receiver = hosts.counts()["hosts"]
    assert 2 * DELAY <= float(met) < 2 * DELAY + 0.1, "there and back"
    total, seconds = map(float, told.split())
    assert total == BYTES
    assert 0.5 * RATE < 8e-6 * total / seconds < RATE, "slow start takes its part"
    assert BYTES < receiver["received_bytes"] < 1.2 * BYTES
    assert sender["sent_bytes"] >= receiver["received_bytes"]
    assert receiver["sent_bytes"] < 0.2 * BYTES, "acknowledgements"


def test_a_line_loses_its_share_of_packets() -> None:
    with load("relay").hosts_on([Line(RATE, RATE, 0.01, loss=LOSS)], 2) as hosts:
        told, _ = talk(hosts, LISTENER, SPEAKER)
        counts = hosts.counts()["hosts"]
    arrived = 500 - counts[0]["lost_packets"] - sum(each["dropped_packets"] for each in counts)
    assert int(told) == arrived
    assert 60 < counts[0]["lost_packets"] < 140


def test_the_hosts_and_their_relay_are_gone_afterwards() -> None:
    with load("relay").hosts_on([Line(RATE, RATE, DELAY)], 2) as hosts:
        process = hosts.process
    assert process.poll() == 0


def test_daemons_on_a_line_learn_and_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, wan = tmp_path / "run.toml", tmp_path / "out.json", load("wan")
    run.write_text(TINY)
    given = ["--nodes", "2", "--line", "dsl", "--minutes", "1", "1.5", "--run", str(run), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["wan.py", *given])
    assert wan.main() == 0
    found = json.loads(out.read_text())
    early, late = found["marks"]
    assert (found["nodes"], found["lines"][0]["up_megabits"], found["recipe"]["name"]) == (2, 10.0, "local")
    assert 0 < early["round"] < late["round"] <= min(found["rounds"])
    assert late["loss"] < 5.6, "below that of a guess"
    assert 60 <= early["seconds"] < late["seconds"]
    for way in ("sent", "received"):
        assert all(0 < before < after for before, after in zip(early[way], late[way], strict=True))
    assert all(0 < share <= 1.05 for share in found["training_shares"])
    assert "2 nodes, 50 and 10 Mbit/s" in capsys.readouterr().out


def test_hivemind_on_a_line_learns_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, rival = tmp_path / "run.toml", tmp_path / "out.json", load("against_hivemind")
    run.write_text(TINY)
    given = ["--nodes", "2", "--line", "dsl", "--minutes", "0.7", "--run", str(run), "--json", str(out)]
    given += ["--modes", "local", "--inner", "muon", "--codecs", "fp16", "--rates", "0.01", "--periods", "10"]
    monkeypatch.setattr(sys, "argv", ["against_hivemind.py", *given])
    assert rival.main() == 0
    (found,) = json.loads(out.read_text())
    (mark,) = found["marks"]
    assert len(mark["losses"]) == 2
    assert mark["loss"] <= min(mark["losses"]) < 5.6
    assert all(each["steps"] > 0 for each in found["peers"])
    assert "[1/1] hivemind local" in capsys.readouterr().out
    assert rival.main() == 0
    assert "[1/1]" not in capsys.readouterr().out
