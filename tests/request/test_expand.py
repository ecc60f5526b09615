"""Lists of prompts, outputs of a prompt, and generators become requests of one output each."""

from typing import Any

import numpy as np
import pytest
import torch

from carpool.errors import Rejected
from carpool.request.expand import grouped, outputs_each, repeated
from carpool.types import CheckedRequest, Request


def said(request: Request, n: int = 1) -> list[tuple[Any, int | None, Any]]:
    return [
        (one.prompt, one.seed, one.parameters.get("negative_prompt"))
        for one in repeated(request, n)
    ]


def test_prompts_and_their_outputs_follow_each_other_with_seeds_that_count_up() -> None:
    request = Request(
        ["a cat", "a dog"], seed=3, negative_prompt=["dark", "light"], num_images_per_prompt=2
    )

    assert said(request) == [
        ("a cat", 3, "dark"),
        ("a cat", 4, "dark"),
        ("a dog", 5, "light"),
        ("a dog", 6, "light"),
    ]


def test_one_negative_prompt_is_for_all_and_the_first_request_keeps_the_id() -> None:
    parts = list(
        repeated(Request(["a", "b"], seed=0, negative_prompt="dark", request_id="mine"), 2)
    )

    assert [one.parameters for one in parts] == [{"negative_prompt": "dark"}] * 4
    assert parts[0].request_id == "mine"
    assert len({one.request_id for one in parts}) == 4


def test_a_generator_is_its_seed() -> None:
    one = torch.Generator().manual_seed(7)
    many = [torch.Generator().manual_seed(seed) for seed in (5, 9)]

    assert said(Request("a", generator=one), 2) == [("a", 7, None), ("a", 8, None)]
    assert said(Request(["a", "b"], generator=many)) == [("a", 5, None), ("b", 9, None)]
    assert said(Request("a", generator=many, num_images_per_prompt=2)) == [
        ("a", 5, None),
        ("a", 9, None),
    ]
    assert "generator" not in next(repeated(Request("a", generator=one))).parameters


def used() -> torch.Generator:
    generator = torch.Generator().manual_seed(7)
    torch.rand(1, generator=generator)
    return generator


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request("a", generator=used()), "generator was used before.*pass seed="),
        (Request("a", generator=np.random.default_rng(0)), "generator is a Generator: pass seed="),
        (Request("a", seed=1, generator=torch.Generator()), "seed and generator are both given"),
        (Request(["a", "b"], generator=[torch.Generator()] * 3), "is a list of 3: must be one, or"),
        (Request([]), "prompt is an empty list"),
        (Request(["a", "b"], negative_prompt=["x"]), "prompt has 2 entries and negative_prompt 1"),
        (Request("a", negative_prompt=["x", "y"]), "negative_prompt is a list of 2 beside one"),
        (Request("a", num_images_per_prompt=0), "num_images_per_prompt=0: must be a whole number"),
        (Request(["a"] * 600, num_images_per_prompt=2), "600 prompts x 2 outputs: must be at most"),
    ],
)
def test_what_cannot_be_meant_is_refused(request_: Request, says: str) -> None:
    with pytest.raises(Rejected, match=says):
        list(repeated(request_))


def test_the_outputs_of_each_prompt_are_marked_as_asked_for_together() -> None:
    request = Request(["a cat", "a dog"], num_images_per_prompt=3)
    outputs = [CheckedRequest(f"r{i}", i, {}) for i in range(12)]

    assert outputs_each(request, 2) == 6
    marked = grouped(outputs, 6)

    assert [one.group for one in marked] == ["r0"] * 6 + ["r6"] * 6
    assert {one.group_size for one in marked} == {6}
    assert grouped(outputs, 1) == outputs
