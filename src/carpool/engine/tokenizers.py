"""Tokenize long texts on another thread, so that other requests do not wait.

A tokenizer takes up to 140 ms for the 32,000 characters that a request may have, and pipelines call
theirs several times. So a fiber that tokenizes a long text parks on a `HostCall`, which the engine
runs on another thread. Short texts are tokenized in place, in less time than a turn of the main
loop.

A fast tokenizer fails when two threads use it at once, so the other thread uses copies.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from carpool.engine.execute import Failure
from carpool.engine.fiber import current_context, in_fiber, park
from carpool.engine.nested import leaves_in

LONG_TEXT = 1000  # characters; the slowest kind of text of this length takes 4 ms
_METHODS = ("__call__", "encode", "tokenize", "apply_chat_template")
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class HostCall:
    """Work outside of the main loop, for which a fiber is parked."""

    run: Callable[[], Any]  # on another thread; may raise
    waits: bool = False  # it waits for another server, on its own thread


def run_on_host(work: HostCall, give: Callable[[Any], None]) -> None:
    """Run a request's host call, and hand its result to the engine's thread."""
    try:
        result = work.run()
    except BaseException as error:  # raised again in the request's fiber
        result = Failure(error)
    give(result)


def beside_loop(work: Callable[[Callable[[float], None]], Any]) -> Any:
    """Do long work of a pipeline on the thread of host calls, one request's after another's.

    Args:
        work: is called with a function to be told the share that is done; it raises `Cancelled`
            once the request has ended.
    """
    if not in_fiber():
        return work(lambda share: None)
    return park(HostCall(functools.partial(work, current_context().tell_share)))


class Tokenizers:
    """The tokenizers of one pipeline."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        parts = [(part, getattr(part, "tokenizer", None)) for part in components.values()]
        tokenizers = {
            id(t): t for pair in parts for t in pair if isinstance(t, PreTrainedTokenizerBase)
        }
        self._originals = [(t, type(t), copy.deepcopy(t)) for t in tokenizers.values()]

    def install(self) -> None:
        for tokenizer, cls, twin in self._originals:
            tokenizer.__class__ = _parking(cls, twin)

    def remove(self) -> None:
        """Restore every tokenizer to its state before `install`. Harmless when not installed."""
        for tokenizer, cls, _ in self._originals:
            tokenizer.__class__ = cls


def _parking(cls: type, twin: PreTrainedTokenizerBase) -> type:
    """Subclass a tokenizer's class so that its methods park the fiber for long texts.

    Args:
        twin: a copy of the tokenizer, for the other thread.
    """

    def parking(name: str) -> Callable[..., Any]:
        plain = getattr(cls, name)

        @functools.wraps(plain)  # pipelines inspect the signatures
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not in_fiber():
                return plain(self, *args, **kwargs)
            if (note := getattr(current_context(), "note_texts", None)) is not None:
                note((args, kwargs))
            if characters((args, kwargs)) <= LONG_TEXT:
                return plain(self, *args, **kwargs)
            # pipelines set attributes such as `padding_side`
            plain_attributes = {k: v for k, v in vars(self).items() if isinstance(v, _PLAIN)}

            def run() -> Any:
                vars(twin).update(plain_attributes)
                return getattr(twin, name)(*args, **kwargs)

            return park(HostCall(run))

        return method

    methods = {name: parking(name) for name in _METHODS if hasattr(cls, name)}
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), methods | names)


def characters(value: Any) -> int:
    """The number of characters in a text, or in all texts of nested lists and dicts."""
    return sum(map(len, leaves_in(value, str)))
