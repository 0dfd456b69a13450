"""The command `p2ptrain`, and `python -m p2ptrain`. Imports happen inside the handler of Ctrl-C."""

from __future__ import annotations

import sys

from p2ptrain.errors import INTERRUPTED


def main() -> int:
    """Runs the command and returns its exit status."""
    try:
        from p2ptrain.cli import main as run  # noqa: PLC0415  # takes a tenth of a second, and longer from a cold disk

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
