"""The HTTP server of a node: latency of /status and /metrics, also under attack, and its cost.

    python benchmarks/http_side.py [status] [slow] [metrics] [idle] [--requests N] [--seconds S] [--turns N]
        [--json FILE] [--quick]

One real daemon, alone in its run, trains a model of 1M parameters on all cores. Each request is a connection of its
own, from its first SYN to the last byte of the answer, from this process. `status`: while the node trains. `slow`: the
same while 1,000 connections send a byte a second (and come again when they are closed) and another sends 10 MB of
headers, over and over; and how many rounds the node does meanwhile and without them, in turns, with what the attackers
themselves take of the cores told beside it. `metrics`: while it trains, and while it is paused, with the daemon's
processor time for each. `idle`: processor time of the daemon while it is paused, without a page, and with the dashboard
in Chromium where there is one. --quick: see that it runs. The machine's load is told first: what others do on it is in
all waits.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import psutil

from p2ptrain.errors import P2ptrainError
from p2ptrain.node.control import ask

RUN = """\
name = "http"
[model]
preset = "1m"
[recipe]
name = "distro"
sequences_per_pass = 4
passes_per_step = 4
"""
PARTS = ("status", "slow", "metrics", "idle")
START_SECONDS = 120.0
SLOW = 1_000  # connections
SLOW_SECONDS = 1.0  # between their bytes
HEADER_BYTES = 10**7
WAIT_SECONDS = 30.0  # for an answer
IDLE_SECONDS = 30.0


class Node:
    """The daemon."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "run.toml").write_text(RUN)
        own = {
            "P2PTRAIN_DEVICE__NAME": "cpu",
            "P2PTRAIN_DEVICE__THREADS": str(os.cpu_count()),
            "P2PTRAIN_NETWORK__NAT": "false",
            "P2PTRAIN_HTTP__PORT": "0",
        }
        command = [sys.executable, "-m", "p2ptrain", "start", str(directory / "run.toml")]
        command += ["--data-dir", str(directory / "node"), "--listen", "/ip4/127.0.0.1/tcp/0", "--log-format", "text"]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **own}
            )
        deadline = monotonic() + START_SECONDS
        while self.status().get("applied_round", -1) < 2:
            assert self.process.poll() is None and monotonic() < deadline, (directory / "log").read_text()[-2_000:]
            sleep(0.5)
        found = urlsplit(self.status()["http"])
        self.host, self.port = str(found.hostname), int(found.port or 0)

    def order(self, do: str) -> dict[str, Any]:
        return ask(self.directory / "node", {"do": do})

    def status(self) -> dict[str, Any]:
        with suppress(P2ptrainError):
            return self.order("status")
        return {}

    def settle(self, *, paused: bool) -> None:
        """Resumes or pauses training, and waits until that has taken effect."""
        self.order("pause" if paused else "resume")
        before = -1.0
        while paused and (now := float(self.status()["training_seconds"])) != before:
            before = now
            sleep(3.0)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    # -----------------------------------------------------------------------------------------------
    # Asking

    def seconds_for(self, path: str) -> float:
        """Returns the time from the first SYN to the last byte. Fails if the status is not 200."""
        request = f"GET {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n\r\n".encode()
        began = monotonic()
        with socket.create_connection((self.host, self.port), timeout=WAIT_SECONDS) as client:
            client.sendall(request)
            answer = bytearray()
            while part := client.recv(65_536):
                answer += part
        took = monotonic() - began
        assert answer.startswith(b"HTTP/1.1 200 "), bytes(answer[:200])
        return took

    def ask_often(self, path: str, count: int) -> dict[str, float]:
        """Returns the latencies in milliseconds."""
        took = []
        for _ in range(count):
            took.append(1_000 * self.seconds_for(path))
            sleep(0.01)
        found = statistics.quantiles(took, n=100, method="inclusive")
        return {"median_ms": found[49], "p99_ms": found[98], "most_ms": max(took), "requests": count}


# ---------------------------------------------------------------------------------------------------
# Those who mean no good, in a process of their own


def trickle(host: str, port: int, count: int) -> None:
    """Keeps this many connections open, sends a byte of a request on each now and then, and reopens closed ones."""
    request = b"GET /status HTTP/1.1\r\nX: " + b"x" * 10_000
    clients: dict[socket.socket, int] = {}
    selector = selectors.DefaultSelector()
    while True:
        began = monotonic()
        for _ in range(count - len(clients)):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex((host, port))
            clients[client] = 0
            selector.register(client, selectors.EVENT_READ)
        for client, sent in list(clients.items()):
            with suppress(OSError):
                client.send(request[sent : sent + 1])
            clients[client] = sent + 1
        for key, _ in selector.select(timeout=0):
            assert isinstance(key.fileobj, socket.socket)
            with suppress(OSError):
                if key.fileobj.recv(65_536):
                    continue
            selector.unregister(key.fileobj)
            key.fileobj.close()
            del clients[key.fileobj]
        sleep(max(0.0, SLOW_SECONDS - (monotonic() - began)))


