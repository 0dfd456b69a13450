"""What a motion may change, and to what, is a part of the protocol: members who find different motions possible find
different manifests, and no quorum for either. So tests/kept has it, as protocols 2 and 3 have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from p2ptrain.config import PROTOCOLS, RunConfig
from p2ptrain.config.succession import MAY_CHANGE, ONLY_MORE

KEPT = Path(__file__).parents[1] / "kept" / "changes.json"


def _bounds(schema: Any) -> Any:
    """A schema without defaults, and without the words for people."""
    left_out = {"title", "description", "default"}
    if isinstance(schema, dict):
        return {name: _bounds(value) for name, value in schema.items() if name not in left_out}
    return [_bounds(each) for each in schema] if isinstance(schema, list) else schema


def what_may_change() -> dict[str, Any]:
    schema = RunConfig.model_json_schema()
    found = {}
    for name in sorted(MAY_CHANGE):
        section, _, key = name.partition(".")
        table = schema["properties"][section]
        if key:
            table = schema["$defs"][table["$ref"].rpartition("/")[2]]["properties"][key]
        found[name] = _bounds(table)
    return {"protocols": list(PROTOCOLS), "only more": list(ONLY_MORE), "settings": found}


def test_a_motion_may_change_what_it_could_in_these_protocols() -> None:
    """A setting, or a value, that is new to motions takes a protocol version of its own, and a table for it."""
    assert what_may_change() == json.loads(KEPT.read_text(encoding="utf-8"))
