"""`python -m p2ptrain`: the same as the command `p2ptrain`."""

from __future__ import annotations

import sys

from p2ptrain.cli import main

sys.exit(main())
