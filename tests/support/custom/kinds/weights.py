"""Weights that are swapped, written or fused around a module's call, and put back."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from support.custom.base import ODD, Custom, kind


@kind("functional_call with other weights")
class Functional(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        bias = {"last.bias": self.unet.last.bias + 0.2 * i}
        noise: Tensor = torch.func.functional_call(self.unet, bias, (x, t, words))[0]
        return noise


@kind("functional_call of one request")
class FunctionalOdd(Functional):
    def begin(self, prompt: str) -> None:
        self.swaps = prompt == ODD

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        call = Functional.predict if self.swaps else Custom.predict
        return call(self, i, x, t, words)


@kind("functional_call of a child inside of the pipeline")
class FunctionalChild(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        weights = {name: w * 1.1 for name, w in self.unet.first.named_parameters()}
        more = torch.func.functional_call(self.unet.first, weights, (x,))
        return super().predict(i, x, t, words) + 0.1 * more.mean()


@kind("a weight written in place and put back")
class Written(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        weight = self.unet.middle.weight
        before = weight.clone()
        weight.mul_(1 + 0.3 * i)
        try:
            return super().predict(i, x, t, words)
        finally:
            weight.copy_(before)


@kind("an average of weights stored and restored, as EMA helpers do")
class Averaged(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        stored = [weight.clone() for weight in self.unet.parameters()]
        for weight in self.unet.parameters():
            weight.data.copy_(weight.data * 0.9)
        noise = super().predict(i, x, t, words)
        for weight, value in zip(self.unet.parameters(), stored, strict=True):
            weight.data.copy_(value)
        return noise


@kind("an addition fused into a weight for a request")
class Fused(Custom):
    """As `fuse_lora` before, and `unfuse_lora` after: the weight is written in place."""

    def begin(self, prompt: str) -> None:
        self.delta = torch.outer(torch.linspace(0, 1, 8), torch.ones(8)) * len(prompt) / 10
        self.unet.middle.weight.data += self.delta[:, :, None, None]

    def end(self, x: Tensor) -> Tensor:
        self.unet.middle.weight.data -= self.delta[:, :, None, None]
        return x


@kind("gradients of weights, and a step of an optimizer that is undone")
class Tuned(Custom):
    """As textual inversion and tuning at test time."""

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        before = {k: v.clone() for k, v in self.unet.state_dict().items()}
        with torch.enable_grad():
            bias = self.unet.last.bias.requires_grad_(True)
            optimizer = torch.optim.SGD([bias], lr=0.1)
            super().predict(i, x, t, words).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        bias.requires_grad_(False)
        noise = super().predict(i, x, t, words)
        self.unet.load_state_dict(before)
        return noise


@kind("train mode for one request")
class Trained(Custom):
    def begin(self, prompt: str) -> None:
        self.unet.train(prompt == ODD)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return super().predict(i, x, t, words) * (2 if self.unet.training else 1)

    def end(self, x: Tensor) -> Tensor:
        self.unet.eval()
        return x


@kind("a copy of the net for each request, which waits for no forward")
class Copied(Custom):
    def begin(self, prompt: str) -> None:
        self.copy = copy.deepcopy(self.unet)
        self.copy.last.bias.add_(len(prompt) / 10)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        noise: Tensor = self.copy(x, t, words)[0]
        return noise


class Gain(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.gain


@kind("a parametrization of a request, before its first call")
class Parametrized(Custom):
    def begin(self, prompt: str) -> None:
        parametrize.register_parametrization(self.unet.middle, "weight", Gain(len(prompt) / 4))

    def end(self, x: Tensor) -> Tensor:
        parametrize.remove_parametrizations(self.unet.middle, "weight", leave_parametrized=False)
        return x
