"""The wrappers around a forward that answers requests, in one order.

`execute` calls the outermost one, and cuts a forward that raises in two. A wrapper is a decorator:
it takes the function that runs a forward of parked calls, and returns one that does more around it:

1. the conditioning cache: equal calls of encoders run once (`conditioning_cache.py`), and a prompt
   starts from its cached beginning (`prefixes.py`);
2. tiles: a call that runs out of memory runs again, then in tiles (`tiles.py`);
3. probation: calls without proof that they fuse run apart, and then together (`probation/`);
4. the wrapper of the engine's owner;
5. faults on purpose (`faults.py`);
6. draws: each call draws from its own request's random numbers (`draws.py`);
7. observation: the heartbeat, the stopwatch, and the observers (`model_runner.py`);
8. adapters of the rows (`adapters/hooks.py`);
9. sweep: load streamed weights, and run other forwards meanwhile (`sweep.py`);
10. the device: it is notified of the launch.

Inside of them the fuser joins the calls. A group wraps the module's own `forward`
(`group/leader.py`): any caller of that, even a comparison in probation, runs it in all ranks.
"""

from collections.abc import Callable

from carpool.engine.draws import Draws
from carpool.engine.execute import Wrapper
from carpool.engine.parts import EngineParts
from carpool.engine.prefixes import Prefixes
from carpool.engine.probation.guesses import Fused
from carpool.engine.probation.probation import Probation
from carpool.engine.tiles import Tiles


def wrappers(
    parts: EngineParts,
    probation: Probation,
    fused: Fused,
    inner: Wrapper,
    observe: Wrapper,
    free: Callable[[], None],
) -> list[Wrapper]:
    """The wrappers of one engine, outermost first.

    Args:
        fused: runs a forward to compare with, for probation.
        inner: the wrapper of the engine's owner.
        observe: the wrapper of the model runner.
        free: releases cached device memory.
    """
    prefixes = Prefixes(parts.conditioning, parts.stages)
    chain: list[Wrapper] = [
        lambda run: parts.conditioning.around(run, prefixes.around(run)),
        Tiles(free).around,
        lambda run: probation.around(run, fused),
        inner,
        Draws(parts.loaded.device.torch, is_group=parts.loaded.group is not None).around,
        observe,
        parts.adapters.around,
    ]
    if parts.faults is not None:
        faults, is_exact = parts.faults, parts.settings.numerics == "exact"
        chain.insert(4, lambda run: faults.around(run, is_exact=is_exact))
    if parts.sweeps is not None:
        chain.append(parts.sweeps.around)
    return chain
