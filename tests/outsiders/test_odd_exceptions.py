"""An exception of any kind, raised anywhere in a request, ends that request only, with a text."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch import Tensor

from carpool.errors import CarpoolError, PipelineFailed, in_full, named
from carpool.worker.request_listener import failed
from support.engine_driver import CLOSE, Drive, Recorder, driving, gap
from support.odd_pipeline import Odd, drawn_alone, odd_pipeline


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)

    __repr__ = __str__


class Nothing(Exception):
    def __str__(self) -> Any:
        return None


class Text(str):
    """A class of strings that no protocol knows."""


class Own(Exception):
    def __str__(self) -> str:
        return Text("a text of its own class")


class Faceless(Exception):
    __class__ = property(lambda self: 1 / 0)


class Causeless(Exception):
    __cause__ = property(lambda self: 1 / 0)


def circle() -> BaseException:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def foreign_lost() -> BaseException:
    return OSError(5, Text("half a character: \ud800"), "/secret/place")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "no text": Silent,
    "a text that leaves": Leaving,
    "none as text": Nothing,
    "a class of strings": Own,
    "half a character": lambda: ValueError("\ud800 and \udce4"),
    "a long text": lambda: ValueError("x" * 10**7),
    "a circle of causes": circle,
    "no class": Faceless,
    "no cause": Causeless,
    "an odd error of the system": lambda: OSError(5, Silent(), "place"),
    "an error of the system": foreign_lost,
    "bytes": lambda: ValueError(b"\xff"),
    "a group": lambda: BaseExceptionGroup("all", [SystemExit(1), Silent()]),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "MemoryError": MemoryError,
    "CancelledError": asyncio.CancelledError,
    "BaseException": BaseException,
    "an error of ours": lambda: PipelineFailed("\ud800"),
}


def in_the_pipeline(error: Callable[[], BaseException]) -> Odd:
    def odd(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
        raise error()

    return odd


def in_a_module(error: Callable[[], BaseException]) -> Odd:
    def raises(sample: Tensor) -> None:
        raise error()

    def odd(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
        pipe.net(latents, timestep, raises)

    return odd


def in_its_end(error: Callable[[], BaseException]) -> Odd:
    def odd(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
        try:
            pipe.net(latents, timestep, 1 / 0)
        finally:
            raise error()

    return odd


def as_an_argument(error: Callable[[], BaseException]) -> Odd:
    class Argument:
        def __eq__(self, other: object) -> bool:
            raise error()

        __hash__ = __eq__  # type: ignore[assignment]
        __len__ = __bool__ = __repr__ = __iter__ = __hash__  # type: ignore[assignment]

    def odd(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
        pipe.net(latents, timestep, Argument())
        raise ValueError("after that")

    return odd


def in_the_output(error: Callable[[], BaseException]) -> Odd:
    class Output(dict[str, Any]):
        def items(self) -> Any:
            raise error()

    def odd(pipe: Any, latents: Tensor, timestep: Tensor) -> Any:
        pipe.net = lambda *_: latents
        pipe.scheduler = SimpleNamespace(
            step=lambda *_: SimpleNamespace(prev_sample=Output(images=1))
        )

    return odd


PLACES = in_the_pipeline, in_a_module, in_its_end, as_an_argument, in_the_output


def put(drive: Drive, seed: int, odd: Odd | None = None) -> Recorder:
    return drive.submit("x", seed=seed, odd=odd, output_type="pt")


@pytest.mark.parametrize("place", PLACES, ids=lambda one: one.__name__)
def test_only_the_requests_that_raise_fail_and_their_errors_have_a_text(
    place: Callable[[Callable[[], BaseException]], Odd],
) -> None:
    with driving(odd_pipeline(), mode="continuous") as drive:
        healthy, guilty = list[Recorder](), dict[str, Recorder]()
        for seed, (name, error) in enumerate(ERRORS.items()):
            guilty[name] = put(drive, 100 + seed, place(error))
            if seed % 5 == 0:
                healthy.append(put(drive, len(healthy)))
                drive.finish()
        healthy.append(put(drive, len(healthy)))
        drive.finish()

    for seed, one in enumerate(healthy):
        assert gap(one.image, drawn_alone(seed)) < CLOSE
    for name, one in guilty.items():
        assert isinstance(one.error, CarpoolError), name
        assert one.kinds[-1] == "finished"
        message = failed("its-id", one.error)  # as a worker sends it
        assert msgspec.msgpack.encode(message), name
        assert 0 < len(message.message) < 20_000, name


@pytest.mark.parametrize("name", ERRORS)
def test_any_exception_has_a_text_for_clients_and_one_for_the_log(name: str) -> None:
    error = ERRORS[name]()
    told = PipelineFailed("told")
    told.__cause__ = error

    for text in (named(error), in_full(told)):
        assert type(text) is str
        assert text.encode()
        assert type(error).__name__ in text
        assert len(text) < 50_000


def test_what_runs_on_another_thread_and_leaves_the_interpreter_fails_its_request() -> None:
    from carpool.engine.tokenizers import HostCall

    def leaves() -> None:
        raise SystemExit(1)

    def odd(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
        from carpool.engine.fiber import park

        park(HostCall(leaves))

    with driving(odd_pipeline()) as drive:
        guilty, other = put(drive, 7, odd), put(drive, 0)
        drive.finish()

    assert "SystemExit" in str(guilty.error)
    assert gap(other.image, drawn_alone(0)) < CLOSE
