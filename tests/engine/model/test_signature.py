"""What a pipeline's `__call__` says of its parameters: annotations, text, defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from diffusers import DiffusionPipeline

from carpool.engine.model.signature import _kinds, parameters_of

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]


class Written(DiffusionPipeline):  # type: ignore[misc]
    """As users write pipelines: annotations that are text here, or none."""

    def __call__(  # type: ignore[no-untyped-def]
        self,
        prompt,
        image: str | torch.Tensor | None = None,
        negative_prompt: str | list[str] | None = None,
        num_inference_steps=20,
        sharpness: Unknown = 0.5,
        knob: Unknown | None = None,
        anything=None,
        *texts: str,
        is_tiled: bool = False,
        **others: Any,
    ) -> None: ...


def test_text_is_an_annotation_and_a_default_says_what_no_annotation_does() -> None:
    found = {p.name: (p.kind, p.also, p.default, p.required) for p in parameters_of(Written())}

    assert found == {
        "prompt": ("str", (), None, True),
        "image": ("other", (), None, False),
        "negative_prompt": ("str", (), None, False),
        "num_inference_steps": ("int", (), 20, False),
        "sharpness": ("float", (), 0.5, False),
        "knob": ("other", ("int", "float", "list", "dict"), None, False),
        "anything": ("other", ("int", "float", "list", "dict"), None, False),
        "is_tiled": ("bool", (), False, False),
    }


def test_no_text_is_taken_for_a_picture() -> None:
    """A path: the pipeline would read the server's files."""
    [image] = [p for p in parameters_of(Written()) if p.name == "image"]

    assert "str" not in (image.kind, *image.also)


def test_annotations_say_what_a_parameter_takes() -> None:
    kinds = {
        str | list[str] | None: ("str",), list[str] | None: ("other", "list"),
        float | list[float]: ("float", "numbers"), list[float] | None: ("numbers",),
        list[list[float]]: ("other", "list"), dict[str, Any] | None: ("other", "dict"),
        torch.Tensor | None: ("other",), int | torch.Tensor: ("int", "other"),
        tuple[int, int]: ("other", "list"), Literal["first", "last"]: ("str",),
        Literal["auto", 8] | None: ("str", "int"),
    }  # fmt: skip

    assert {annotation: _kinds(annotation, "prompt") for annotation in kinds} == kinds


def test_a_list_of_texts_is_a_batch_of_prompts_only_where_it_is_named_so() -> None:
    texts = str | list[str] | None

    batches = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_3")
    assert {_kinds(texts, name) for name in batches} == {("str",)}
    assert {_kinds(texts, name) for name in ("editing_prompt", "lyrics")} == {("str", "list")}


class Tuned(Written):
    def __call__(self, prompt: str, *args: Any, sharpness: float = 0.1, **kwargs: Any) -> None:
        super().__call__(prompt, *args, **kwargs, sharpness=sharpness)  # type: ignore


class Passing(Tuned):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("num_inference_steps", 7)
        super().__call__(*args, **kwargs)


def test_what_a_pipeline_hands_to_its_base_is_a_parameter_too() -> None:
    written, passing = ({p.name: p for p in parameters_of(cls())} for cls in (Written, Passing))

    assert passing.keys() == written.keys()
    assert passing["sharpness"].default == 0.1
    assert passing["num_inference_steps"] == written["num_inference_steps"]
