"""A user's own code in a model: it may mix requests, whatever the table of the class says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn

from carpool.engine.foreign_code import foreign_parts
from support.engine_driver import driving, gap
from support.isolation import build, differences, state_of
from support.newcomers import SIZE
from support.tiny import tiny_pipeline
from support.tiny.parts import drawn


class Mean:
    """An attention processor that gives each row some of all rows."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = AttnProcessor()(attn, hidden_states, *args, **kwargs)
        return x + 0.3 * x.mean(0, keepdim=True)


class Words(nn.Module):
    """One with weights, that keeps rows apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.more = drawn(nn.Linear(width, width))

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = AttnProcessor()(attn, hidden_states, *args, **kwargs)
        return x + 0.1 * self.more(x)


class Layer(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + 0.3 * x.mean(0, keepdim=True)


def set_processors(unet: Any) -> None:
    unet.set_attn_processor(Mean())


def set_words(unet: Any) -> None:
    parts = {name: part for name, part in unet.named_modules() if hasattr(part, "set_processor")}
    unet.set_attn_processor(
        {f"{name}.processor": Words(part.to_q.in_features) for name, part in parts.items()}
    )


def add_hook(unet: Any) -> None:
    unet.mid_block.register_forward_hook(lambda module, args, x: x + 0.3 * x.mean(0, keepdim=True))


def replace_forward(unet: Any) -> None:
    plain = unet.mid_block.forward
    unet.mid_block.forward = lambda *args, **kwargs: (
        (x := plain(*args, **kwargs)) + 0.3 * x.mean(0, keepdim=True)
    )


def replace_layer(unet: Any) -> None:
    layer = Layer(4, 4, 3, padding=1)
    layer.load_state_dict(unet.conv_out.state_dict())
    unet.conv_out = layer


class Other(UNet2DConditionModel):  # type: ignore[misc]
    def forward(
        self, sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, **kwargs: Any
    ) -> Any:
        given = {**kwargs, "return_dict": False}
        (x,) = super().forward(sample, timestep, encoder_hidden_states, **given)
        return (x + 0.3 * x.mean(0, keepdim=True),)


Other.__name__ = "UNet2DConditionModel"  # as the library's, whose table is known


def replace_class(unet: Any) -> None:
    unet.__class__ = Other


CHANGES: dict[str, tuple[Callable[[Any], None], bool]] = {
    "processor": (set_processors, False), "processor with weights": (set_words, True),
    "hook": (add_hook, False), "forward": (replace_forward, False), "layer": (replace_layer, False),
    "class": (replace_class, False),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_models_table_is_proven_first_where_others_have_changed_the_model(name: str) -> None:
    change, fuses = CHANGES[name]

    def make() -> Any:
        pipe = tiny_pipeline("sd15")
        change(pipe.unet)
        return pipe

    pipe, before = build(make), state_of(build(make))
    requests = [
        {**SIZE, "prompt": text, "num_inference_steps": 4, "output_type": "pt"} for text in "abc"
    ]

    with driving(pipe) as drive:
        heard = [drive.submit(**one, seed=seed) for seed, one in enumerate(requests)]
        drive.finish()

    for seed, (one, recorder) in enumerate(zip(requests, heard, strict=True)):
        judge = build(make)
        for weight in judge.unet.parameters():
            weight.requires_grad_(False)
        expected = judge(**one, generator=torch.Generator().manual_seed(seed)).images
        assert gap(recorder.image, expected) < 5e-6
    assert drive.widest("unet") == (3 if fuses else 1)
    assert drive.widest("text_encoder") == 3  # nobody has changed it
    assert differences(before, state_of(pipe)) == []


def test_a_model_as_the_library_made_it_has_no_foreign_parts() -> None:
    pipe = tiny_pipeline("sd15")

    assert not [part for name in ("unet", "vae", "text_encoder") for part in
                foreign_parts(getattr(pipe, name))]  # fmt: skip
