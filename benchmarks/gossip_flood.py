"""What a flood of gossip by strangers costs a swarm: the pace of its rounds, and processor time.

    OMP_NUM_THREADS=1 nice python benchmarks/gossip_flood.py [--seconds 60] [--rate 5000] [--strangers 1 10]
        [--passes N] [--percent 4] [--json FILE] [--quick]

Three daemons with tiny models, and strangers with a p2pd each that are connected to the first node only and publish
junk votes with valid signatures, `--rate` a second together. The nodes train `--percent` of the time, so that the
processor has room for the strangers, who have the lowest priority and would otherwise take it elsewhere than a stranger
on the internet can (Linux only). Each turn with the flood comes after one in which the same strangers publish as much
on a topic of their own, and the last column compares the pace of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
from daemons import TINY, Swarm, p2pd_of, recipe, swarm_of

from p2ptrain.net.connections import topic_of
from p2ptrain.net.transport import STRANGERS
from p2ptrain.node.control import ask

ROOT = Path(__file__).parent.parent
LOWEST = "19"
AUTOGROUP_SECONDS = 0.15  # Linux lets a user change one each tenth of a second


def seconds_of(swarm: Swarm) -> tuple[float, float]:
    """Returns the processor time of all p2pds and of all nodes without them."""
    p2pds = [psutil.Process(p2pd_of(node)) for node in swarm.nodes]
    nodes = [psutil.Process(node.process.pid) for node in swarm.nodes if node.process is not None]
    return sum(sum(each.cpu_times()[:2]) for each in p2pds), sum(sum(each.cpu_times()[:2]) for each in nodes)


def strangers_of(swarm: Swarm, seconds: float, rate: float, count: int, is_elsewhere: bool) -> subprocess.Popen[bytes]:
    topic = "elsewhere" if is_elsewhere else topic_of(bytes.fromhex(swarm.nodes[0].status["run_id"]))
    program = str(ROOT / "benchmarks" / "strangers.py")
    command = [sys.executable, program, swarm.address, topic, str(seconds), str(rate), str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    stranger = psutil.Process(process.pid)
    for each in (stranger, *stranger.children(recursive=True)):
        each.nice(int(LOWEST))
        with suppress(OSError):  # a group of processes for each session, where the kernel makes some
            Path(f"/proc/{each.pid}/autogroup").write_text(LOWEST)
        sleep(AUTOGROUP_SECONDS)
    return process


def turn(swarm: Swarm, seconds: float, flooder: subprocess.Popen[bytes] | None) -> dict[str, Any]:
    """Lets the swarm run for some seconds, with the flood if there is one, and returns what happened."""
    swarm.look()
    junk, first = [node.status["bytes"].get(STRANGERS, 0) for node in swarm.nodes], swarm.round
    p2pd, python, began = *seconds_of(swarm), monotonic()
    if flooder is not None:
        assert flooder.stdin is not None
        flooder.stdin.write(b"\n")
        flooder.stdin.flush()
    end = began + seconds
    swarm.until(lambda: monotonic() >= end, seconds + 60)
    took, p2pd_after, python_after = monotonic() - began, *seconds_of(swarm)
    found = {
        "strangers": 0,
        "rounds_a_minute": 60 * (swarm.round - first) / took,
        "junk_a_second": [
            (node.status["bytes"].get(STRANGERS, 0) - early) / took
            for node, early in zip(swarm.nodes, junk, strict=True)
        ],
        "p2pd": (p2pd_after - p2pd) / took / len(swarm.nodes),
        "python": (python_after - python) / took / len(swarm.nodes),
        "load": os.getloadavg()[0],
    }
    if flooder is not None:
        assert flooder.stdout is not None
        found["published_a_second"] = int(flooder.stdout.readline()) / took
        flooder.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=5_000.0)
    parser.add_argument("--strangers", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--percent", type=int, default=4)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.strangers = 5.0, [1]
    rows: list[dict[str, Any]] = []
    print("strangers  junk/s seen by each      rounds/min  published/s  p2pd  Python   load  pace")
    with swarm_of(3, arguments.keep, model=TINY, recipe=recipe(arguments.passes)) as swarm:
        swarm.start()
        for node in swarm.nodes:
            ask(node.directory, {"do": "limit", "percent": arguments.percent})
        swarm.pass_rounds(3)
        turns = [(0, False), *((count, elsewhere) for count in arguments.strangers for elsewhere in (True, False))]
        for count, is_elsewhere in turns:
            flooder = None
            if count:
                flooder = strangers_of(swarm, arguments.seconds, arguments.rate, count, is_elsewhere)
            row = {**turn(swarm, arguments.seconds, flooder), "strangers": count, "is_elsewhere": is_elsewhere}
            before = rows[-1]["rounds_a_minute"] if rows else row["rounds_a_minute"]
            row["pace"] = row["rounds_a_minute"] / max(before, 1e-9)
            rows.append(row)
            seen = ", ".join(f"{each:,.0f}" for each in row["junk_a_second"])
            print(
                f"{count:9}  {'elsewhere' if is_elsewhere else seen:<22} {row['rounds_a_minute']:11.1f} "
                f"{row.get('published_a_second', 0):11,.0f} "
                f"{row['p2pd']:5.2f} {row['python']:7.2f} {row['load']:6.1f} {row['pace']:5.2f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
