"""Run a coroutine on its own event loop and thread: it can block only that loop."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from carpool.media.executors import FairExecutor

P = ParamSpec("P")
T = TypeVar("T")


async def run_apart(
    executor: FairExecutor, tenant: str, work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """Run a coroutine at this tenant's turn; it is cancelled with its caller."""
    is_given_up, stop = False, None

    async def run() -> T:
        nonlocal stop
        task = asyncio.current_task()
        assert task is not None
        stop = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if is_given_up:
            raise asyncio.CancelledError
        return await work()

    try:
        return await executor.run(tenant, lambda: asyncio.run(run()))
    except asyncio.CancelledError:
        is_given_up = True
        if stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has stopped
                stop()
        raise


def on_this_loop(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Awaitable[T]]:
    """Wrap a function for callers on other loops: it still runs on the current loop."""
    loop = asyncio.get_running_loop()

    @wraps(call)
    async def called(*args: P.args, **options: P.kwargs) -> T:
        future = asyncio.run_coroutine_threadsafe(call(*args, **options), loop)
        return await asyncio.wrap_future(future)

    return called
