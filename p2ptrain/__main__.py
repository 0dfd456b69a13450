"""The command `p2ptrain`, and `python -m p2ptrain`. Imports happen inside the handler of Ctrl-C."""

from __future__ import annotations

import sys
from io import TextIOWrapper

from p2ptrain.errors import INTERRUPTED


def main() -> int:
    """Runs the command and returns its exit status."""
    if isinstance(sys.stdout, TextIOWrapper):  # a model writes any character, and some terminals are Latin-1
        sys.stdout.reconfigure(errors="replace")
    try:
        from p2ptrain.cli import main as run  # noqa: PLC0415  # takes a tenth of a second, and longer from a cold disk

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