def flood(host: str, port: int, size: int) -> None:
    """Sends headers of this size for as long as the server reads, again and again."""
    line = b"X: " + b"y" * 4_000 + b"\r\n"
    while True:
        with suppress(OSError), socket.create_connection((host, port)) as client:
            client.sendall(b"GET /status HTTP/1.1\r\n")
            for _ in range(size // len(line)):
                client.sendall(line)
        sleep(0.05)


@contextmanager
def attack(node: Node, count: int) -> Iterator[list[psutil.Process]]:
    made = [
        multiprocessing.Process(target=trickle, args=(node.host, node.port, count), daemon=True),
        multiprocessing.Process(target=flood, args=(node.host, node.port, HEADER_BYTES), daemon=True),
    ]
    for each in made:
        each.start()
    try:
        yield [psutil.Process(each.pid) for each in made]
    finally:
        for each in made:
            each.terminate()
            each.join()


def cpu_seconds(*processes: psutil.Process) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


# ---------------------------------------------------------------------------------------------------
# Figures


def measure_slow(node: Node, requests: int, seconds: float, turns: int, count: int) -> dict[str, Any]:
    """Measures rounds with and without the attack, in turns, and the latencies at the end of the last one."""

    def rounds_a_minute() -> float:
        first, began = node.status()["applied_round"], monotonic()
        sleep(seconds)
        return float(node.status()["applied_round"] - first) * 60 / (monotonic() - began)

    found: list[tuple[float, float]] = []
    shares: list[float] = []
    waits: dict[str, float] = {}
    for turn in range(turns):
        without = rounds_a_minute()
        with attack(node, count) as attackers:
            sleep(3.0)
            began, used = monotonic(), cpu_seconds(*attackers)
            found.append((without, rounds_a_minute()))
            shares.append((cpu_seconds(*attackers) - used) / (monotonic() - began))
            if turn == turns - 1:
                waits = node.ask_often("/status", requests)
    ratios = [beside / max(without, 1e-9) for without, beside in found]
    return waits | {
        "turns": turns,
        "rounds_a_minute_without": statistics.median(without for without, _ in found),
        "rounds_a_minute": statistics.median(beside for _, beside in found),
        "ratio_of_a_turn": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "cores_of_attackers": statistics.median(shares),
    }


def measure_idle(node: Node, seconds: float) -> dict[str, float]:
    daemon = psutil.Process(node.process.pid)

    def share() -> float:
        used, began = cpu_seconds(daemon), monotonic()
        sleep(seconds)
        return 100 * (cpu_seconds(daemon) - used) / (monotonic() - began)

    found = {"percent_of_a_core": share()}
    if (chromium := shutil.which("chromium")) and importlib.util.find_spec("playwright"):
        with dashboard(node, chromium):
            found["percent_with_a_dashboard"] = share()
    return found


@contextmanager
def dashboard(node: Node, chromium: str) -> Iterator[None]:
    """Opens a visible page of the dashboard."""
    api = importlib.import_module("playwright.sync_api")  # a tool of the tests
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            page = browser.new_page()
            page.goto(f"http://{node.host}:{node.port}/")
            page.wait_for_function("document.getElementById('main').dataset.round !== undefined")
            sleep(5.0)
            yield
        finally:
            browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=IDLE_SECONDS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    requests, seconds, turns, count = arguments.requests, arguments.seconds, arguments.turns, SLOW
    if arguments.quick:
        requests, seconds, turns, count = 5, 1.0, 2, 50
    parts = arguments.parts or PARTS
    found: dict[str, Any] = {"machine": {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}}
    with tempfile.TemporaryDirectory(prefix="p2ptrain-http-") as directory:
        node = Node(Path(directory))
        try:
            if "status" in parts:
                found["/status while it trains"] = node.ask_often("/status", requests)
            if "slow" in parts:
                slow = measure_slow(node, requests, seconds, turns, count)
                found[f"/status among {count} slow connections"] = slow
            if "metrics" in parts:
                found["/metrics while it trains"] = node.ask_often("/metrics", requests)
            node.settle(paused=True)
            if "metrics" in parts:
                for path in ("/metrics", "/status"):
                    used = cpu_seconds(psutil.Process(node.process.pid))
                    figures = node.ask_often(path, requests)
                    used = cpu_seconds(psutil.Process(node.process.pid)) - used
                    found[f"{path} while it is paused"] = figures | {"processor_ms": 1_000 * used / requests}
            if "idle" in parts:
                found["paused"] = measure_idle(node, seconds)
        finally:
            node.close()
    for name, figures in found.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:<24} {value:,.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
