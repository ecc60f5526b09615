"""State outside of the pipeline object: each call writes it, and reads it after its denoiser's."""

import builtins
import contextvars
import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from support.custom.base import Custom, Net, kind

Write, Read = Callable[[Any, float], object], Callable[[Any], float]


def kept(write: Write, read: Read) -> Callable[[Any], None]:
    """Change a pipeline: each step adds to a number kept elsewhere, over a call of its net."""

    def change(pipe: Any) -> None:
        class Keeping(Custom):
            def begin(self, prompt: str) -> None:
                write(self, len(prompt) / 10)

            def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
                write(self, read(self) + 0.1)
                return super().predict(i, x, t, words) * (1 + read(self))

        pipe.__class__ = Keeping

    return change


class Holder:
    value = 0.0
    values: dict[str, float] = {}
    items: list[float] = [0.0]

    @classmethod
    def put(cls, value: float) -> None:
        cls.value = value


@kind("a class attribute")
class OfTheClass(Custom):
    count = 0

    def begin(self, prompt: str) -> None:
        type(self).count = 0

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        type(self).count += 1
        return super().predict(i, x, t, words) * (1 + 0.1 * type(self).count)


@kind("a dict as a class attribute")
class DictOfTheClass(Custom):
    cache: dict[str, Tensor] = {}

    def begin(self, prompt: str) -> None:
        self.cache.clear()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        last = self.cache.get("last", 0)
        self.cache["last"] = super().predict(i, x, t, words)
        return self.cache["last"] + 0.3 * last


@kind("a tensor as a class attribute")
class TensorOfTheClass(Custom):
    mean = torch.zeros(1, 4, 8, 8)

    def begin(self, prompt: str) -> None:
        self.mean.zero_()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return self.mean.mul_(0.5).add_(super().predict(i, x, t, words)).clone()


_NUMBER = 0.0


@kind("a module's global number")
class GlobalNumber(Custom):
    def begin(self, prompt: str) -> None:
        global _NUMBER
        _NUMBER = 0.0

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        global _NUMBER
        _NUMBER += 0.1
        return super().predict(i, x, t, words) * (1 + _NUMBER)


_LIST: list[Any] = []


@kind("a module's global list")
class GlobalList(Custom):
    def begin(self, prompt: str) -> None:
        _LIST.clear()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        _LIST.append(super().predict(i, x, t, words))
        return torch.stack(_LIST).mean(0)


_BOX: list[float] = [0.0]
_SPACE = types.SimpleNamespace(value=0.0)
_VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("value", default=0.0)
_LOCAL = threading.local()


def _written_function(value: float) -> None:
    _written_function.value = value  # type: ignore[attr-defined]


def _alias(value: float) -> None:
    write = setattr
    write(Holder, "ali" + "as", value)


def _default(value: float | None = None, box: list[float] = [0.0]) -> float:  # noqa: B006
    if value is not None:
        box[0] = value
    return box[0]


def _file() -> Path:
    return Path(tempfile.gettempdir()) / "kept.txt"


def _environ(pipe: Any, value: float) -> None:
    os.environ["KEPT"] = repr(value)


@lru_cache
def _shared() -> list[float]:
    return [0.0]


class Meta(type):
    level = 0.0


class OfMeta(metaclass=Meta):
    pass


PLACES: dict[str, tuple[Write, Read]] = {
    "another class's attribute": (lambda pipe, v: Holder.put(v), lambda pipe: Holder.value),
    "a dict of another class": (
        lambda pipe, v: Holder.values.update(x=v),
        lambda pipe: Holder.values["x"],
    ),
    "a list in another class": (
        lambda pipe, v: Holder.items.__setitem__(0, v),
        lambda pipe: Holder.items[0],
    ),
    "a global box": (lambda pipe, v: _BOX.__setitem__(0, v), lambda pipe: _BOX[0]),
    "a global namespace": (lambda pipe, v: setattr(_SPACE, "value", v), lambda pipe: _SPACE.value),
    "a context variable": (lambda pipe, v: _VARIABLE.set(v), lambda pipe: _VARIABLE.get()),
    "a thread's local": (lambda pipe, v: setattr(_LOCAL, "value", v), lambda pipe: _LOCAL.value),
    "a function's attribute": (
        lambda pipe, v: _written_function(v),
        lambda pipe: _written_function.value,  # type: ignore[attr-defined]
    ),
    "a default argument": (lambda pipe, v: _default(v), lambda pipe: _default()),
    "an attribute written by an alias of setattr": (
        lambda pipe, v: _alias(v),
        lambda pipe: Holder.alias,  # type: ignore[attr-defined]
    ),
    "a frame's globals": (
        lambda pipe, v: sys._getframe().f_globals.update(_OF_FRAME=v),
        lambda pipe: sys._getframe().f_globals["_OF_FRAME"],
    ),
    "the environment": (_environ, lambda pipe: float(os.environ["KEPT"])),
    "a file": (
        lambda pipe, v: _file().write_text(repr(v)),
        lambda pipe: float(_file().read_text()),
    ),
    "a cached function's answer": (
        lambda pipe, v: _shared().__setitem__(0, v),
        lambda pipe: _shared()[0],
    ),
    "an imported module": (
        lambda pipe, v: sys.modules.setdefault("kept_here", types.ModuleType("x")).__dict__.update(
            v=v
        ),
        lambda pipe: sys.modules["kept_here"].v,
    ),
    "the builtins": (
        lambda pipe, v: setattr(builtins, "kept_value", v),
        lambda pipe: builtins.kept_value,  # type: ignore[attr-defined]
    ),
    "a metaclass": (lambda pipe, v: setattr(Meta, "level", v), lambda pipe: OfMeta.level),
    "the scheduler's class": (
        lambda pipe, v: setattr(type(pipe.scheduler), "kept_value", v),
        lambda pipe: type(pipe.scheduler).kept_value,
    ),
    "the net's class": (
        lambda pipe, v: setattr(type(pipe.unet), "kept_value", v),
        lambda pipe: type(pipe.unet).kept_value,
    ),
    "a list that the scheduler's class holds": (
        lambda pipe, v: type(pipe.scheduler).items.__setitem__(0, v),
        lambda pipe: type(pipe.scheduler).items[0],
    ),
    "the print options of torch": (
        lambda pipe, v: torch.set_printoptions(precision=round(v * 10)),
        lambda pipe: torch._tensor_str.PRINT_OPTS.precision / 10,
    ),
}


class Scheduler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    items: list[float] = [0.0]


class OwnNet(Net):
    pass


for _name, (_write, _read) in PLACES.items():
    kind(_name, net=OwnNet, scheduler=Scheduler)(kept(_write, _read))


@kind("a closure's cell")
def closure(pipe: Any) -> None:
    value = 0.0

    def write(pipe: Any, new: float) -> None:
        nonlocal value
        value = new

    kept(write, lambda pipe: value)(pipe)


@kind("a temporary file's position")
class Positioned(Custom):
    log: Any = None

    def begin(self, prompt: str) -> None:
        Positioned.log = Positioned.log or tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.log.seek(0)
        self.log.truncate()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.log.write("x")
        return super().predict(i, x, t, words) * (1 + 0.1 * self.log.tell())
