"""The wrappers around a forward that answers requests, in one order.

`execute` calls the outermost one, and cuts a forward that raises in two. A wrapper is a decorator:
it takes the function that runs a forward of parked calls, and returns one that does more around it:

1. the conditioning cache, for encoders: equal calls run once (`conditioning_cache.py`), and a
   prompt starts from its cached beginning (`prefixes.py`);
2. memory: a call that runs out of it runs again, then in tiles (`execute.py`);
3. probation, for several calls: without proof that they fuse they run apart, and then together
   (`probation/`);
4. the wrapper of the engine's owner;
5. faults on purpose (`faults.py`);
6. draws: each call draws from its own request's random numbers (`draws.py`);
7. observation, and the adapters of the rows (`model_runner.py`, `adapters/hooks.py`);
8. sweep: load streamed weights, and run other forwards meanwhile (`sweep.py`);
9. the device: it is notified of the launch.

Inside of them the fuser joins the calls. A group wraps the module's own `forward`
(`group/leader.py`): any caller of that, even a comparison in probation, runs it in all ranks.
"""

from collections.abc import Callable, Mapping
from functools import partial

from carpool.engine.draws import Draws
from carpool.engine.execute import RunCalls, Wrapper, fitting
from carpool.engine.parts import EngineParts
from carpool.engine.prefixes import Prefixes
from carpool.engine.probation.guesses import Fused
from carpool.engine.probation.probation import Probation
from carpool.engine.sweep import free_last


def wrapped(
    run: RunCalls,
    parts: EngineParts,
    probation: Probation,
    fused: Fused,
    inner: Wrapper,
    observe: Wrapper,
    free: Callable[[], None],
) -> Mapping[tuple[bool, bool], RunCalls]:
    """A function that runs forwards, wrapped: by whether encoders are called, and several at once.

    Args:
        fused: runs a forward to compare with, for probation.
        inner: the wrapper of the engine's owner.
        observe: the wrapper of the model runner.
        free: releases cached device memory.
    """
    if parts.sweeps is not None:
        run = parts.sweeps.around(run)
    device, is_group = parts.loaded.device.torch, parts.loaded.group is not None
    run = Draws(device, is_group=is_group).around(observe(run))
    if parts.faults is not None:
        run = parts.faults.around(run, is_exact=parts.settings.numerics == "exact")
    run, retry = inner(run), partial(free_last, free)
    lone, shared = fitting(run, retry), fitting(probation.around(run, fused), retry)
    prefixes, around = Prefixes(parts.conditioning, parts.stages), parts.conditioning.around
    return {
        (False, False): lone,
        (False, True): shared,
        (True, False): around(prefixes.around(lone)),
        (True, True): around(prefixes.around(shared)),
    }
