"""hivemind without what we do not use of it.

Whoever imports a part of hivemind imports its package first, and that imports all that it has: averaging, optimizers
and experts, and with them scipy. It takes half a second of each start and 47 MB of each node (of 2.7 s and 328 MB). A
package that is there already is not imported again; so there is one for as long as we import, by which parts are found
as ever, and none of whose code has run.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NAME = "hivemind"


@contextmanager
def parts_of_hivemind() -> Iterator[None]:
    """To import them in."""
    found = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if found is None:  # it is whole already, or importing it says what is missing
        yield
        return
    sys.modules[NAME] = importlib.util.module_from_spec(found)
    try:
        yield
    finally:
        del sys.modules[NAME]
