"""Run the requests of a check alone and together, in both numerics, and as plain diffusers.

The engine is the production engine. Its policy fuses as much as memory permits, so the fused calls
do not depend on the speed of the machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch

from carpool.config import EngineSettings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.loop import EngineCore
from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.model.modular import call_plainly
from carpool.errors import CarpoolError, PipelineFailed
from carpool.request.card import Card
from carpool.schedule.cost import Costs
from carpool.settings.engine import Numerics
from carpool.types import CheckedRequest
from carpool_lab.check.lockstep import Lockstep, OutcomeListener
from carpool_lab.check.requests import FIRST_ARRIVALS, described
from carpool_lab.check.watch import ForwardChecker, ObservedCalls, apart

MAX_ROUNDS = 6  # runs of all requests, until no call is on probation, plus one

OnForward = Callable[[], object]
OutputFields = Mapping[str, Any]  # fields of a pipeline's output


@dataclass(frozen=True, slots=True)
class Method:
    """How a component's calls of one method fused: a row of the report."""

    name: str  # "transformer.forward"
    calls: ObservedCalls
    how: str  # table, proven, probation, alone, exclusive
    why: str

    @property
    def fuses(self) -> bool:
        return self.how in ("table", "proven")


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of one numerics mode."""

    difference: float  # maximum over all values, together against alone
    methods: tuple[Method, ...]  # in order of use
    alone: tuple[OutputFields, ...]


def prove(
    loaded: LoadedPipeline,
    settings: EngineSettings,
    requests: Sequence[CheckedRequest],
    *,
    table: StoredCosts,
    tick: OnForward,
) -> dict[str, Proof]:
    """Run the requests alone and together in each numerics mode, by name.

    Raises:
        CarpoolError: a request failed; the message names it.
    """
    return {
        mode: _prove(loaded, replace(settings, numerics=mode), requests, table, tick)
        for mode in get_args(Numerics)
    }


def _prove(
    loaded: LoadedPipeline,
    settings: EngineSettings,
    requests: Sequence[CheckedRequest],
    table: StoredCosts,
    tick: OnForward,
) -> Proof:
    watch = ForwardChecker(loaded.device, measures=settings.numerics == "fast")
    before, table.costs = table.costs, Costs()  # comparisons slow the forwards down
    engine = EngineCore(
        replace(loaded, undo=lambda: None),  # further engines need the patches
        replace(
            settings, max_batch_size=64, max_decode_size=64, max_running=64, conditioning_cache=0.0
        ),
        off_loop=lambda work: work(),
        table=table,
        policy=Lockstep(loaded.device),
        around=watch.around,
    )
    engine.enter()
    report = engine.runner.probation.report
    try:
        alone = [_run(engine, [request], "alone", tick)[0] for request in requests]
        difference, is_settled = 0.0, False
        for _ in range(MAX_ROUNDS):
            together = _run(engine, requests, "together", tick)
            difference = max(
                difference, *(apart_of(a, b) for a, b in zip(together, alone, strict=True))
            )
            if is_settled:
                break
            is_settled = all(line["fuses"] != "probation" for line in report())
        timelines = [engine.timeline(request.request_id) or {} for request in requests]
        exclusive = {name for entry in timelines for name in entry.get("exclusive", ())}
        lines = report()
    finally:
        table.costs = before
        engine.leave()
    methods = [_method(name, calls, lines, exclusive) for name, calls in watch.methods.items()]
    return Proof(difference, tuple(methods), tuple(alone))


def _method(
    name: str, calls: ObservedCalls, lines: Sequence[Mapping[str, Any]], exclusive: set[str]
) -> Method:
    """Combine the observations with the engine's proofs, by component or class."""
    component, _, method = name.rpartition(".")
    if component.partition(".")[0] in exclusive and calls.max_requests == 1:
        return Method(name, calls, "exclusive", "requests change it while they run")
    if method in ("generate", "prefill"):
        fuses = "table" if calls.max_requests > 1 else "alone"
        return Method(name, calls, fuses, "writes text: prompts are read alone, tokens together")
    kinds = [line for line in lines if line["call"] == f"{calls.class_name}.{method}"]
    tables = [line for line in lines if line["call"] == name and line["fuses"] == "table"]
    if not tables and not kinds:
        return Method(name, calls, "alone", "has no table, and none could be inferred")
    whys = [f"{line['fuses']}: {line['why']}" for line in kinds if line["fuses"] != "proven"]
    why = "; ".join(dict.fromkeys(whys))
    if calls.max_requests > 1 or len(whys) < len(kinds):
        return Method(name, calls, "table" if tables else "proven", why)
    if whys:
        how = "alone" if any(line["fuses"] == "alone" for line in kinds) else "probation"
        return Method(name, calls, how, why)
    return Method(name, calls, "alone", "no two of these requests had calls that may share one")


