"""The journal of a request: the answers of its calls, with which another worker continues it.

A pipeline is code whose only inputs are its arguments, its random numbers and the answers of its
modules. The first two can be recomputed from the request; the answers are recorded as they come.
Replaying them brings the same code to the same point without any forward, and it continues from
there. A missing answer does no harm: that call runs again. So only safe answers are recorded. The
calls that always run: calls in a request's own state, which they may change; calls that change
their arguments; decodes, as the remaining work is short; calls whose arguments or answers are of
unknown classes or expensive to copy.

Each entry has a mark: the method, the form of the arguments, the code, the weights and the
request. On a mismatch the journal is dropped, and the request runs from its start.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from carpool.engine import serialization
from carpool.engine.containment import TurnStage
from carpool.engine.digests import raw_bytes
from carpool.engine.identity import identity_of_answers
from carpool.engine.intercept import Call
from carpool.engine.language.own_cache import OwnCache
from carpool.engine.language.parts import PREFILL
from carpool.engine.model.device import Device
from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.nested import tensors_in
from carpool.engine.observe.timeline import Timeline
from carpool.types import CheckedRequest, JournalEntry, Phase

log = logging.getLogger("carpool")

MOST_BYTES = 16 << 20  # the largest recorded answer
SMALL_BYTES = 64 << 10  # on the host: packed at once, which takes no longer than a copy
MOST_VALUES = 4  # entries; the mark of a host tensor up to this size has its values: timesteps
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Mismatch(Exception):
    """The journal belongs to another request, model or code."""


@dataclass(slots=True)  # frozen ones are slower to create
class Answered:
    """An answer to record. Its tensors are private to it."""

    request_id: str
    number: int
    mark: bytes
    answer: Any  # bytes: already packed
    device: Device
    moment: Any  # the device's event after its computation
    size: int  # bytes of all tensors

    def entry(self) -> JournalEntry:
        """The answer as bytes, once the device has computed it. On any thread."""
        if isinstance(self.answer, bytes):
            return JournalEntry(self.number, self.mark, self.answer)
        packed = serialization.pack(
            self.answer, lambda tensor: self.device.to_host(tensor, mark=self.moment)
        )
        return JournalEntry(self.number, self.mark, packed)


Sink = Callable[[Answered], None]
OnPassed = Callable[[str, int], None]
"""Called with a request's id and the number of an answered call."""


