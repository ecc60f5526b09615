"""Predict the work of requests from learned costs, and build the policies' views."""

from collections.abc import Hashable, Mapping, Sequence
from math import isfinite
from typing import Any

from torch import Tensor

from carpool.engine.intercept import Call
from carpool.engine.language.parts import BLOCK, PREFILL, WRITING
from carpool.engine.nested import tensors_in
from carpool.engine.request import RequestState
from carpool.request.card import TEXT, Card
from carpool.request.enhancement import writer_of
from carpool.schedule.cost import Costs
from carpool.schedule.peers.compatibility import cost, request_key, resolution, signature
from carpool.schedule.sweep import step_seconds
from carpool.schedule.views import CallKind, ParkedCall, QueuedRequest
from carpool.telemetry.activity import RunningRequest, Snapshot, WaitingRequest
from carpool.types import CheckedRequest, RequestSize

MAX_SIZES = 64  # sizes with reported costs
MAX_KINDS = 4096  # cached by fuse key
MOST_LISTED = 256  # waiting requests listed in a snapshot
TEXTS = 8.0  # texts over which their usual length is a moving mean; half: it jumps
SIZES = ("width", "height", "num_frames")
"""The arguments that set the size of the output."""


class Predictor:
    """Predicts the work of requests, in seconds alone on the device at its usual speed.

    The engine's thread only.

    The work of a request is its denoising steps times the seconds of a step at its size. Before
    any forward has run that is a guess: one second a step for all.
    """

    def __init__(self, card: Card, costs: Costs, vae_scale_px: int) -> None:
        self._card, self.costs, self._vae_scale_px = card, costs, vae_scale_px
        self._defaults, self._size_px = _defaults(card), card.usual_size_px
        self._kinds: dict[Hashable, CallKind] = {}
        self._step_calls: dict[RequestSize, tuple[CallKind, int]] = {}  # denoising call of a step
        self._last_step_call: tuple[CallKind, int] | None = None
        self._calls_a_step = 1.0
        # a token's call, and the usual number of tokens, by what writes them
        self._texts: dict[str, tuple[CallKind, float]] = {}

    def _kind(self, state: RequestState) -> CallKind:
        """The cost kind of the call that a request is parked on."""
        kind = self._kinds.get(state.key)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[state.key] = _kind(state.call, state.rows)
        return kind

    def parked_call(self, state: RequestState, max_rows: int) -> ParkedCall:
        """The policy's view of the call that a request is parked on."""
        before, phase, timeline = state.parked, state.call.target.phase, state.timeline
        is_same = before is not None and before.key is state.key
        kind = before.kind if before is not None and is_same else self._kind(state)
        queued = state.queued or self.queued_request(state)
        left_s = whole_s = queued.whole_s
        if state.call.target.method in WRITING:
            state.writer = state.call.target.component
        if phase == "denoise":
            self._note_step(state, kind, state.rows)
            step_s = self.costs.baseline_s(kind, state.rows) * self._calls_a_step
            left_s, whole_s = (timeline.steps - timeline.step) * step_s, timeline.steps * step_s
        elif phase == "decode":
            left_s = self.costs.baseline_s(kind, state.rows)
        elif timeline.tokens:
            left_s = self.whole_s(state.request, timeline.tokens)
        return ParkedCall(
            state.order, state.number, state.key, state.rows, max_rows, phase, kind,
            queued.arrived_s, left_s, whole_s, queued.deadline_s, queued.priority, queued.tenant,
            queued.user, steps=timeline.steps,
            is_token=timeline.tokens > 0 and state.call.target.method in WRITING,
            is_text=state.call.target.method in WRITING and state.call.target.spec is not None,
        )  # fmt: skip

    def queued_request(self, state: RequestState) -> QueuedRequest:
        """The policy's view of a queued request; stored in `state.queued`."""
        request = state.request
        size = resolution(request.arguments, self._size_px)
        frames = int(request.arguments.get("num_frames") or 1)
        whole_s = self.whole_s(request)
        state.queued = QueuedRequest(
            state.number, state.submitted_s, whole_s, whole_s, state.deadline_at_s,
            request.priority, request.tenant, request.user,
            group=request.group, group_size=request.group_size,
            cost=cost(size, frames=frames, vae_scale_px=self._vae_scale_px),
            signature=signature(request, self._defaults),
            wave=request_key(request, self._defaults),
        )  # fmt: skip
        return state.queued

    def whole_s(self, request: CheckedRequest, written: int = 0) -> float:
        """The predicted work of a request from its start, or after so many tokens of its text."""
        token, usual = self._texts.get(writer_of(request), (None, 0.0))
        tokens = min(request.arguments.get("max_new_tokens") or usual, usual) - written
        text_s = max(0.0, tokens) * self._token_s(token) if token else 0.0
        steps = 0 if request.task.startswith(TEXT) else self._card.steps(request.arguments)
        return text_s + (steps or int(token is None)) * self._step_s(request)

    def _token_s(self, kind: CallKind) -> float:
        """Seconds of a text's token: its own code may take longer than the forward."""
        return self.costs.turn_s(kind, 1, self.costs.baseline_s(kind, 1))

    def _step_s(self, request: CheckedRequest) -> float:
        call = self._step_calls.get(_size(request), self._last_step_call)
        return self.costs.baseline_s(*call) * self._calls_a_step if call else 1.0

    def steps_left(self, state: RequestState) -> float:
        """Remaining steps, or tokens of a text; 0 before the first one.

        A text before a drawing counts as the steps that take as long.
        """
        line, request = state.timeline, state.request
        if line.steps or not line.tokens:
            return float(max(0, line.steps - line.step))
        token, _ = self._texts.get(writer_of(request), (None, 0.0))
        is_text = request.task.startswith(TEXT)
        unit_s = self._token_s(token) if token and is_text else self._step_s(request)
        return self.whole_s(request, line.tokens) / unit_s

    def ended(self, state: RequestState) -> None:
        """Learn from a request that has ended well how many tokens such requests write."""
        if tokens := state.timeline.tokens:
            writer, kind = writer_of(state.request), _kind_of_tokens(f"{state.writer}.generate", 1)
            _, before = self._texts.get(writer, (kind, tokens))
            self._texts[writer] = kind, before + (tokens - before) / TEXTS

    def prompt_part(self, component: str, tokens: int, drawing: Sequence[ParkedCall]) -> int:
        """How many of so many tokens of a prompt are read before others take their turn.

        Half as often as it takes to be done within a step of those that draw, or within the forward
        of a single token: less of it takes no less time.
        """
        part, costs = 1 << (tokens - 1).bit_length(), self.costs
        token = _kind_of_tokens(f"{component}.generate", 1)
        steps_s = [costs.baseline_s(call.kind, call.rows) for call in drawing]
        if steps_s and not costs.curve(token).is_empty:
            bound_s = max(*steps_s, costs.baseline_s(token, 1))
            while part > BLOCK and costs.baseline_s(token, part) > bound_s:
                part //= 2
        return part

    def step_costs(self, most_rows: int, most_running: int) -> dict[RequestSize, list[float]]:
        """Seconds of a denoising step, per size that has run, by the number of sharing requests."""
        durations: dict[RequestSize, list[float]] = {}
        for size, (kind, rows) in list(self._step_calls.items())[-MAX_SIZES:]:
            curve = self.costs.curve(kind)
            if not curve.is_empty:
                seconds = step_seconds(
                    self.costs, kind, rows, most_rows=most_rows, most_running=most_running
                )
                durations[size] = [second * self._calls_a_step for second in seconds]
        return durations

    def text_costs(self, most: int) -> dict[str, tuple[float, list[float]]]:
        """Usual tokens of texts, and seconds of a token, by number of sharing texts."""
        texts: dict[str, tuple[float, list[float]]] = {}
        for writer, (kind, tokens) in list(self._texts.items())[-MAX_SIZES:]:
            if self.costs.curve(kind).is_empty:  # all was replayed from journals
                continue
            forwards_s = step_seconds(self.costs, kind, 1, most_rows=most, most_running=most)
            turns_s = [self.costs.turn_s(kind, n, s) for n, s in enumerate(forwards_s, 1)]
            texts[writer] = tokens, turns_s
        return texts

    def is_informed(self, request: CheckedRequest) -> bool:
        """Whether the prediction for a request is more than a guess."""
        is_text, is_drawn = request.task.startswith(TEXT), self._last_step_call is not None
        return writer_of(request) in self._texts if is_text else is_drawn

    @property
    def is_proven(self) -> bool:
        """Whether predictions come from several forwards: the first ones are often slow."""
        call = self._last_step_call
        return call is not None and self.costs.curve(call[0]).is_proven

    def _note_step(self, state: RequestState, kind: CallKind, rows: int) -> None:
        self._last_step_call = kind, rows
        before = state.parked
        if before is None or before.kind is not kind or before.rows != rows:
            self._step_calls[_size(state.request)] = kind, rows
        step = state.timeline.step
        if step > state.counted_step:  # first call of the step
            calls = (state.denoiser_calls - 1) / step
            self._calls_a_step += 0.5 * (calls - self._calls_a_step)
            state.counted_step = step


