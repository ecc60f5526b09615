"""Compiled blocks: requests that share forwards get what they get alone, and no graph is made late.

The tests stop before code is generated, which takes minutes; one generates it.
"""

from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from torch._dynamo.utils import counters

from carpool.config import EngineSettings
from carpool.engine.model import compiling
from carpool.engine.model.compiling import repeated_blocks
from carpool.engine.model.load import load
from carpool.errors import LoadFailed
from support.engine_driver import Drive, Recorder, driving, fresh, gap
from support.tiny import checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.versions,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
SIZE = {"flux": (64, 64), "qwen_image": (64, 64), "sdxl": (64, 64), "sd3": (64, 64)}
CLOSE = 1e-4


@pytest.fixture(params=["eager", "inductor"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(compiling, "COMPILER", request.param)
    torch._dynamo.reset()
    counters.clear()
    name: str = request.param
    return name


def requests_of(family: str) -> list[dict[str, Any]]:
    width, height = SIZE[family]
    common = {"width": width, "height": height, "output_type": "pt"}
    prompts = ("a cat", "an astronaut riding a horse", "", "a dog")
    return [
        {**common, "prompt": prompt, "seed": i, "num_inference_steps": 3 + i % 2}
        for i, prompt in enumerate(prompts)
    ]


def run(drive: Drive, family: str) -> list[Recorder]:
    first, *others = requests_of(family)
    heard = [drive.submit(**first)]
    drive.turn_until(lambda: heard[0].step >= 1)
    heard += [drive.submit(**one) for one in others]
    drive.finish()
    return heard


@pytest.mark.parametrize(
    ("family", "compiler"),
    [
        ("flux", "eager"), ("qwen_image", "eager"), ("sdxl", "eager"), ("sd3", "eager"),
        ("sdxl", "inductor"),
    ],
    indirect=["compiler"],
)  # fmt: skip
def test_after_the_warm_up_no_request_makes_a_graph_and_all_get_what_they_get_alone(
    family: str, compiler: str
) -> None:
    plain: Any = fresh(family)
    plain.set_progress_bar_config(disable=True)
    width, height = SIZE[family]
    with driving(
        checkpoint(family), max_running=8, compile=True, warmup=f"{width}x{height}"
    ) as drive:
        warmed = counters["stats"]["unique_graphs"]
        heard = run(drive, family)
        made = counters["stats"]["unique_graphs"]

    assert warmed >= 2
    assert made == warmed
    for arguments, one in zip(requests_of(family), heard, strict=True):
        given = dict(arguments)
        dice = torch.Generator().manual_seed(given.pop("seed"))
        assert gap(one.image, plain(**given, generator=dice).images) <= CLOSE


def test_a_warm_up_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LoadFailed, match="the warm-up failed"):
        load(checkpoint("sdxl"), EngineSettings(device="cpu", warmup="33x64"))

    class OfVideos(StableDiffusionXLPipeline):  # type: ignore[misc]
        def __call__(self, prompt: str, video: Any) -> None: ...

    load(OfVideos(**fresh("sdxl").components), EngineSettings(device="cpu", compile=True))
    assert "the warm-up ended early" in caplog.text


@pytest.mark.parametrize("family", ["flux", "sd3", "sana", "sdxl", "wan21_t2v"])
def test_every_family_has_blocks_to_compile(family: str) -> None:
    pipe: Any = fresh(family)

    blocks = repeated_blocks(pipe.unet if family == "sdxl" else pipe.transformer)

    assert blocks
    assert len({type(block) for block in blocks}) <= 2
