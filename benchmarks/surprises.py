"""Which functions that face peers end a daemon when they raise what nobody foresaw: `python benchmarks/surprises.py`.

Of three daemons that train, one has every such function wrapped (tests/helpers/surprises.py finds them by reading the
code). Each raises once when it is next called, while peers are killed and come back, the daemon is suspended, and its
p2pd is killed. Whatever ends the daemon is noted, and left out when it is started again; then come the next kind's. At
the end the daemon runs, rounds go on with equal roots, and it complains. Exit status 1 if a function ends it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.helpers import surprises
from tests.helpers.daemons import DaemonSwarm, StartableDaemon, p2pds
from tests.helpers.surprises import KINDS, MEMORY, PeerFacingFunctions

QUIET_SECONDS = 12.0  # without another function that raises, until a kind is done
LOG_CHARACTERS = 20_000
ROUNDS = 5  # that have to follow
PROGRAM = Path(surprises.__file__)
# Contributions are fetched; and no branch of its own has other roots.
PAYLOADS = '\n[agreement]\non_quorum_loss = "halt"\ninline_bytes_max = 0\n'


class Victim:
    """A daemon that is surprised."""

    def __init__(self, swarm: DaemonSwarm, address: str) -> None:
        self.orders, self.log = swarm.directory / "orders", swarm.directory / "raised"
        self.orders.touch()
        self.log.touch()
        self.daemon = swarm.joiner("surprised", address)
        self.daemon.prefix = (sys.executable, str(PROGRAM), str(self.orders), str(self.log))
        self.daemon.start().until_member()

    @property
    def ended(self) -> list[str]:
        """Returns the functions whose surprises ended the daemon."""
        return re.findall(rf"^{surprises.ENDED} .*a surprise in (\S+)\.", self.log.read_text(), re.MULTILINE)

    @property
    def raised(self) -> list[tuple[str, str]]:
        """Returns what has been raised, and where."""
        lines = [line.partition(" ") for line in self.log.read_text().splitlines()]
        return [(kind, name) for kind, _, name in lines if kind in KINDS | MEMORY]

    def arm(self, kind: str, names: list[str]) -> None:
        with self.orders.open("a") as orders:
            orders.write(f"{kind} {' '.join(names)}\n")


def trouble(number: int, victim: StartableDaemon, other: StartableDaemon) -> None:
    """Makes the victim meet its peers anew."""
    match number % 3:
        case 0:
            other.kill()
            other.start()
        case 1:
            for process in p2pds(victim.directory):
                process.kill()
        case _:
            victim.stop()
            victim.pause(3.0)
            victim.cont()


def of_kind(kind: str, names: list[str], victim: Victim, other: StartableDaemon) -> dict[str, Any]:
    """Has each of these functions raise this kind once. Returns who did, and who ended the daemon."""
    ended: list[str] = []
    before = len(victim.raised)
    left = list(names)
    number, seen, quiet_at = 0, 0, time.monotonic()
    victim.arm(kind, left)
    while time.monotonic() < quiet_at + QUIET_SECONDS:
        if victim.daemon.is_running:
            victim.daemon.pause(2.0)
            if number % 3 == 2:
                trouble(number // 3, victim.daemon, other)
        number += 1
        raised = [name for _, name in victim.raised[before:]]
        if len(raised) > seen:
            seen, quiet_at = len(raised), time.monotonic()
        if not victim.daemon.is_running:
            ended.append((victim.ended or ["not known"])[-1])
            print(f"{kind} in {ended[-1]} ended it:\n{victim.daemon.text[-LOG_CHARACTERS:]}", flush=True)
            left = [name for name in names if name not in raised]
            victim.daemon.start().until_up()
            victim.arm(kind, left)
            quiet_at = time.monotonic()
    victim.arm(kind, [])  # what was not reached: each try to catch up would fail at the next function
    return {"raised": sorted(set(raised)), "ended": ended}


def _is_compared(swarm: DaemonSwarm, goal: int, *daemons: StartableDaemon) -> bool:
    """Whether so many rounds' roots have been compared, of which `status` takes note."""
    for each in daemons:
        each.status()
    return swarm.compared() >= goal


def measure(directory: Path, kinds: list[str]) -> dict[str, Any]:
    """Surprises a daemon with each kind."""
    swarm, found = DaemonSwarm(directory), PeerFacingFunctions().facing_peers()
    try:
        run = swarm.run_file()
        run.write_text(run.read_text().replace("\n[agreement]\n", PAYLOADS))
        first = swarm.add("first", "start", run).start().until_up()
        other = swarm.joiner("other", first.address).start()
        victim = Victim(swarm, first.address)
        told: dict[str, Any] = {"functions": len(found), "kinds": {}}
        for kind in kinds:
            told["kinds"][kind] = of_kind(kind, found, victim, other)
            daemon = victim.daemon.until_up()
            compared = swarm.compared() + ROUNDS
            daemon.until(lambda first=first, daemon=daemon, goal=compared: _is_compared(swarm, goal, first, daemon))
            codes = {each["code"] for each in daemon.status()["complaints"]}
            assert "exchange_fault" in codes, codes
            print(f"{kind}: {len(told['kinds'][kind]['raised'])} of {len(found)} functions raised", flush=True)
        told["reached"] = sorted(set().union(*(each["raised"] for each in told["kinds"].values())))
        told["ended"] = sorted({name for each in told["kinds"].values() for name in each["ended"]})
        return told
    finally:
        swarm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kinds", nargs="*", choices=[*KINDS, *MEMORY], default=list(KINDS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        told = measure(Path(directory), arguments.kinds)
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{len(told['reached'])} of {told['functions']} functions were reached; ended it: {told['ended']}")
    sys.exit(bool(told["ended"]))


if __name__ == "__main__":
    main()
