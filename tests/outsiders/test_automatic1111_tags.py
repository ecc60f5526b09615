"""Adapter tags in AUTOMATIC1111's prompts: applied as there or refused, never drawn as words."""

import base64
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import Rejected
from carpool.request.adapter_names import AdapterInfo
from carpool.request.lora import check_lora
from carpool.server.compat.automatic1111.prompt_tags import adapters_of, split_tags
from support.app import CARD, Grey, ask, refusal
from support.engine_driver import driving, fresh
from support.engine_worker import EngineWorker
from support.forms import worker_of
from support.lora_files import adapter
from support.pictures import picture, pixels

LONG = "a" * 64
ODD = (
    AdapterInfo("Pixel_Art-0a1b2c", ("Pixel Art (XL) [v2]",)),
    AdapterInfo("style_new-0a1b2c", ("style=new, 3.1",)),
)
NAMES = ("outlined", "pixel-art_v1.2", LONG, *(one.id for one in ODD))
OFFERED = replace(CARD, lora=NAMES, adapters=ODD)
TXT2IMG = "/sdapi/v1/txt2img"


def post(worker: Grey, **body: Any) -> Any:
    return ask(json.dumps(body), TXT2IMG, worker=worker)


APPLIED: list[tuple[str, str, list[tuple[str, float]]]] = [
    ("a cat <lora:outlined:0.5>", "a cat", [("outlined", 0.5)]),
    ("a cat <lora:outlined>", "a cat", [("outlined", 1.0)]),
    ("a cat <lora:outlined:1:1>", "a cat", [("outlined", 1.0)]),
    ("a cat <lora:outlined:.8>", "a cat", [("outlined", 0.8)]),
    ("a cat <lora:outlined:1.>", "a cat", [("outlined", 1.0)]),
    ("a cat <lora:outlined:-0.7>", "a cat", [("outlined", -0.7)]),
    ("a cat <lora:outlined:+0.7>", "a cat", [("outlined", 0.7)]),
    ("a cat <lora:outlined:5e-1>", "a cat", [("outlined", 0.5)]),
    ("a cat <lora:outlined:0.123456789>", "a cat", [("outlined", 0.123456789)]),
    ("a cat <lora:outlined: 0.5 >", "a cat", [("outlined", 0.5)]),
    ("a cat <lora: outlined :0.5>", "a cat", [("outlined", 0.5)]),
    ("a cat <lora:outlined:te=0.5:unet=0.5>", "a cat", [("outlined", 0.5)]),
    ("a cat <lora:outlined:te=0.5>", "a cat", [("outlined", 0.5)]),
    ("a cat <lora:outlined:1:te=0.5>", "a cat", [("outlined", 0.5)]),
    ("a cat <lora:outlined:0.5:unet=0.5>", "a cat", [("outlined", 0.5)]),
    ("a cat <lora:outlined:1:0.5:te=0.5>", "a cat", [("outlined", 0.5)]),
    ("a cat <lyco:outlined:0.5>", "a cat", [("outlined", 0.5)]),
    ("a cat <lyco:outlined>", "a cat", [("outlined", 1.0)]),
    ("a cat <lora:outlined:0>", "a cat", []),
    ("a cat <lora:Outlined:0.5>", "a cat", [("outlined", 0.5)]),
    ("a cat <lora:Pixel Art (XL) [v2]:0.7>", "a cat", [("Pixel_Art-0a1b2c", 0.7)]),
    ("a cat <lora:Pixel_Art-0a1b2c>", "a cat", [("Pixel_Art-0a1b2c", 1.0)]),
    ("a cat <lora:style=new, 3.1:0.7>", "a cat", [("style_new-0a1b2c", 0.7)]),
    (f"a cat <lora:{LONG}:0.5>", "a cat", [(LONG, 0.5)]),
    ("<lora:outlined:0.5>a cat<lora:pixel-art_v1.2:2>", "a cat",
     [("outlined", 0.5), ("pixel-art_v1.2", 2.0)]),
    ("a cat, <lora:outlined:0.5> sitting", "a cat, sitting", [("outlined", 0.5)]),
    ("a cat\n\n<lora:outlined:0.5>\ta  dog", "a cat\n\n\ta  dog", [("outlined", 0.5)]),
    ("a <3 b < c > d: e <> f", "a <3 b < c > d: e <> f", []),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "text", "lora"), APPLIED, ids=[one[0] for one in APPLIED])
