"""Muon: steps along the orthogonal matrix nearest to the momentum, for layer weights.

The autoencoder needs a third of Adam's steps with it. AdamW optimises all parameters that are not
matrices, such as biases and norms.

Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
"""

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon:
    """Muon for the hidden layers of a module and AdamW for the rest, with one schedule."""

    def __init__(self, module: nn.Module, hidden: nn.Module, rate: float, adam_rate: float) -> None:
        kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
        self._layers = [part.weight for part in hidden.modules() if isinstance(part, kinds)]
        self._rate, self._adam_rate = rate, adam_rate
        self._momenta = [torch.zeros_like(weight) for weight in self._layers]
        layer_ids = {id(weight) for weight in self._layers}
        rest = [weight for weight in module.parameters() if id(weight) not in layer_ids]
        self._adam = torch.optim.AdamW(rest, adam_rate, betas=(0.9, 0.99))

    def state_dict(self) -> dict[str, object]:
        """The complete optimizer state."""
        return {"momenta": self._momenta, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from a saved state."""
        self._momenta = state["momenta"]  # type: ignore[assignment]
        self._adam.load_state_dict(state["adam"])  # type: ignore[arg-type]

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._adam.zero_grad()
        for weight in self._layers:
            weight.grad = None

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Take a step with a fraction, 0 to 1, of the peak rates."""
        for group in self._adam.param_groups:
            group["lr"] = share * self._adam_rate
        self._adam.step()
        for weight, momentum in zip(self._layers, self._momenta, strict=True):
            if weight.grad is None:  # temporal layers have no gradient for single frames
                continue
            momentum.lerp_(weight.grad, 1 - _MOMENTUM)
            towards = orthogonal(weight.grad.lerp(momentum, _MOMENTUM).flatten(1))
            rows, columns = towards.shape
            rate = share * self._rate * max(1, rows / columns) ** 0.5
            weight.sub_(rate * towards.view_as(weight))


def orthogonal(matrix: Tensor) -> Tensor:
    """Bring the singular values of a matrix close to 1.

    Five Newton-Schulz iterations on the Gram matrix of the shorter side.
    """
    if len(matrix) > matrix.shape[1]:
        return orthogonal(matrix.T).T
    a, b, c = _QUINTIC
    matrix = matrix / (matrix.norm() + 1e-7)
    gram = matrix @ matrix.T
    identity = torch.eye(len(gram))
    product = identity
    for _ in range(5):
        factor = a * identity + b * gram + c * gram @ gram
        product, gram = factor @ product, factor @ gram @ factor
    return product @ matrix
