"""The command `p2ptrain`, and `python -m p2ptrain`. Nothing is imported before somebody takes a Ctrl-C."""

from __future__ import annotations

import sys

INTERRUPTED = 130  # as a shell says it


def main() -> int:
    """The exit status."""
    try:
        from p2ptrain.cli import main as run  # noqa: PLC0415  # takes a tenth of a second, and longer from a cold disk

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
