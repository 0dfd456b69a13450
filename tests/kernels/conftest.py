"""Has Triton interpret programs, before anything imports it."""

import os
from contextlib import suppress
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"


def _teach_products_of_bf16() -> None:
    """Its interpreter has bf16 as bits, and multiplies these."""
    import numpy as np
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    real = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != language.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def create_dot(builder: Any, one: Any, other: Any, *rest: Any) -> Any:
        return real(builder, widened(one), widened(other), *rest)

    InterpreterBuilder.create_dot = create_dot


with suppress(ImportError):  # every test here is skipped
    _teach_products_of_bf16()
