"""Components on another device than the rest: inputs and outputs cross, and pictures are right."""

import pytest

from support.pretended.process import on_pretended_device


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("flux", "text_encoder=pretended:1"),
        ("wan21_t2v", "text_encoder=pretended:1,vae=pretended:1"),
        pytest.param("flux", "text_encoder=pretended:1,vae=pretended:1", marks=pytest.mark.slow),
        pytest.param("flux", "transformer=pretended:1", marks=pytest.mark.slow),
        pytest.param("sdxl", "text_encoder_2=pretended:1,vae=pretended:1", marks=pytest.mark.slow),
        pytest.param("qwen_image", "text_encoder=pretended:1", marks=pytest.mark.slow),
    ],
)
@on_pretended_device
def test_placed_components_compute_there_and_share_forwards(family: str, place: str) -> None:
    """Tensors of two devices in one operation would fail the test: see `support.pretended`."""
    import torch

    from support.engine_driver import CLOSE, driving, gap, plain
    from support.tiny import ARGUMENTS, checkpoint

    texts = ["a photo of a cat", "the moon, and a horse"]
    with driving(checkpoint(family), device="pretended:0", dtype="float32", place=place) as drive:
        pipe = drive.engine.loaded.pipe
        heard = [
            drive.submit(text, **{**ARGUMENTS[family], "seed": n}) for n, text in enumerate(texts)
        ]
        drive.finish()
        for entry in place.split(","):
            name, _, device = entry.partition("=")
            there = {str(one.device) for one in getattr(pipe, name).parameters()}
            assert there == {device}
        others = {name for name in ("transformer", "unet", "vae") if f"{name}=" not in place}
        for name in others & set(pipe.components):
            assert {str(one.device) for one in getattr(pipe, name).parameters()} == {"pretended:0"}

    for n, (text, one) in enumerate(zip(texts, heard, strict=True)):
        assert one.error is None, one.error
        fields = one.outcome.fields
        mine = torch.as_tensor(fields["images"] if "images" in fields else fields["frames"])
        given = {**ARGUMENTS[family], "prompt": text}
        alone = plain(family)(**given, generator=torch.Generator().manual_seed(n))[0]
        assert gap(mine, torch.as_tensor(alone)) < CLOSE
    denoiser = "unet" if "unet" in pipe.components else "transformer"
    assert drive.widest(denoiser) == 2
