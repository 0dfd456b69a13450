"""What a daemon takes in the long run: memory, descriptors and disk of three tiny daemons over many thousand rounds.

    OMP_NUM_THREADS=1 nice python benchmarks/long_run.py [--rounds 30000] [--every 250] [--settled 5000] [--seconds S]
        [--keep] [--json FILE]

A line for each so many rounds. At the end the memory of each node and of its p2pd is compared with what it was after
`--settled` rounds (medians of five looks): exit status 1 if one has grown by more than 3 %, or the descriptors by more
than a tenth.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import psutil
from daemons import ROUND_SECONDS, TINY, Swarm, recipe, swarm_of

from p2ptrain.files import below

GROWTH_MAX = 1.03
LOOKS = 5  # whose median is compared


def sizes_of(directory: Path) -> dict[str, int]:
    """Returns the bytes on the disk by what is directly in the directory of a run, or of the node."""
    found: dict[str, int] = defaultdict(int)
    for path, file in below(directory):
        parts = path.relative_to(directory).parts
        found[parts[2] if parts[0] == "runs" else parts[0]] += file.st_size
    return dict(found)


def look(swarm: Swarm, began: float) -> dict[str, Any]:
    nodes = []
    for node in swarm.nodes:
        assert node.process is not None
        process = psutil.Process(node.process.pid)
        (p2pd,) = process.children()
        nodes.append(
            {
                "rss": process.memory_info().rss,
                "p2pd_rss": p2pd.memory_info().rss,
                "descriptors": process.num_fds(),
                "p2pd_descriptors": p2pd.num_fds(),
                "threads": process.num_threads(),
                "disk": sizes_of(node.directory),
            }
        )
    return {"round": swarm.round, "seconds": monotonic() - began, "nodes": nodes}


def tell(seen: dict[str, Any]) -> None:
    first = seen["nodes"][0]
    memory = " ".join(f"{each['rss'] / 1e6:.0f}+{each['p2pd_rss'] / 1e6:.0f}" for each in seen["nodes"])
    disk = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in sorted(first["disk"].items()) if size > 1e5)
    descriptors = " ".join(f"{each['descriptors']}+{each['p2pd_descriptors']}" for each in seen["nodes"])
    print(f"round {seen['round']:6} {seen['seconds']:6.0f} s · MB {memory} · descriptors {descriptors} · MB of {disk}")
    sys.stdout.flush()


def grown(looks: list[dict[str, Any]], settled: int) -> list[str]:
    """Names what is more at the end than after `settled` rounds."""
    after = [each for each in looks if each["round"] >= settled]
    if len(after) < 2 * LOOKS:
        return [f"only {len(after)} looks after round {settled}: nothing to compare"]
    found = []
    for at in range(len(looks[0]["nodes"])):
        for what, most in (("rss", GROWTH_MAX), ("p2pd_rss", GROWTH_MAX), ("descriptors", 1.1)):
            early, late = (median(each["nodes"][at][what] for each in some) for some in (after[:LOOKS], after[-LOOKS:]))
            print(f"node {at + 1}: {what} {early:,.0f} to {late:,.0f}, {late / early:.3f}")
            if late > most * early:
                found.append(f"node {at + 1}: {what}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30_000)
    parser.add_argument("--every", type=int, default=250)
    parser.add_argument("--settled", type=int, default=5_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long in any case")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    looks: list[dict[str, Any]] = []
    began = monotonic()
    with swarm_of(3, arguments.keep, model=TINY, recipe=recipe(1)) as swarm:
        swarm.start()
        while (here := swarm.round) < arguments.rounds and monotonic() - began < arguments.seconds:
            swarm.until(lambda here=here: swarm.round >= here + arguments.every, ROUND_SECONDS * arguments.every)  # type: ignore[misc]
            looks.append(look(swarm, began))
            tell(looks[-1])
            if arguments.json:
                arguments.json.write_text(json.dumps(looks))
    wrong = grown(looks, arguments.settled)
    print("\n".join(wrong) or "nothing grows")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