def snapshot(
    now_s: float,
    running: Sequence[RequestState],
    queued: Sequence[RequestState],
    starts_s: Sequence[float | None],
    slowdown: float,
) -> Snapshot:
    """The current requests, for monitoring. From any thread."""
    requests = []
    for state in running:
        parked, line = state.parked, state.timeline
        is_predicted = parked is not None and isfinite(parked.left_s) and not line.part
        left_s = parked.left_s * slowdown if parked is not None and is_predicted else None
        about = line.request_id, line.phase, *line.progress
        requests.append(RunningRequest(state.number, *about, left_s, line.tokens))
    waits = [
        WaitingRequest(state.number, state.request_id, now_s - state.submitted_s, start_s)
        for state, start_s in zip(queued[:MOST_LISTED], starts_s, strict=False)
    ]
    return Snapshot(now_s, tuple(requests), tuple(waits), len(queued))


def unpredicted_request(state: RequestState) -> QueuedRequest:
    """The policy's view of a queued request without predictions."""
    request = state.request
    return QueuedRequest(
        state.number, state.submitted_s, 0.0, 0.0, state.deadline_at_s, request.priority,
        request.tenant, request.user, wave=state.number,
    )  # fmt: skip


def unpredicted_call(state: RequestState) -> ParkedCall:
    """The policy's view of a parked call without predictions: it runs alone."""
    request, phase = state.request, state.call.target.phase
    state.parked = ParkedCall(
        state.order, state.number, ("unpredicted", state.order), state.rows, state.rows, phase,
        arrived_s=state.submitted_s, deadline_s=state.deadline_at_s, priority=request.priority,
        tenant=request.tenant, user=request.user,
    )  # fmt: skip
    return state.parked


