"""What stands around a forward that answers requests: one list of wrappers, in one order.

`execute` runs the outermost one, and cuts what raises in two. A wrapper takes the function that
makes a forward of parked calls and gives one that does the same, and something beside:

1. the conditioning cache: equal calls run once (`conditioning_cache.py`);
2. tiles: a call that does not fit the memory runs again, then in tiles (`tiles.py`);
3. probation: calls whose fusing is not proven run apart, and then together (`probation/`);
4. the wrapper of the engine's owner;
5. faults on purpose (`faults.py`);
6. draws: each call's random numbers are its own request's (`draws.py`);
7. observation: the heartbeat, the stopwatch, and the observers (`model_runner.py`);
8. adapters of its rows (`adapters/hooks.py`);
9. sweep: streamed weights are loaded, and other forwards run meanwhile (`sweep.py`);
10. the device, which is told of the launch.

Inside of them the fuser joins the calls. A group stands around the module's own `forward`
(`group/leader.py`): whatever runs that, a comparison in probation too, runs it in all ranks.
"""

from collections.abc import Callable

from carpool.engine.draws import Draws
from carpool.engine.execute import Wrapper
from carpool.engine.parts import EngineParts
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
    """The wrappers of one engine, the outermost first.

    Args:
        fused: makes a forward to compare with, for probation.
        inner: of the engine's owner.
        observe: the model runner's.
        free: gives cached device memory back.
    """
    chain: list[Wrapper] = [
        parts.conditioning.around,
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
