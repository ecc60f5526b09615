"""Nets that keep state in their forward; each begins anew at a request's first timestep."""

import threading
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from support.custom.base import FIRST, Custom, Net, kind


class Stateful(Net):
    """Scales what it gives by the number of its calls in this request."""

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        if float(timestep[0]) >= FIRST:
            self.reset()
        return (self.body(sample, timestep, words) * (1 + 0.1 * self.counted()),)

    def reset(self) -> None:
        raise NotImplementedError

    def counted(self) -> float:
        raise NotImplementedError


def net(name: str, **options: Any) -> Any:
    """A kind whose pipeline is the plain one over another net."""

    def add(cls: Any) -> Any:
        kind(name, net=cls, **options)(type(f"Over{cls.__name__}", (Custom,), {}))
        return cls

    return add


@net("a counter in a net's attribute")
class Attribute(Stateful):
    n = 0

    def reset(self) -> None:
        self.n = 0

    def counted(self) -> float:
        self.n += 1
        return self.n


@net("a counter in a net's buffer")
class Buffered(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def reset(self) -> None:
        self.n.zero_()

    def counted(self) -> float:
        self.n += 1
        return float(self.n)


@net("a buffer that is never reset")
class NeverReset(Buffered):
    def reset(self) -> None:
        pass


@net("a counter that is never reset")
class AttributeNeverReset(Attribute):
    def reset(self) -> None:
        pass


@net("a list of a net")
class Listing(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Any = []

    def reset(self) -> None:
        self.calls.clear()

    def counted(self) -> float:
        self.calls.append(1)
        return len(self.calls)


@net("a deque of a net")
class Deque(Listing):
    def __init__(self) -> None:
        super().__init__()
        self.calls = deque(maxlen=3)


@net("a counter on a net's class")
class OnTheClass(Stateful):
    n = 0

    def reset(self) -> None:
        type(self).n = 0

    def counted(self) -> float:
        type(self).n += 1
        return type(self).n


@net("a counter on a child of a net")
class OnAChild(Stateful):
    def reset(self) -> None:
        self.middle.calls = 0

    def counted(self) -> float:
        self.middle.calls += 1
        return float(self.middle.calls)


@net("a parameter that a forward writes")
class Writing(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.n = nn.Parameter(torch.zeros(()))

    def reset(self) -> None:
        self.n.data.zero_()

    def counted(self) -> float:
        self.n.data += 1
        return float(self.n)


@net("a plain tensor of a net")
class Untracked(Stateful):
    def __init__(self) -> None:
        super().__init__()
        vars(self)["n"] = torch.zeros(())

    def reset(self) -> None:
        self.n.zero_()

    def counted(self) -> float:
        return float(self.n.add_(1))


@net("a thread's local of a net")
class Local(Stateful):
    local = threading.local()

    def reset(self) -> None:
        self.local.n = 0

    def counted(self) -> float:
        self.local.n += 1
        return float(self.local.n)


_CALLS = {"n": 0}


@net("a global that a forward counts in")
class Global(Stateful):
    def reset(self) -> None:
        _CALLS["n"] = 0

    def counted(self) -> float:
        _CALLS["n"] += 1
        return _CALLS["n"]


@net("an array of numpy in a net")
class Array(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.steps = np.zeros(1)

    def reset(self) -> None:
        self.steps[0] = 0

    def counted(self) -> float:
        self.steps[0] += 1
        return float(self.steps[0])