def _size(request: CheckedRequest) -> RequestSize:
    width, height, frames = (request.arguments.get(name) for name in SIZES)
    return width, height, frames


def _defaults(card: Card) -> dict[str, object]:
    """Default values of missing parameters."""
    defaults = {p.name: p.default for p in card.parameters if not p.required}
    width, height = card.usual_size_px or (None, None)
    return {**defaults, "width": width, "height": height, **card.defaults}


def _kind(call: Call, rows: int) -> CallKind:
    target, arguments = call.target, call.arguments()
    name = f"{target.component}.{target.method}"
    if target.method in ("generate", PREFILL):
        name = f"{target.component}.generate"
        return _token_kind(name, arguments) if target.spec is None else _kind_of_tokens(name, 1)
    leading = arguments.get(target.spec.rows) if target.spec else None
    shape = leading.shape[1:] if isinstance(leading, Tensor) else ()
    size = sum(tensor.numel() for tensor in tensors_in(arguments))
    return CallKind(name, size // rows, "x".join(map(str, shape)))


def _token_kind(name: str, arguments: Mapping[str, Any]) -> CallKind:
    """The kind of a text-generating call: by its number of new tokens, up to a power of two.

    The text before lengthens its mask with each token, but hardly its duration.
    """
    ids = next((arguments[n] for n in _READ if isinstance(arguments.get(n), Tensor)), None)
    tokens = 1 if ids is None else ids.numel() if ids.ndim < 3 else ids.shape[0] * ids.shape[1]
    return _kind_of_tokens(name, tokens)


def _kind_of_tokens(name: str, tokens: int) -> CallKind:
    size = 1 << (tokens - 1).bit_length()
    return CallKind(name, size, "token" if size == 1 else f"{size} tokens")


_READ = ("decoder_input_ids", "input_ids", "inputs_embeds")