class Journal:
    """The journal of one request, in the engine: see `request.AnswerSource`.

    Args:
        past: the answers that an earlier run of the request recorded, in order.
        sink: takes the answers of this run, on the engine's thread; must not block. None: no
            journal is recorded.
        on_unkept: called like `sink`, for calls that ran and are not recorded.
        on_replayed: called like `sink`, for the last replayed call.
    """

    stage: ClassVar[TurnStage] = "journal"
    warning: ClassVar[str] = ""
    phases: ClassVar[tuple[Phase, ...]] = ("encode", "denoise", "decode")

    def __init__(
        self,
        past: Sequence[JournalEntry] = (),
        sink: Sink | None = None,
        on_unkept: OnPassed | None = None,
        on_replayed: OnPassed | None = None,
    ) -> None:
        self._past, self._sink = list(past), sink
        self._on_unkept, self._on_replayed = on_unkept, on_replayed
        self._next = 0  # index into the past
        self._calls = 0
        self._asked_arguments: Mapping[str, Any] | None = None  # the last call's
        self._mark: bytes | None = None  # mark of that call; None: it is not recorded
        self._versions: list[tuple[Tensor, int]] = []  # tensors of its arguments, with versions
        self._forms: Forms = {}
        self._identity, self._request_id = b"", ""
        self._device: Device
        self._timeline: Timeline
        self._missing_answers = 0  # calls that ran unrecorded, and would run again

    def begin(self, model: "Identity", request: CheckedRequest, timeline: Timeline) -> None:
        """Start, or restart, the journal with its request."""
        self._request_id, self._device, self._timeline = request.request_id, model.device, timeline
        self._calls = self._next = self._missing_answers = 0
        self._asked_arguments = None
        try:
            self._identity = model.of(request)
        except Exception:  # an unknown kind of model is served without a journal
            log.exception("request %s has no journal", request.request_id)
            self._past, self._sink = [], None

    @property
    def is_whole(self) -> bool:
        """Whether another engine could resume here without a forward."""
        return self._sink is not None and not self._missing_answers

    def drop(self) -> None:
        """Drop the recorded answers of the earlier run."""
        self._past.clear()

    @property
    def is_replaying(self) -> bool:
        """Whether recorded answers are left to replay."""
        return self._next < len(self._past)

    def answer(self, call: Call) -> Any | None:
        """The recorded answer of a call; None if it has to run. Call it once for each call.

        Raises:
            Mismatch: the recorded answers do not match this request.
        """
        if _is_prompt(call):
            return None  # how a prompt is cut differs from run to run
        self._calls, self._asked_arguments = self._calls + 1, call.kwargs
        self._mark, self._versions = None, []
        if (self._sink is None and not self.is_replaying) or not _is_kept(call):
            self._skip_recording()
            return None
        try:
            self._mark = _mark(self._identity, call, self._forms, self._versions)
        except _Unknown:
            self._skip_recording()
            return None
        if not self.is_replaying:
            return None
        entry = self._past[self._next]
        if entry.number > self._calls:
            return None  # not recorded
        if entry.number < self._calls or entry.mark != self._mark:
            raise Mismatch(f"call {self._calls}, to {call.target.component}, differs")
        try:
            answer = serialization.unpack(entry.answer, self._device.torch)
            if (cache := _cache_of(call)) is not None:
                answer, growth = answer
                cache.grow(growth)
        except (ValueError, TypeError, RuntimeError) as error:
            raise Mismatch(str(error)) from error
        self._next += 1
        self._timeline.replayed_calls += 1
        self._mark = self._asked_arguments = None
        if self._next == len(self._past) and self._on_replayed is not None:
            self._on_replayed(self._request_id, self._calls)
        return answer

    def _skip_recording(self) -> None:
        """Note a call that runs and is not recorded."""
        if self.is_replaying and self._past[self._next].number <= self._calls:
            raise Mismatch(f"call {self._calls} differs")

    def ran(self, call: Call, answer: Any) -> None:
        """Observe an answer; a call not passed to `answer` was answered by an earlier source."""
        if _is_prompt(call):
            self._missing_answers += 1
            return
        if call.kwargs is not self._asked_arguments:
            self._calls, self._mark = self._calls + 1, None
            return
        self._asked_arguments = None
        mark, self._mark = self._mark, None
        if self.is_replaying or mark is None or not self._keep(call, answer, mark):
            self._missing_answers += 1
            if self._on_unkept is not None and not self.is_replaying:
                self._on_unkept(self._request_id, self._calls)

    def _keep(self, call: Call, answer: Any, mark: bytes) -> bool:
        """Record an answer if possible; returns whether it was recorded."""
        if self._sink is None or not _is_kept(call):
            return False
        before, self._versions = self._versions, []
        for tensor, version in before:
            if tensor._version != version:
                return False  # the call has changed its arguments
        try:
            if (cache := _cache_of(call)) is not None:
                answer = answer, cache.growth()
            if (size := serialization.size(answer)) > MOST_BYTES:
                _log_once(call, f"one takes {size >> 20} MiB, the limit is {MOST_BYTES >> 20}")
                return False
        except (serialization.Unpackable, RuntimeError) as error:
            _log_once(call, f"they hold {error}")
            return False
        device, moment = self._device, None
        try:
            if device.is_accelerator or size > SMALL_BYTES:
                copy: Any = serialization.copied(answer)
                moment = device.mark()
            else:
                copy = serialization.pack(answer)
        except torch.OutOfMemoryError:
            return False
        self._sink(Answered(self._request_id, self._calls, mark, copy, device, moment, size))
        return True


_logged: set[tuple[str, str]] = set()


