"""The data types that every part of Carpool shares.

Plain data: no torch, no I/O, no behaviour except derived values.
"""

import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Clock = Callable[[], float]
"""Monotonic seconds since a fixed time: `time.monotonic`, or a test's clock."""

OnProgress = Callable[[int, int], None]
"""Receives the finished and the total denoising steps."""

RequestSize = tuple[int | None, int | None, int | None]
"""Width, height and frames of a request; None: not set."""

Phase = Literal["encode", "denoise", "decode"]
"""The phase of a module call: encode inputs, denoise, decode the result."""

MAX_SEED = 2**63 - 1

BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1.2e3)
"""Upper bounds of the histogram of durations."""


def phase_of(component: str, method: str) -> Phase:
    """The phase of a component's method, by diffusers' naming conventions."""
    if method == "decode" or component in ("vocoder", "safety_checker"):
        return "decode"
    others = ("connectors", "conditioner")  # further encoders
    if method in ("encode", "generate") or "encoder" in component or component in others:
        return "encode"
    return "decode" if component == "vae" else "denoise"


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex[:16]}"


def new_seed() -> int:
    """A random seed for a request without one: 32 bits, short enough to type."""
    return random.SystemRandom().getrandbits(32)


@dataclass(frozen=True, slots=True, init=False)
class Request:
    """One prompt, one seed, one output.

    `parameters` are parameters of the pipeline's `__call__` (for example
    `num_inference_steps`, `guidance_scale`, `negative_prompt`). They are checked
    at submission, not here.
    """

    prompt: Any
    seed: int | None  # None: random; `Output.seed` reports it
    timeout_s: float | None  # from submission to result; None: no limit
    request_id: str
    tenant: str  # owner of the share of the device that it uses
    user: str  # users divide their tenant's share
    parameters: Mapping[str, Any] = field(hash=False)

    def __init__(
        self,
        prompt: Any = None,
        *,
        seed: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        tenant: str = "",
        user: str = "",
        **parameters: Any,
    ) -> None:
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "timeout_s", timeout_s)
        object.__setattr__(self, "request_id", request_id or new_request_id())
        object.__setattr__(self, "tenant", tenant)
        object.__setattr__(self, "user", user)
        object.__setattr__(self, "parameters", parameters)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A checked request for the engine: all values are valid, and the seed is set."""

    request_id: str
    seed: int
    arguments: Mapping[str, Any] = field(hash=False)  # arguments of the pipeline's `__call__`
    timeout_s: float | None = None
    task: str = "text-to-image"  # selects the model's pipeline
    lora: tuple[tuple[str, float], ...] = ()  # adapters with their scales
    deadline_s: float | None = None  # wanted, from submission; unlike `timeout_s` it ends nothing
    priority: int = 0  # -10 to 10; higher goes first
    tenant: str = ""  # owner of the share of the device that it uses
    previews: int = 0  # most previews during denoising, evenly spaced
    user: str = ""  # users divide their tenant's share
    output_type: str | None = "pil"  # default of `arguments`; None: the pipeline's own
    group: str = ""  # id of the group of outputs from one request
    group_size: int = 1  # number of outputs in the group
    model: str = ""  # served model; empty: the server's first
    step_cache: float | None = None  # threshold for skipping steps; 0: off; None: the default
    scheduler: str | None = None  # a sampler of `request.samplers`; None: the model's own
    enhance_prompt: bool = False  # the server's rewriter rewrites the prompt
    prompt_weights: bool | None = None  # weights in prompts are read; None: not set
    warnings: tuple[str, ...] = ()  # texts for its answer, about fields that change nothing


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The stored answer of one call of a request: see `carpool.engine.journal`."""

    number: int  # number of the call in the request, from 1
    mark: bytes  # digest of the target and the form of its arguments
    answer: bytes  # serialized


@dataclass(frozen=True, slots=True)
class Timings:
    """A request's times, seconds. Phases include waiting for a forward."""

    queue_s: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """An event of one request."""

    kind: Literal["queued", "started", "prompt", "step", "preview", "finished"]
    request_id: str
    at_s: float  # engine clock
    step: int = 0  # denoising steps done
    steps: int = 0  # total denoising steps
    error: Exception | None = None  # error of `finished`; None: success
    picture: Any = None  # `preview`: an array (height, width, 3), 0-255
    text: str = ""  # `prompt`: the rewritten prompt so far; `preview`: a text's new part