def test_a_tag_is_applied_as_there(prompt: str, text: str, lora: list[tuple[str, float]]) -> None:
    worker = worker_of(OFFERED)

    answer = post(worker, prompt=prompt)

    assert answer.status_code == 200, answer.text
    [job] = worker.jobs
    assert (job.arguments["prompt"], list(job.lora)) == (text, lora)


REFUSED = [
    "<lora:none>", "<LORA:outlined:1>", "<Lora:outlined>", "<lora:outlined:>",
    "<lora:outlined:x>", "<lora:outlined:nan>", "<lora:outlined:inf>", "<lora:outlined:1,5>",
    "<lora:outlined:99>", "<lora:outlined:1:0.5>", "<lora:outlined:te=0.5:unet=1>",
    "<lora:outlined:unet=0.5>", "<lora:outlined:1:1:4>", "<lora:outlined:dyn=4>",
    "<lora:outlined:1:lbw=OUTALL>", "<lyco:outlined:1:lbw=XYZ:stop=5>", "<lora:outlined:1:step=9>",
    "<lora:outlined:0.5:1:1:1:1>", "<hypernet:outlined:1>", "<hypernet:x>", "<ti:outlined>",
    "<locon:outlined:1>", "<lora:outlined:0.5><lora:outlined:0.3>", "<lora:>", "<lora>", "<lora",
    "<lora:outlined:0.5", "< lora:outlined:0.5>", "<lora:" + "x" * 600 + ":1>", "<LYCO outlined>",
    "<hypernet>",
]  # fmt: skip


@pytest.mark.parametrize("tag", REFUSED)
def test_a_tag_that_cannot_be_applied_is_refused_by_name(tag: str) -> None:
    worker = worker_of(OFFERED)

    error = refusal(post(worker, prompt=f"a cat {tag} sitting"))

    assert error["param"] in ("prompt", "lora")
    assert "lora" in error["message"] or tag[:10] in error["message"]
    assert worker.jobs == []


@pytest.mark.parametrize("tag", ["<lora:outlined:1>", "<hypernet:x:1>", "<lora:outlined", "<lora>"])
def test_a_tag_in_the_negative_prompt_is_refused(tag: str) -> None:
    error = refusal(post(worker_of(CARD), prompt="a cat", negative_prompt=f"dogs {tag}"))

    assert error["param"] == "negative_prompt"


def test_switched_off_networks_leave_no_words_either() -> None:
    worker = Grey()

    post(worker, prompt="a cat <lora:outlined:1>", disable_extra_networks=True)

    [job] = worker.jobs
    assert (job.arguments["prompt"], job.lora) == ("a cat", ())


@given(st.text("<>:= lorayct0123.-e\n", max_size=60))
def test_whatever_is_written_no_tag_is_left_in_the_text(prompt: str) -> None:
    try:
        text, _ = split_tags(prompt)
    except Rejected:
        return
    assert split_tags(text) == (text, [])


@pytest.mark.parametrize("piece", [" ", "<", "<a:", "<lora:", "< ", "<lora:x:1 ", "\t<lora:x:1>"])
def test_a_long_prompt_is_split_in_no_time(piece: str) -> None:
    prompt = (piece * 32_000)[:32_000]
    before_s = time.process_time()
    with contextlib.suppress(Rejected):
        split_tags(prompt)
    assert time.process_time() - before_s < 0.5


