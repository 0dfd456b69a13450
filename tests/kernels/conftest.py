"""Has Triton interpret programs, before anything imports it."""

import os

os.environ["TRITON_INTERPRET"] = "1"
