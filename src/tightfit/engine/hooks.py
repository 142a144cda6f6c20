"""Hooks of autograd that do not keep alive whoever is called.

A parameter keeps its hooks in C++, where Python's garbage collector does not look: an object that
holds parameters and is called by their hooks would hold itself, and with it all of their memory,
for as long as the process lives. Knows nothing of what is called.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import torch


def when_accumulated(parameter: torch.Tensor, method: Callable[[torch.Tensor], None]) -> None:
    """Call a method with the parameter when backward has finished its gradient, as long as the
    method's object lives."""
    weak = WeakMethod(method)

    def call(accumulated: torch.Tensor) -> None:
        found = weak()
        if found is not None:
            found(accumulated)

    parameter.register_post_accumulate_grad_hook(call)
