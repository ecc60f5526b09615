"""A watchdog: nothing heavy runs inside of a fiber, where all other requests wait for it.

Weighted modules are counted that run between two pauses of a fiber. A call that cannot be
interrupted, such as the writing of a whole text, runs far more of them than the small projections
that pipelines call themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from carpool.engine.fiber import Fiber, current_context

BOUND = 12  # weighted modules: less than a forward of most tiny models has


@contextmanager
def watching(bound: int = BOUND) -> Iterator[None]:
    """Fail if a fiber runs more weighted modules than that without a pause.

    Private rides are left out: nobody waits beside one.
    """
    calls: list[str] = []
    longest: list[str] = []
    switch = Fiber._switch

    def switching(self: Fiber, *args: Any) -> Any:
        calls.clear()
        return switch(self, *args)

    def look(module: nn.Module, _: Any) -> None:
        context = current_context()
        if context is not None and not context.is_private and module._parameters:
            calls.append(type(module).__name__)
            if len(calls) > len(longest):
                longest[:] = calls

    hook = register_module_forward_pre_hook(look)
    try:
        with patch.object(Fiber, "_switch", switching):
            yield
    finally:
        hook.remove()
    assert len(longest) <= bound, f"ran without a pause: {', '.join(longest)}"
