"""Begun: the runs that this node has begun from a run file, and what the file said then.

Defaults change from release to release, and a run that exists does not. So a start finds the run that the same file has
begun: what the file said is stored beside the run at its first start, and a start goes on only with a run whose file
said exactly that. A key that was added or removed since begins another run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from p2ptrain.config import RunConfig
from p2ptrain.files import make_directory, read, write_atomically
from p2ptrain.node.home import Home

SAID_NAME = "said.json"  # in the run's directory
# Filled in when a run begins.
SEALED = {"data.manifest", "state.initial_root", "admission.founders", "model.shapes", "adapt.base", "adapt.base_bytes"}


def begun_here(run: RunConfig, said: Mapping[str, object], home: Home, me: str) -> RunConfig | None:
    """Returns the run that this node began from the file, even if defaults have changed since, if there is one.

    run: what the file means with today's defaults; said: what is in it
    """
    encoded = _encoded(said)
    begun = [
        each
        for each in home.runs()
        if each.admission.founders == (me,) and read(home.of_run(each.id) / SAID_NAME) == encoded
    ]
    return max(begun, key=lambda each: _is_of(each, run), default=None)


def note_begun(run: RunConfig, wanted: RunConfig, said: Mapping[str, object], home: Home) -> None:
    """Stores what the file said beside the run that it has begun, unless only its defaults have made it another.

    wanted: what the file means with today's defaults
    """
    directory = home.of_run(run.id)
    path, encoded = directory / SAID_NAME, _encoded(said)
    if read(path) != encoded and _is_of(run, wanted):
        make_directory(directory)
        write_atomically(path, encoded)


def _encoded(said: Mapping[str, object]) -> bytes:
    return json.dumps(said, sort_keys=True, default=str).encode() + b"\n"


def _is_of(run: RunConfig, wanted: RunConfig) -> bool:
    """Whether a sealed run is what is wanted, with the rest filled in."""
    theirs, ours = _flat(run), _flat(wanted)
    filled = {key for key in SEALED if ours[key] in ("", [], "embedded", 0)}
    return all(theirs[key] == ours[key] for key in ours.keys() - filled)


def _flat(run: RunConfig) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, part in run.model_dump(mode="json").items():
        if isinstance(part, dict):
            found |= {f"{name}.{key}": value for key, value in part.items()}
        else:
            found[name] = part
    return found
