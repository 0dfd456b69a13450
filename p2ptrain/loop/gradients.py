"""Keeps gradients on where a script is interrupted, as Ctrl-C in a notebook does."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def keeps_gradients(function: Callable[P, T]) -> Callable[P, T]:
    """Leaves gradients on or off as they were, wherever the function is interrupted.

    An interrupt just after torch.no_grad has turned them off, before its block begins, would leave them off for good.
    """

    @wraps(function)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> T:
        import torch  # noqa: PLC0415  # a script may not have imported it yet

        before = torch.is_grad_enabled()
        try:
            try:
                return function(*args, **kwargs)
            finally:
                torch.set_grad_enabled(before)
        finally:  # the first may have been interrupted
            torch.set_grad_enabled(before)

    return keeping
