"""Installs packages of plug-ins for a test, without pip: a module, and what its wheel would say about it."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL, RECIPE = "p2ptrain-digits 0.1.0", "p2ptrain-noise 0.1.0"


def install(place: Path, plugin: str, points: Mapping[str, str]) -> None:
    """Writes what pip keeps of an installed package, such as "a-name 1.0". points: an object's place, by its group"""
    name, _, version = plugin.partition(" ")
    about = place / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[{group}]\n{name} = {value}\n" for group, value in points.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))


def install_example(place: Path, folder: str) -> None:
    """Installs `examples/FOLDER` as its pyproject.toml says."""
    project = tomllib.loads((EXAMPLES / folder / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    install(place, f"{project['name']} {project['version']}", {group: points[project["name"]]})
    for module in (EXAMPLES / folder).glob("*.py"):
        shutil.copy(module, place)