def _run(
    engine: EngineCore, requests: Sequence[CheckedRequest], how: str, tick: OnForward
) -> list[OutputFields]:
    """Run requests together; some at once, the rest after these have made a step."""
    listeners = [OutcomeListener() for _ in requests]
    pairs = list(zip(requests, listeners, strict=True))
    for request, listener in pairs[:FIRST_ARRIVALS]:
        engine.submit(request, listener)
    while not listeners[0].has_begun and engine.step():
        pass
    for request, listener in pairs[FIRST_ARRIVALS:]:
        engine.submit(request, listener)
    while engine.step():
        pass
    answers: list[OutputFields] = []
    for request, listener in pairs:
        assert listener.outcome is not None, "a request without an end"
        error = listener.error
        if isinstance(error, CarpoolError):
            text = f"a request ({described(request)}) failed {how}: {error.message}"
            raise type(error)(text, param=error.param) from error
        if error is not None:
            raise error
        answers.append(listener.outcome.fields)
        tick()
    return answers


def apart_of(first: OutputFields, second: OutputFields) -> float:
    """The maximum difference over all values of two answers."""
    return apart(*([_as_tensor(fields[k]) for k in sorted(fields)] for fields in (first, second)))


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, (list, tuple)):
        return [_as_tensor(entry) for entry in value]
    if hasattr(value, "getpixel"):  # a PIL image
        return torch.from_numpy(np.array(value)) / 255
    return value


@dataclass(frozen=True, slots=True)
class PlainComparison:
    """The difference between plain diffusers and the engine with one request."""

    difference: float | None  # None: it cannot be compared
    why: str = ""


def plain(
    loaded: LoadedPipeline,
    requests: Sequence[CheckedRequest],
    alone: Sequence[OutputFields],
    tick: OnForward,
) -> PlainComparison:
    """Run the requests on the pipeline itself. This may change the pipeline, so call it last.

    A pipeline that draws random numbers outside of its generator cannot be compared: the engine
    gives each request its own. Two runs with different global seeds detect this.
    """
    difference = 0.0
    with torch.no_grad():
        for request, expected in zip(requests, alone, strict=True):
            try:
                answer = _plain(loaded, request, seed=request.seed)
                if gap := apart_of(answer, expected):
                    second = _plain(loaded, request, seed=request.seed + 1)
                    if apart_of(answer, second):
                        return PlainComparison(None, "it draws numbers without its generator")
            except CarpoolError:
                raise
            except Exception as error:
                message = f"{type(error).__name__}: {str(error)[:200]}"
                raise PipelineFailed(
                    f"a request ({described(request)}) fails with plain diffusers only: {message}"
                ) from error
            difference = max(difference, gap)
            tick()
    return PlainComparison(difference)


def _plain(loaded: LoadedPipeline, request: CheckedRequest, *, seed: int) -> OutputFields:
    pipe, task = loaded.originals[request.task], loaded.card.task(request.task)
    arguments = dict(request.arguments)
    if task.takes("generator"):
        arguments["generator"] = torch.Generator().manual_seed(request.seed)
    torch.manual_seed(seed)
    return call_plainly(pipe, arguments)


def limit(card: Card, loaded: LoadedPipeline, requests: Sequence[CheckedRequest]) -> float | None:
    """The limit of `docs/numerics.md` for differences in fast numerics; None: not stated.

    It is stated for float32. On CUDA, convolutions may round to TensorFloat-32.
    """
    is_tf32 = loaded.device.type == "cuda" and torch.backends.cudnn.allow_tf32
    if loaded.device.dtype is not torch.float32 or is_tf32:
        return None
    return 2e-5 if card.task(requests[0].task).makes == "pictures" else 1e-4
