"""The data directory of a node, kept for each release with a new format, which every later release has to open.

python -m tests.helpers.kept tests/kept/protocol-N.tar.xz     # runs a node of protocol N, and packs what it leaves
"""

from __future__ import annotations

import re
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.helpers.daemons import DaemonSwarm, p2ptrain, swarm_in

KEPT = Path(__file__).parents[1] / "kept"
ROUNDS = 12
TEXT = "The swarm keeps what it has agreed on, and whoever comes later reads it.\n" * 400
OWN = {"P2PTRAIN_STORAGE__CHECKPOINT_EVERY_ROUNDS": "4", "P2PTRAIN_STORAGE__CHECKPOINTS_KEPT": "2"}
PASSED_OVER = re.compile(r"events|daemon\.json|.*\.(sock|lock|partial)|lock")  # no state


def make(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="p2p-") as place, swarm_in(Path(place)) as swarm:
        text = swarm.directory / "text.txt"
        text.write_text(TEXT)
        status, out, err = p2ptrain("data", "prepare", swarm.directory / "data", text)
        (manifest,) = set(re.findall(r"\b[0-9a-f]{64}\b", out))
        assert (status, err) == (0, "")
        run = swarm.run_file("kept")
        (protocol,) = re.findall(r"\d+", archive.name)
        run.write_text(f'protocol = {protocol}\n{run.read_text()}\n[data]\nmanifest = "{manifest}"\n')
        arguments = ("start", run, "--data", swarm.directory / "data")
        node = swarm.add("node", *arguments, **OWN).start().until_up()
        node.until_applied(ROUNDS)
        node.kill()
        archive.parent.mkdir(exist_ok=True)
        with tarfile.open(archive, "w:xz") as packed:
            for part in ("node", "data", "kept.toml"):
                packed.add(swarm.directory / part, part, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if PASSED_OVER.fullmatch(Path(member.name).name) or not (member.isfile() or member.isdir()) else member


def unpack(archive: Path, swarm: DaemonSwarm) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(swarm.directory, filter="data")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
