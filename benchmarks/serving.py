"""Does serving its state to newcomers delay a swarm's rounds?

    OMP_NUM_THREADS=1 python benchmarks/serving.py [--nodes 3] [--turns 4] [--seconds 30] [--preset 10m] [--keep]
        [--json FILE]

Real daemons train; by turns, a newcomer asks all of them for the state, again and again, as fast as they give it, or
leaves them alone. It runs at the lowest priority, as if on a machine of its own, for which two cores do not suffice.
What is told is the median time of a round, from the nodes' own records, with the newcomer over without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic, sleep, time
from typing import Any

from daemons import START_SECONDS, Swarm, recipe, swarm_of
from kills import records_of

from p2ptrain.config import NetworkConfig
from p2ptrain.identity import Identity
from p2ptrain.net import questions
from p2ptrain.net.blobs.blob import BlobName
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.rate_limit import TokenBucket

WARM_UP_SECONDS = 20.0
SETTLE_SECONDS = 3.0  # at the beginning of a turn, which do not count


def newcomer(run_id: bytes, addresses: list[str], size: int, seconds: float, counted: Any) -> None:
    """Fetches states until the time is over, in its own process."""
    os.nice(19)
    asyncio.run(_fetch_states(run_id, addresses, size, seconds, counted))


async def _fetch_states(run_id: bytes, addresses: list[str], size: int, seconds: float, counted: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="p2p-") as place:
        key = Path(place) / "key"
        Identity.make(key)
        network = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",), nat=False)
        transport = await P2pd.start(key, network, Path(place))
        try:
            peers = [await transport.connect(address) for address in addresses]
            fetcher = Fetcher(
                transport,
                run_id,
                download=TokenBucket(0),
                blame=lambda *_: None,
                rng=Random(0),  # noqa: S311
            )
            until = monotonic() + seconds
            while monotonic() < until:
                states = [await questions.ask_states(transport, peer, run_id) for peer in peers]
                held = [root for each in states for _, root in each]
                root = max(set(held), key=held.count)
                try:
                    async with asyncio.timeout(until - monotonic()):
                        await fetcher.fetch(BlobName("state", root), size, peers, failed=lambda *_: None)
                    counted.value += size
                except (FetchError, TimeoutError):
                    continue
        finally:
            await transport.close()


def turns(swarm: Swarm, count: int, seconds: float) -> tuple[list[tuple[bool, float, float]], int]:
    """Alternates between a newcomer and none; returns the times of both, and the bytes that it got."""
    status = swarm.nodes[0].status
    addresses = [node.status["addresses"][0] for node in swarm.nodes]
    counted = multiprocessing.Value("q", 0)
    found = []
    for number in range(2 * count):
        is_there, process = number % 2 == 1, None
        if is_there:
            given = bytes.fromhex(status["run_id"]), addresses, status["state_bytes"], seconds, counted
            process = multiprocessing.Process(target=newcomer, args=given)
            process.start()
        sleep(SETTLE_SECONDS)
        began = time()
        sleep(seconds - SETTLE_SECONDS)
        found.append((is_there, began, time()))
        if process is not None:
            process.join(START_SECONDS)
        swarm.look()
    return found, counted.value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--preset", default="10m")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    settings = {"model": f'preset = "{chosen.preset}"', "recipe": recipe(1, sequences_per_pass=2)}
    with swarm_of(chosen.nodes, chosen.keep, **settings) as swarm:
        swarm.start()
        sleep(WARM_UP_SECONDS)
        found, fetched = turns(swarm, chosen.turns, chosen.seconds)
        swarm.stop()
        gaps: dict[bool, list[float]] = {False: [], True: []}
        for early, late in pairwise(records_of(swarm.nodes[0])):
            for is_there, began, ended in found:
                if began <= early.applied_at and late.applied_at <= ended:
                    gaps[is_there].append(late.applied_at - early.applied_at)
    alone, beside = median(gaps[False]), median(gaps[True])
    rate = fetched / (chosen.turns * chosen.seconds)
    if chosen.json:
        chosen.json.write_text(json.dumps({"alone": gaps[False], "beside": gaps[True], "bytes": fetched}) + "\n")
    print(
        f"a round takes {alone:.3f} s alone ({len(gaps[False])} rounds), {beside:.3f} s beside a newcomer that got "
        f"{rate / 1e6:.1f} MB/s ({len(gaps[True])} rounds): {100 * (beside / alone - 1):+.1f} %"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
