"""Begun: the runs that this node has begun from a run file, and what the file said then.

Defaults change from release to release, and a run that exists does not. So a start finds the run that the same file has
begun: what the file said is stored beside the run at its first start, and a start goes on only with a run whose file
said exactly that. A key that was added or removed since begins another run. Of a run from before there were such notes,
all that the file says has to hold.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.files import make_directory, read, write_atomically
from p2ptrain.node.directories import run_directory
from p2ptrain.node.find import stored_runs

SAID_NAME = "said.json"  # in the run's directory
# Filled in when a run begins.
SEALED = {"data.manifest", "state.initial_root", "admission.founders", "model.shapes", "adapt.base", "adapt.base_bytes"}

log = logging.getLogger("p2ptrain.daemon")


def begun_here(run: RunConfig, said: Mapping[str, object], config: NodeConfig, me: str) -> RunConfig | None:
    """Returns the run that this node began from the file, even if defaults have changed since, if there is one.

    run: what the file means with today's defaults; said: what is in it
    """
    noted, others = [], []
    for each in stored_runs(config):
        if each.admission.founders != (me,):
            continue
        note = read(run_directory(config, bytes.fromhex(each.run_id)) / SAID_NAME)
        if note == _encoded(said):
            noted.append(each)
        elif note is None and each.is_described_by(said):
            others.append(each)
    whole = run.model_dump()
    found = max(noted or others, key=lambda each: each.is_described_by(whole), default=None)
    if found is not None and not noted:
        for key, theirs, ours in _differences(found, run):
            what = "going on with run %s, in which %s is %s; the run file and the defaults say %s"
            log.warning(what, found.run_id[:16], key, theirs, ours)
    return found


def note_begun(run: RunConfig, wanted: RunConfig, said: Mapping[str, object], config: NodeConfig) -> None:
    """Stores what the file said beside the run that it has begun, unless only its defaults have made it another.

    wanted: what the file means with today's defaults
    """
    directory = run_directory(config, bytes.fromhex(run.run_id))
    path, encoded = directory / SAID_NAME, _encoded(said)
    if read(path) != encoded and not list(_differences(run, wanted)):
        make_directory(directory)
        write_atomically(path, encoded)


def _encoded(said: Mapping[str, object]) -> bytes:
    return json.dumps(said, sort_keys=True, default=str).encode() + b"\n"


def _differences(run: RunConfig, wanted: RunConfig) -> Iterator[tuple[str, object, object]]:
    """Yields each key in which a sealed run is not what is wanted, and both values."""
    theirs, ours = _flat(run), _flat(wanted)
    for key in sorted(theirs.keys() | ours.keys()):
        is_filled_in = key in SEALED and ours.get(key) in ("", (), [], "embedded", 0)
        if theirs.get(key) != ours.get(key) and not is_filled_in:
            yield key, theirs.get(key), ours.get(key)


def _flat(run: RunConfig) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, part in run.model_dump(mode="json").items():
        if isinstance(part, dict):
            found |= {f"{name}.{key}": value for key, value in part.items()}
        else:
            found[name] = part
    return found
