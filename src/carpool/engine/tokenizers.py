"""Tokenize long texts on a thread of their own, so that other requests do not wait for it.

A tokenizer takes up to 140 ms for the 32,000 characters that a request may have, and pipelines
call theirs several times. So a fiber that calls one with a long text parks on a `HostCall`, which
the engine runs on another thread. Short texts are tokenized in place, in less time than a turn of
the main loop takes.

A fast tokenizer fails when two threads use it at once, so the other thread uses copies.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from carpool.engine.execute import Failure
from carpool.engine.fiber import current_context, in_fiber, park

LONG_TEXT = 1000  # characters; of the slowest kind of text they take 4 ms
_METHODS = ("__call__", "encode", "tokenize", "apply_chat_template")
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class HostCall:
    """Work that a fiber is parked on and that needs no device."""

    run: Callable[[], Any]  # on any one thread; may raise
    waits: bool = False  # for another server: on a thread of its own


def run_on_host(work: HostCall, give: Callable[[Any], None]) -> None:
    """Do the work of a request, and give its result to its engine's thread."""
    try:
        result = work.run()
    except BaseException as error:  # raised where the request called it
        result = Failure(error)
    give(result)


class Tokenizers:
    """The tokenizers of one pipeline."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        tokenizers = {id(tokenizer): tokenizer for tokenizer in _tokenizers_in(components.values())}
        self._originals = [(t, type(t), copy.deepcopy(t)) for t in tokenizers.values()]

    def install(self) -> None:
        for tokenizer, cls, twin in self._originals:
            tokenizer.__class__ = _parking(cls, twin)

    def remove(self) -> None:
        """Leave every tokenizer as `install` found it. Harmless when not installed."""
        for tokenizer, cls, _ in self._originals:
            tokenizer.__class__ = cls


def _tokenizers_in(components: Iterable[Any]) -> Iterable[PreTrainedTokenizerBase]:
    for component in components:
        inner = getattr(component, "tokenizer", None)  # of a processor
        for tokenizer in (component, inner):
            if isinstance(tokenizer, PreTrainedTokenizerBase):
                yield tokenizer


def _parking(cls: type, twin: PreTrainedTokenizerBase) -> type:
    """A subclass of a tokenizer's class whose methods park the fiber when the text is long.

    Args:
        twin: a copy of the tokenizer, for the other thread.
    """

    def parking(name: str) -> Callable[..., Any]:
        plain = getattr(cls, name)

        @functools.wraps(plain)  # pipelines read signatures
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
    return sum(map(len, texts_in(value)))


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in nested lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from texts_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from texts_in(entry)