def _log_once(call: Call, why: str) -> None:
    name = call.target.component, call.target.method
    if name not in _logged:
        _logged.add(name)
        log.warning(
            "answers of %s.%s are not recorded (%s): if a worker dies, these calls run again",
            *name, why,
        )  # fmt: skip


def _is_kept(call: Call) -> bool:
    """Whether an answer may be written down; logits are large, and soon made again."""
    target = call.target
    return target.phase != "decode" and not target.is_exclusive and target.method != "logits"


def _is_prompt(call: Call) -> bool:
    """Whether a call prefills a part of a prompt."""
    cache = _cache_of(call)
    return call.target.method == PREFILL or (cache is not None and cache.prompt is not None)


def _cache_of(call: Call) -> OwnCache | None:
    """The keys and values of a text, to which a call adds a token."""
    return next((v for v in call.kwargs.values() if isinstance(v, OwnCache)), None)


class _Unknown(Exception):
    """An argument is of an unknown class, with unknown content."""


Forms = dict[str, tuple[Tensor, int, str]]
"""The tensors of the last call, their versions and forms, by argument name."""


def _mark(identity: bytes, call: Call, forms: Forms, versions: list[tuple[Tensor, int]]) -> bytes:
    """The mark of a call; adds the tensors of its arguments, with their versions."""
    parts = [call.target.component, call.target.method]
    for name, value in call.arguments().items():
        if not isinstance(value, Tensor):
            parts += name, _form(value)
            if type(value) not in _PLAIN:
                versions += [(t, t._version) for t in tensors_in(value) if not t.is_inference()]
        elif value.is_inference():
            parts += name, _form(value)
        else:  # most arguments are the same objects at every step
            version, last = value._version, forms.get(name)
            if last is None or last[0] is not value or last[1] != version:
                last = forms[name] = value, version, _form(value)
            parts += name, last[2]
            versions.append((value, version))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12, key=identity).digest()


@lru_cache(4096)
def _shape_form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype}{tuple(shape)}"


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        text = _shape_form(value.dtype, value.shape)
        if value.numel() <= MOST_VALUES and value.device.type == "cpu":
            return f"{text}{value.tolist()}"
        return text
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, OwnCache):
        return repr(value)
    if type(value) in (list, tuple, torch.Size):
        return f"[{','.join(map(_form, value))}]"
    if type(value) is dict:
        return f"{{{','.join(f'{n!r}:{_form(entry)}' for n, entry in value.items())}}}"
    raise _Unknown


class Identity:
    """The identity of a model and a request, for a journal's marks.

    Args:
        lora: returns the identity of an adapter by its name.
    """

    def __init__(self, loaded: LoadedPipeline, lora: Callable[[str], bytes]) -> None:
        self._loaded, self._lora, self.device = loaded, lora, loaded.device
        self._digest = b""  # lazy: it reads a little of each weight

    def of(self, request: CheckedRequest) -> bytes:
        """A digest of the model and this request."""
        self._digest = self._digest or identity_of_answers(self._loaded)
        digest = hashlib.blake2b(self._digest, digest_size=32)
        plain = replace(
            request, arguments={}, request_id="", group="", timeout_s=None, deadline_s=None
        )
        digest.update(repr(plain).encode())
        for name in sorted(request.arguments):
            digest.update(f"{name}={_content(request.arguments[name])}\0".encode())
        for name, _ in request.lora:
            digest.update(self._lora(name))
        return digest.digest()


def _content(value: Any) -> str:
    """A request's value as text, equal in every process."""
    if hasattr(value, "tobytes"):  # an image or an array
        form = getattr(value, "mode", getattr(value, "dtype", ""))
        size = getattr(value, "size", "")
        return f"{form}{size}{hashlib.blake2b(value.tobytes()).hexdigest()}"
    if isinstance(value, Tensor):
        raw = raw_bytes(value).cpu().numpy().data
        return f"{_form(value)}{hashlib.blake2b(raw).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_content, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{n}:{_content(entry)}' for n, entry in value.items())}}}"
    return repr(value)
