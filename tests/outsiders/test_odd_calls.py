"""A request may call its modules with anything: all get what plain diffusers gives them."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from carpool.engine.model.signature import parameters_of
from carpool.errors import PipelineFailed, Rejected
from support.engine_driver import CLOSE, Drive, Recorder, driving, fresh, gap, solo
from support.odd_pipeline import WIDTH, Odd, drawn_alone, odd_pipeline
from support.prepared import alone
from support.tiny import ARGUMENTS


class Answering:
    """An argument whose class answers in its own way."""

    def __init__(self, **methods: Callable[[], Any]) -> None:
        self._methods = methods

    def _ask(self, name: str) -> Any:
        return self._methods[name]() if name in self._methods else NotImplemented

    def __eq__(self, other: object) -> Any:
        return self._ask("eq")

    def __hash__(self) -> int:
        return int(self._ask("hash"))

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))


class Number(float):
    """A number that can be neither hashed nor compared."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("not to be compared")


def fails(error: type[BaseException]) -> Callable[[], Any]:
    def method() -> Any:
        raise error("by an argument")

    return method


def of(*args: Any, **kwargs: Any) -> Odd:
    """Call the network with these arguments; what it gives is dropped."""

    def odd(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
        values = [one(latents) if callable(one) else one for one in args]
        pipe.net(*values, **kwargs)

    return odd


def in_inference_mode(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
    with torch.inference_mode():
        made_there = latents * 1
    pipe.net(made_there, timestep)


def in_float64(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        pipe.net(latents, timestep)
    finally:
        torch.set_default_dtype(torch.float32)


def without_a_layer(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
    del pipe.net.first


def without_a_scheduler(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
    pipe.scheduler = None


def whose_scheduler_counts_nothing(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
    class Uncounted(type(pipe.scheduler)):  # type: ignore[misc]
        step_index = property(lambda self: 1 / 0)

    pipe.scheduler.__class__ = Uncounted


def whose_scheduler_has_no_list(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
    pipe.scheduler.timesteps = 7


def that_gives_none(pipe: Any, latents: Tensor, timestep: Tensor) -> Any:
    return [None]


def that_recurses(pipe: Any, latents: Tensor, timestep: Tensor) -> Any:
    return that_recurses(pipe, latents, timestep)


def that_logs_badly(pipe: Any, latents: Tensor, timestep: Tensor) -> None:
    from diffusers.utils import logging

    logging.get_logger("diffusers.mine").warning("%d steps, which is no number", "x")


CIRCLE: list[Any] = [0]
CIRCLE.append(CIRCLE)
ANSWERS = "eq", "hash", "len", "bool", "repr"
ODD: dict[str, Odd] = {
    "zero rows": of(lambda x: x[:0], 1),
    "zero rows, by name": of(sample=torch.zeros(0, 4, 4, WIDTH)),
    "zero length": of(lambda x: x[:, :0], 1),
    "zero width": of(torch.zeros(1, 4, 4, 0), 1),
    "no dimension": of(torch.tensor(1.0), 1),
    "two rows": of(lambda x: torch.cat([x, x]), 1),
    "nan": of(lambda x: x * torch.nan, 1),
    "nan timestep": of(lambda x: x, torch.tensor(torch.nan)),
    "infinite timestep": of(lambda x: x, float("inf")),
    "float64": of(lambda x: x.double(), 1),
    "complex": of(lambda x: torch.complex(x, x), 1),
    "meta": of(lambda x: x.to("meta"), 1),
    "meta beside": of(lambda x: x, torch.ones(3, device="meta")),
    "sparse": of(lambda x: x.to_sparse(), 1),
    "sparse beside": of(lambda x: x, torch.eye(3).to_sparse()),
    "an array": of(np.ones((1, 4, 4, WIDTH), np.float32), 1),
    "none": of(None, 1),
    "wrong width": of(lambda x: x[..., :7], 1),
    "bool": of(lambda x: x > 0, 1),
    "no tensors": of([], 3),
    "nothing": of(),
    "too many": of(lambda x: x, 1, 2, 3, 4),
    "unknown names": of(lambda x: x, nothing=1),
    "a dict": of({"a": 1}, 1),
    "a dict with odd keys": of(lambda x: x, {(1, 2): 3, None: 4}),
    "a set": of(lambda x: x, {1, 2}),
    "a generator": of(lambda x: x, (n for n in range(3))),
    "a circle": of(lambda x: x, CIRCLE),
    "a number that is none": of(lambda x: x, Number(3)),
    "requires gradients": of(lambda x: x.clone().requires_grad_(), 1),
    "large": of(torch.zeros(1, 2**9, 2**9, WIDTH), 1),
    "expanded": of(lambda x: x[:, :1].expand(1, 4, 4, WIDTH), 1),
    "of inference mode": in_inference_mode,
    "another default type": in_float64,
    "without a layer": without_a_layer,
    "without a scheduler": without_a_scheduler,
    "a scheduler that counts nothing": whose_scheduler_counts_nothing,
    "a scheduler without a list": whose_scheduler_has_no_list,
    "no latents": that_gives_none,
    "endless recursion": that_recurses,
    "a bad line in the log": that_logs_badly,
    **{
        f"{name} raises {error.__name__}": of(lambda x: x, Answering(**{name: fails(error)}))
        for name in ANSWERS
        for error in (RuntimeError, SystemExit)
    },
    **{
        f"{name} says {answer!r}": of(
            lambda x: x, Answering(**{name: lambda answer=answer: answer})
        )
        for name, answer in [("eq", torch.ones(3)), ("len", 10**6), ("bool", False), ("hash", 1)]
    },
}


def put(drive: Drive, seed: int, odd: Odd | None = None) -> Recorder:
    return drive.submit("x", seed=seed, odd=odd, output_type="pt")


def check(recorder: Recorder, seed: int, odd: Odd | None = None) -> None:
    plain = drawn_alone(seed, odd)
    if isinstance(plain, type):
        assert recorder.error is not None
        assert plain.__name__ in str(recorder.error) or isinstance(recorder.error, Rejected)
    else:
        assert gap(recorder.image, plain) < CLOSE


@pytest.mark.parametrize("name", ODD)
def test_an_odd_call_gives_what_it_gives_alone_and_the_others_their_pictures(name: str) -> None:
    with driving(odd_pipeline(), mode="continuous", clock=time.monotonic) as drive:  # type: ignore[arg-type]
        before = [put(drive, seed) for seed in range(3)]
        odd = [put(drive, seed, ODD[name]) for seed in (7, 8)]
        drive.finish()
        later = [put(drive, seed) for seed in (3, 4)]
        drive.finish()
        costs = drive.engine.scheduler.costs.to_json()

    for seed, one in enumerate([*before, *later]):
        check(one, seed)
    for seed, one in zip((7, 8), odd, strict=True):
        check(one, seed, ODD[name])
    seconds = [s for entry in costs for s in entry["seconds"].values()]
    assert all(0 < one < 3600 for one in seconds)


@pytest.mark.parametrize("prompts", [{"prompt": "a cat"}, {"prompt": "", "negative_prompt": ""}])
def test_a_prompt_of_no_tokens_at_all_fails_alone(prompts: dict[str, str]) -> None:
    """With guidance CogView 4 encodes its negative prompt: by default a text of no tokens."""
    healthy = {"prompt": "a cat", "negative_prompt": "blue"}
    with driving(fresh("cogview4"), mode="continuous", clock=time.monotonic) as drive:  # type: ignore[arg-type]
        heard = [drive.submit(**ARGUMENTS["cogview4"], **healthy, seed=n) for n in range(2)]
        odd = drive.submit(**ARGUMENTS["cogview4"], **prompts, seed=7)
        drive.finish()
        heard.append(drive.submit(**ARGUMENTS["cogview4"], **healthy, seed=2))
        drive.finish()

    assert isinstance(odd.error, PipelineFailed)
    for seed, one in enumerate(heard):
        assert gap(one.image, solo("cogview4", "a cat", negative_prompt="blue", seed=seed)) < CLOSE


SIZES: list[dict[str, Any]] = [
    {"original_size": [96, 64]},
    {"target_size": [96, 64]},
    {"crops_coords_top_left": [8, 8]},
    {"negative_original_size": [32, 32], "negative_target_size": [32, 32], "guidance_scale": 3.0},
]


@pytest.mark.parametrize("words", SIZES)
def test_a_list_alone_draws_what_a_tuple_draws_in_plain_diffusers(words: dict[str, Any]) -> None:
    own = {**ARGUMENTS["sdxl"], "num_inference_steps": 2, "seed": 3}
    tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in words.items()}
    with driving(fresh("sdxl")) as drive:
        recorder = drive.submit("a red circle", **{**own, **words})
        drive.finish()
    assert recorder.error is None

    reference = alone(fresh("sdxl"), {"prompt": "a red circle", **own, **tuples})

    assert gap(recorder.outcome.fields["images"], reference) <= 1e-4


def test_lists_stay_lists_where_a_pipeline_takes_them() -> None:
    kinds = {one.name: one.is_tuple for one in parameters_of(fresh("sdxl"))}

    assert kinds["original_size"]
    assert kinds["crops_coords_top_left"]
    assert not kinds["sigmas"]
    assert not kinds["prompt"]
