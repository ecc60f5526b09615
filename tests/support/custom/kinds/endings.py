"""Requests that end by exceptions of unusual kinds: in the pipeline, or in a net."""

from typing import Any

from torch import Tensor

from support.custom.base import ODD, Custom, Net, kind


def ending(name: str, error: type[BaseException], *, in_net: bool) -> None:
    """A kind of which one request raises an exception that is none of `Exception`."""

    class Ending(Custom):
        def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
            if i == 2 and self.odd:
                if not in_net:
                    raise error("this request ends")
                words = words * float("nan")
            return super().predict(i, x, t, words)

        def begin(self, prompt: str) -> None:
            self.odd = prompt == ODD

    class EndingNet(Net):
        def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
            if in_net and bool(words.isnan().any()):
                raise error("this request ends")
            return super().forward(sample, timestep, words)

    kind(name, net=EndingNet)(Ending)


for _error in (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, MemoryError):
    ending(f"{_error.__name__} in the pipeline", _error, in_net=False)
    ending(f"{_error.__name__} in a net", _error, in_net=True)