SDXL = AdapterInfo("x", ("X y",), targets=("text_encoder", "text_encoder_2", "unet"))
MODULES = [
    ("<lora:x:0.5:1>", {"x@text_encoder": 0.5, "x@text_encoder_2": 0.5, "x@unet": 1.0}),
    ("<lora:X y:te=0.5:unet=2>", {"x@text_encoder": 0.5, "x@text_encoder_2": 0.5, "x@unet": 2.0}),
    ("<lyco:x:unet=0.3>", {"x@text_encoder": 1.0, "x@text_encoder_2": 1.0, "x@unet": 0.3}),
    ("<lora:x:0:1>", {"x@unet": 1.0}),
    ("<lora:x:1:0>", {"x@text_encoder": 1.0, "x@text_encoder_2": 1.0}),
    ("<lora:x:.7:unet=.7>", {"x": 0.7}),
    ("<lora:x@unet:0.5:1>", {"x@unet": 1.0}),
    ("<lora:x@text_encoder_2:0.5:1>", {"x@text_encoder_2": 0.5}),
    ("<lora:style:0.5:1>", {"style": 1.0}),  # has no parts for text encoders
    ("<lora:style@transformer_2:0.5:1>", {"style@transformer_2": 1.0}),
    ("<lora:words:0.5:1>", {"words": 0.5}),  # has no others
]


@pytest.mark.parametrize(("tag", "scales"), MODULES, ids=[one[0] for one in MODULES])
def test_scales_of_text_encoders_and_denoiser_are_told_apart(
    tag: str, scales: dict[str, float]
) -> None:
    style = AdapterInfo("style", target="transformer", targets=("transformer", "transformer_2"))
    known = (SDXL, style, AdapterInfo("words", targets=("text_encoder",)))
    _, tags = split_tags(tag)

    applied = check_lora(adapters_of(tags, known), [one.id for one in known], known)

    assert dict(applied) == scales


def drawn(worker: EngineWorker, prompt: str) -> torch.Tensor:
    sent = {"seed": 3, "steps": 2, "width": 64, "height": 64, "negative_prompt": "dogs"}
    answer = post(worker, prompt=prompt, **sent)
    assert answer.status_code == 200, answer.text
    return pixels(picture(base64.b64decode(answer.json()["images"][0])))


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_a_tag_draws_what_the_adapter_at_its_scale_draws_in_plain_diffusers(tmp_path: Path) -> None:
    files = [adapter(tmp_path, "sdxl", seed) for seed in (1, 2)]
    pipe = fresh("sdxl")
    pipe.set_progress_bar_config(disable=True)
    for name, file in zip("ab", files, strict=True):
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name)

    def alone(*scales: Any) -> torch.Tensor:
        pipe.set_adapters(["a", "b"], list(scales))
        image = pipe(
            "a cat", negative_prompt="dogs", num_inference_steps=2, width=64, height=64,
            generator=torch.Generator().manual_seed(3),
        ).images[0]  # fmt: skip
        return pixels(image)

    with driving("sdxl", lora=tuple(f"{n}={f}" for n, f in zip("ab", files, strict=True))) as drive:
        for tags, scales in (
            ("<lora:a:te=0.5:unet=0.5>", (0.5, 0.0)),
            ("<lyco:a> <lora:b:-.3>", (1.0, -0.3)),
            ("", (0.0, 0.0)),
            ("<lora:a:te=0.2:unet=1>", ({**texts(0.2), "unet": 1.0}, 0.0)),
            ("<lora:b:1:0.3> <lora:a:0.4>", (0.4, {**texts(1.0), "unet": 0.3})),
            ("<lora:a:0:1>", ({**texts(0.0), "unet": 1.0}, 0.0)),
        ):
            image = drawn(EngineWorker(drive), f"a cat {tags}".strip())
            assert (image - alone(*scales)).abs().max() <= 1
    assert (alone(0.5, 0.0) - alone(0.0, 0.0)).abs().max() > 8
    apart = alone({**texts(0.2), "unet": 1.0}, 0.0)
    assert (apart - alone(1.0, 0.0)).abs().max() > 8
    assert (apart - alone({**texts(0.0), "unet": 1.0}, 0.0)).abs().max() > 1


def texts(scale: float) -> dict[str, float]:
    return {"text_encoder": scale, "text_encoder_2": scale}
