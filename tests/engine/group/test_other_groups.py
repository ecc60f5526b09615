"""Groups of their own: what is refused, a rank that fails alone, exact numerics, other models."""

import sys
import threading
from typing import Any

import pytest
import torch

from carpool.config import EngineSettings
from carpool.engine.group import leader
from carpool.engine.group.load import by_rank, load
from carpool.errors import LoadFailed, SettingRejected
from support.engine_driver import CLOSE, Recorder, driving, gap, plain
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.timeout(180)  # a rank imports torch in a process of its own
LONG = "a painting of an astronaut riding a horse in the rain, with a red balloon and the moon"


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one waits in a collective operation, for an answer that will never come."""
    monkeypatch.setattr(leader, "GRACE_S", 0.5)
    with driving(checkpoint("flux"), context_parallel=2) as drive:
        lost = threading.Event()
        loaded: Any = drive.engine.loaded
        loaded.group.at_loss = lost.set

        def fail(*_: Any) -> None:
            raise RuntimeError("out of something")

        loaded.pipe.transformer.norm_out.register_forward_pre_hook(fail)
        broken = drive.submit("a cat", **ARGUMENTS["flux"])
        drive.finish()

        assert lost.is_set()
        assert "out of something" in str(broken.error)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["wan21_t2v", "qwen_image", "flux2_klein"])
def test_other_models_with_a_plan_are_right_too(family: str) -> None:
    """Mixed steps, guidance, texts of other lengths, arrivals."""
    requests: list[tuple[str, dict[str, Any]]] = [
        ("a photo of a cat", {"seed": 1, "num_inference_steps": 5}),
        (LONG, {"seed": 2, "num_inference_steps": 4}),
        ("the moon", {"seed": 3, "num_inference_steps": 3, "guidance_scale": 2.0}),
    ]
    if family in ("wan21_t2v", "qwen_image"):
        requests.append(("a", {"seed": 4, "num_inference_steps": 3, "negative_prompt": "bad"}))
    with driving(checkpoint(family), context_parallel=2, max_batch_size=12) as drive:
        heard = []
        for prompt, arguments in requests:
            heard.append(drive.submit(prompt, **{**ARGUMENTS[family], **arguments}))
            drive.turn()
        drive.finish()
        widest = drive.widest("transformer")

    for one, (prompt, arguments) in zip(heard, requests, strict=True):
        assert gap(pixels(one), pixels_of_diffusers(family, prompt, **arguments)) < CLOSE
    assert widest >= 2


def pixels(heard: Recorder) -> torch.Tensor:
    if heard.error is not None:
        raise heard.error
    fields = heard.outcome.fields
    return torch.as_tensor(fields["images"] if "images" in fields else fields["frames"])


def pixels_of_diffusers(family: str, prompt: str, *, seed: int, **arguments: Any) -> torch.Tensor:
    given = {**ARGUMENTS[family], "prompt": prompt, **arguments}
    output = plain(family)(**given, generator=torch.Generator().manual_seed(seed))
    return torch.as_tensor(output[0])


@pytest.mark.slow
def test_in_exact_numerics_a_group_gives_the_same_bits_in_any_company() -> None:
    with driving(checkpoint("flux"), context_parallel=2, numerics="exact") as drive:
        heard = [
            drive.submit(prompt, **{**ARGUMENTS["flux"], "seed": n, "num_inference_steps": 12})
            for n, prompt in enumerate(["a cat", LONG, "a dog"])
        ]
        drive.finish()
        widest = drive.widest("transformer")
        alone = []
        for n, prompt in enumerate(["a cat", LONG, "a dog"]):
            alone.append(
                drive.submit(prompt, **{**ARGUMENTS["flux"], "seed": n, "num_inference_steps": 12})
            )
            drive.finish()

    assert widest >= 2  # the first ones were proofs
    for mine, other in zip(heard, alone, strict=True):
        assert torch.equal(mine.image, other.image)


def test_a_model_without_a_plan_is_refused_by_name_before_anything_is_started() -> None:
    with pytest.raises(SettingRejected) as refused:
        load(checkpoint("sdxl"), EngineSettings(device="cpu", context_parallel=2))

    assert "the unet of this model (UNet2DConditionModel)" in str(refused.value)
    assert "FluxTransformer2DModel" in str(refused.value)
    assert "workers=2" in str(refused.value)


def test_a_model_whose_plan_is_wrong_is_refused_by_name() -> None:
    with pytest.raises(SettingRejected, match="neither its rotary positions nor its sound"):
        load(checkpoint("ltx2"), EngineSettings(device="cpu", context_parallel=2))


def test_a_pipeline_that_is_there_already_is_refused() -> None:
    with pytest.raises(SettingRejected, match="save it with save_pretrained"):
        load(plain("flux"), EngineSettings(device="cpu", context_parallel=2))


def test_a_rank_that_cannot_load_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(LoadFailed, match="rank 1 ended while the group was formed"):
        load(checkpoint("flux"), EngineSettings(device="cpu", context_parallel=2))


def test_every_rank_has_a_device_of_its_own() -> None:
    named = by_rank(EngineSettings(device="cuda:2+cuda:5", context_parallel=2))
    shared = by_rank(EngineSettings(device="cpu", context_parallel=3, place="vae=cpu:0"))

    assert [one.device for one in named] == ["cuda:2", "cuda:5"]
    assert [(one.device, one.place) for one in shared] == [
        ("cpu", "vae=cpu:0"), ("cpu", None), ("cpu", None)
    ]  # fmt: skip
