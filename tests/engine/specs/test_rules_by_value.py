"""Rules for what shapes do not tell: layers first, values that decide for all rows, dicts."""

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import IdentityDistribution
from torch import Tensor, nn

from carpool.engine.fuse import Fuser
from carpool.engine.specs import FACTOR, LAYERS, SPECS, STACK, STACKS, ArgumentRule, Keyed, Spec
from carpool.engine.split import split
from support.fake_models import call_on, fuse, randn, run

RULES: dict[str, ArgumentRule] = {
    "x": STACK, "layers": LAYERS, "pictures": Keyed(STACK, lambda pictures: bool(pictures.any())),
    "residuals": STACKS, "controls": STACKS, "scale": FACTOR,
}  # fmt: skip


class Layered(nn.Module):
    """Reads layers as HiDream does, pictures as HunyuanVideo 1.5, and takes from a list."""

    def forward(
        self,
        x: Tensor,  # (rows, 3)
        layers: Any = None,  # (layers, rows, 3)
        pictures: Tensor | None = None,  # (rows, 3)
        residuals: Any = None,  # by layer (rows, 3)
        controls: list[Tensor] | None = None,  # each (rows, 3)
        scale: float = 1.0,
    ) -> dict[int, Tensor]:
        if layers is not None:
            x = x + layers[0] * 2 - layers[-1]
        if pictures is not None:
            x = x + (0.0 if torch.all(pictures == 0) else 1.0)
        for number, residual in (residuals or {}).items():
            x = x + number * residual
        while controls:
            x = x * (1 + controls.pop(0))
        return {0: x * scale, 7: -x * scale}


@pytest.fixture(autouse=True)
def layered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECS, ("Layered", "forward"), Spec(rows="x", rules=RULES))


def arguments(rows: int, seed: int) -> dict[str, Any]:
    return {
        "x": randn(rows, 3, seed=seed),
        "layers": randn(4, rows, 3, seed=seed + 100),
        "pictures": randn(rows, 3, seed=seed + 200),
        "residuals": {2: randn(rows, 3, seed=seed + 300), 5: randn(rows, 3, seed=seed + 400)},
        "controls": [randn(rows, 3, seed=seed + 500), randn(rows, 3, seed=seed + 600)],
    }


@pytest.mark.parametrize("is_exact", [False, True])
def test_calls_of_layers_dicts_and_lists_get_what_each_gets_alone(is_exact: bool) -> None:
    requests = [arguments(rows, seed) for seed, rows in enumerate((1, 4, 2))]
    expected = [Layered()(**arguments(rows, seed)) for seed, rows in enumerate((1, 4, 2))]
    module = Layered()

    answers = run(Fuser(is_exact=is_exact), [call_on(module, **one) for one in requests])

    for answer, reference in zip(answers, expected, strict=True):
        assert answer.keys() == reference.keys()
        assert all(torch.equal(answer[name], reference[name]) for name in reference)
    assert [one["controls"] for one in requests] == [[], [], []]  # as alone


def test_a_value_that_decides_for_all_rows_is_equal_in_all_calls() -> None:
    blank = {"x": randn(1, 3), "pictures": torch.zeros(1, 3)}
    pictured = {"x": randn(1, 3), "pictures": torch.ones(1, 3)}

    assert fuse(blank, {**blank, "x": randn(2, 3), "pictures": torch.zeros(2, 3)}, module=Layered())
    assert not fuse(blank, pictured, module=Layered())


@pytest.mark.parametrize("second", [{}, {"scale": 0.7}])
def test_each_answer_is_multiplied_by_the_number_of_its_call(second: dict[str, float]) -> None:
    scales: tuple[dict[str, float], ...] = ({"scale": 0.3}, second, {"scale": 2}, {"scale": 0.0})
    requests = [{"x": randn(2, 3, seed=seed)} | scale for seed, scale in enumerate(scales)]
    module = Layered()

    answers = run(Fuser(), [call_on(module, **request) for request in requests])

    for answer, request in zip(answers, requests, strict=True):
        assert torch.equal(answer[7], Layered()(**request)[7])
    exact = Fuser(is_exact=True)
    keys = [exact.describe(call_on(module, **request))[0] for request in requests[:2]]
    assert keys[0] != keys[1]


def test_calls_with_other_layers_or_another_kind_of_list_do_not_fuse() -> None:
    requests = arguments(1, 0), arguments(1, 1)
    for name, value in (
        ("layers", randn(3, 1, 3)),
        ("residuals", {2: randn(1, 3), 6: randn(1, 3)}),
        ("controls", (randn(1, 3), randn(1, 3))),
    ):
        assert fuse(*requests, module=Layered())
        assert not fuse(requests[0], {**requests[1], name: value}, module=Layered()), name


def test_a_distribution_without_randomness_is_split() -> None:
    mean = randn(3, 2)

    parts = split(IdentityDistribution(mean), [1, 2], Spec(rows="x", rules={"x": STACK}))

    assert torch.equal(torch.cat([part.mode() for part in parts]), mean)
