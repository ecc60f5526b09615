"""What requests are likely to cost, from what their forwards took: what policies see of them."""

from collections.abc import Hashable
from math import inf

from torch import Tensor

from carpool.engine.execute import Ready
from carpool.engine.request import Rider
from carpool.request.parameters import Card
from carpool.schedule.cost import Costs
from carpool.schedule.peers.compatibility import cost, request_key, resolution, signature
from carpool.types import CallKind, CheckedRequest, ParkedCall, QueuedRequest

MAX_KINDS = 4096  # remembered by fuse key
SIZES = ("width", "height", "num_frames")


class Forecast:
    """Predicts the work of requests, in seconds alone on the device. The engine's thread only.

    The work of a request is its denoising steps times what a step of its size takes. Before any
    forward was run that is a guess: one second a step, for everybody alike.
    """

    def __init__(self, card: Card, costs: Costs, vae_scale_px: int) -> None:
        self._card, self._costs, self._vae_scale_px = card, costs, vae_scale_px
        self._defaults = _defaults(card)
        self._kinds: dict[Hashable, CallKind] = {}
        self._step_calls: dict[Hashable, tuple[CallKind, int]] = {}  # by size: one denoising call
        self._last_step_call: tuple[CallKind, int] | None = None
        self._calls_a_step = 1.0

    def kind(self, ready: Ready) -> CallKind:
        """What kind of forward a call needs, as far as its costs go."""
        known = self._kinds.get(ready.key)
        if known is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            known = self._kinds[ready.key] = _kind(ready)
        return known

    def parked(self, rider: Rider, ready: Ready, max_rows: int) -> ParkedCall:
        """The call that a rider is parked on, as a policy sees it."""
        kind, phase = self.kind(ready), ready.call.target.phase
        waiting = rider.waiting
        assert waiting is not None, "made when it came aboard"
        whole_s = waiting.whole_s
        if phase == "denoise":
            self._note_step(rider, kind, ready.rows)
            step_s = self._costs.seconds(kind, ready.rows) * self._calls_a_step
            left_s, whole_s = (rider.steps - rider.step) * step_s, rider.steps * step_s
        elif phase == "decode":
            left_s = self._costs.seconds(kind, ready.rows)
        else:
            left_s = whole_s
        return ParkedCall(
            order=rider.order,
            request=rider.number,
            key=ready.key,
            rows=ready.rows,
            max_rows=max_rows,
            phase=phase,
            kind=kind,
            arrived_s=rider.submitted_s,
            left_s=left_s,
            whole_s=whole_s,
            deadline_s=waiting.deadline_s,
            priority=waiting.priority,
            tenant=waiting.tenant,
            user=waiting.user,
        )

    def waiting(self, rider: Rider) -> QueuedRequest:
        """A request in the line, as a policy sees it."""
        job = rider.job
        size = resolution(job.arguments, self._card.default_size_px)
        frames = int(job.arguments.get("num_frames") or 1)
        whole_s = self.whole_s(job)
        return QueuedRequest(
            request=rider.number,
            arrived_s=rider.submitted_s,
            left_s=whole_s,
            whole_s=whole_s,
            deadline_s=inf if job.deadline_s is None else rider.submitted_s + job.deadline_s,
            priority=job.priority,
            tenant=job.tenant,
            user=job.user,
            cost=cost(size, frames=frames, vae_scale_px=self._vae_scale_px),
            signature=signature(job, self._defaults),
            wave=request_key(job, self._defaults),
        )

    def whole_s(self, job: CheckedRequest) -> float:
        """The predicted work of a request, from its beginning."""
        steps = max(1, self._card.steps(job.arguments))
        call = self._step_calls.get(_size(job), self._last_step_call)
        return steps * (self._costs.seconds(*call) * self._calls_a_step if call else 1.0)

    @property
    def is_informed(self) -> bool:
        """Whether predictions are more than a guess."""
        return self._last_step_call is not None

    @property
    def is_proven(self) -> bool:
        """Whether they stand on several forwards: the first ones may take far longer."""
        call = self._last_step_call
        return call is not None and self._costs.curve(call[0]).is_proven

    def _note_step(self, rider: Rider, kind: CallKind, rows: int) -> None:
        self._last_step_call = self._step_calls[_size(rider.job)] = kind, rows
        if rider.step > rider.counted_step:  # it parked for the first time in this step
            calls = (rider.denoiser_calls - 1) / rider.step
            self._calls_a_step += 0.5 * (calls - self._calls_a_step)
            rider.counted_step = rider.step


def _size(job: CheckedRequest) -> Hashable:
    return tuple(job.arguments.get(name) for name in SIZES)


def _defaults(card: Card) -> dict[str, object]:
    """What the pipeline takes for what a request leaves out."""
    own = {p.name: p.default for p in card.parameters if not p.required}
    width, height = card.default_size_px or (None, None)
    return {**own, "width": width, "height": height, **card.defaults}


def _kind(ready: Ready) -> CallKind:
    target, arguments = ready.call.target, ready.call.arguments()
    tensors: list[Tensor] = []
    for value in arguments.values():
        several = value if isinstance(value, (list, tuple)) else [value]
        tensors += [one for one in several if isinstance(one, Tensor)]
    leading = arguments.get(target.spec.rows) if target.spec else None
    shape = leading.shape[1:] if isinstance(leading, Tensor) else ()
    return CallKind(
        name=f"{target.component}.{target.method}",
        size=sum(one.numel() for one in tensors) // ready.rows,
        detail="x".join(map(str, shape)),
    )
