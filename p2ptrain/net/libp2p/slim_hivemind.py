"""Imports submodules of hivemind without running the package's own __init__.

That __init__ imports everything: averaging, optimizers and experts, and with them scipy. It costs half a second of each
start and 47 MB of each node (of 2.7 s and 328 MB). Python does not import a package again that is in sys.modules; so an
empty module stands there while we import, and submodules are found through it as usual."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NAME = "hivemind"


@contextmanager
def parts_of_hivemind() -> Iterator[None]:
    """The context in which submodules of hivemind are imported."""
    found = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if found is None:  # already imported, or missing: then the import error says so
        yield
        return
    sys.modules[NAME] = importlib.util.module_from_spec(found)
    try:
        yield
    finally:
        del sys.modules[NAME]
