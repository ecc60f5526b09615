"""Fields of AUTOMATIC1111's API: defaults are taken, others applied as there or refused."""

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from PIL import Image

from carpool.media.metadata import as_json
from carpool.request.card import Card, Parameter
from support.app import CARD, Grey, ask, refusal
from support.engine_driver import driving, fresh
from support.engine_worker import EngineWorker
from support.forms import BOTH, worker_of
from support.pictures import picture, pixels, png, saved

Arguments = Mapping[str, Any]
API = "/sdapi/v1/"
STYLED = {"styles": None, "restore_faces": None, "tiling": None, "eta": None, "s_churn": None}
TXT2IMG: dict[str, Any] = {  # each field with its default, as that program documents it
    "prompt": "", "negative_prompt": "", **STYLED, "seed": -1, "subseed": -1,
    "subseed_strength": 0, "seed_resize_from_h": -1, "seed_resize_from_w": -1,
    "sampler_name": None, "scheduler": None, "batch_size": 1, "n_iter": 1, "steps": 50,
    "cfg_scale": 7.0, "width": 512, "height": 512, "do_not_save_samples": False,
    "do_not_save_grid": False, "denoising_strength": None, "s_min_uncond": None, "s_tmax": None,
    "s_tmin": None, "s_noise": None, "override_settings": None,
    "override_settings_restore_afterwards": True, "refiner_checkpoint": None,
    "refiner_switch_at": None, "disable_extra_networks": False, "firstpass_image": None,
    "comments": None, "enable_hr": False, "firstphase_width": 0, "firstphase_height": 0,
    "hr_scale": 2.0, "hr_upscaler": None, "hr_second_pass_steps": 0, "hr_resize_x": 0,
    "hr_resize_y": 0, "hr_checkpoint_name": None, "hr_sampler_name": None, "hr_scheduler": None,
    "hr_prompt": "", "hr_negative_prompt": "", "force_task_id": None, "sampler_index": "Euler",
    "script_name": None, "script_args": [], "send_images": True, "save_images": False,
    "alwayson_scripts": {}, "infotext": None,
}  # fmt: skip
OLDER = {  # what older versions, Forge and other programs send beside those, or instead
    "styles": [], "eta": 0, "s_churn": 0.0, "s_tmax": 0.0, "s_tmin": 0.0, "s_noise": 1.0,
    "override_settings": {}, "restore_faces": False, "tiling": False, "comments": {},
    "seed_enable_extras": True, "token_merging_ratio": 0, "token_merging_ratio_hr": 0,
    "refiner_checkpoint": "", "refiner_switch_at": 0.8, "infotext": "", "sampler_name": "",
    "scheduler": "", "seed_resize_from_h": 0, "firstphase_width": 512, "hr_cfg": 1.0,
    "hr_distilled_cfg": 3.5, "hr_additional_modules": ["Use same choices"], "user": None,
    "distilled_cfg_scale": 3.5, "script_name": "None", "script_args": [0, False],
    "alwayson_scripts": {
        "ADetailer": {"args": [False, False, {}]}, "ControlNet": {"args": [{"enabled": False}]},
        "Refiner": {"args": []}, "Seed": {"args": None},
    },
}  # fmt: skip
IMG2IMG: dict[str, Any] = {
    **TXT2IMG, "resize_mode": 0, "denoising_strength": 0.75, "image_cfg_scale": None,
    "mask": None, "mask_blur_x": 4, "mask_blur_y": 4, "mask_blur": None, "mask_round": True,
    "inpainting_fill": 0, "inpaint_full_res": True, "inpaint_full_res_padding": 0,
    "inpainting_mask_invert": 0, "initial_noise_multiplier": None, "latent_mask": None,
    "include_init_images": False,
}  # fmt: skip


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def post(worker: Grey, path: str = "txt2img", **body: Any) -> Any:
    return ask(json.dumps(body), API + path, worker=worker)


def taken(worker: Grey, path: str = "txt2img", **body: Any) -> tuple[Arguments, list[str]]:
    """The arguments of the request, and the warnings in its answer."""
    answer = post(worker, path, **body)
    assert answer.status_code == 200, answer.text
    told = json.loads(answer.json()["info"])
    return worker.jobs[0].arguments, told["warnings"]


@pytest.mark.parametrize("more", [{}, OLDER], ids=["newest", "older"])
def test_a_body_of_all_its_defaults_is_taken(more: dict[str, Any]) -> None:
    body = {**TXT2IMG, **more, "prompt": "a cat"}

    arguments, warnings = taken(worker_of(CARD), **body)

    expected = {"prompt": "a cat", "width": 512, "height": 512, "num_inference_steps": 50,
                "true_cfg_scale": 7.0}  # fmt: skip
    assert arguments == expected | ({"guidance_scale": 3.5} if more else {})
    assert warnings == []


@pytest.mark.parametrize("more", [{}, OLDER, {"mask": ""}], ids=["newest", "older", "no mask"])
def test_a_body_of_all_defaults_draws_a_picture_anew(more: dict[str, Any]) -> None:
    body = {**IMG2IMG, **more, "prompt": "a", "width": 64, "height": 48}

    arguments, _ = taken(worker_of(BOTH), "img2img", **body, init_images=[b64(png(64, 48))])

    assert (arguments["strength"], arguments["num_inference_steps"]) == (0.75, 50)
    assert "mask_image" not in arguments


def test_a_mask_goes_with_all_defaults() -> None:
    cropping = Parameter("padding_mask_crop", "int")
    fill = replace(BOTH.tasks[2], parameters=(*BOTH.tasks[2].parameters, cropping))
    worker = worker_of(replace(BOTH, tasks=(*BOTH.tasks[:2], fill)))
    body = {**IMG2IMG, "prompt": "a", "width": 64, "height": 64}
    image, mask = Image.new("RGB", (64, 64), "red"), Image.new("L", (64, 64), 0)
    image.paste("blue", (24, 24, 40, 40))
    mask.paste(255, (20, 20, 44, 44))

    arguments, _ = taken(
        worker, "img2img", **{**body, "mask": b64(saved(mask))}, init_images=[b64(saved(image))]
    )

    assert arguments["padding_mask_crop"] == 0
    low, high = (arguments["mask_image"].getpixel((x, 32)) for x in (19, 32))
    assert 40 < low < 128  # blurred by four pixels
    assert high > 250
    red, _, blue = arguments["image"].getpixel((32, 32))  # filled with what is around
    assert red > 200 > 60 > blue
    assert arguments["image"].getpixel((2, 2)) == (255, 0, 0)


def test_a_sampler_of_its_own_name_leaves_the_other_field_unread() -> None:
    taken(Grey(), prompt="a", sampler_name="Automatic", sampler_index="Euler a")


def test_weights_of_words_are_warned_of() -> None:
    for text, is_weighted in (
        ("a (red cat:1.3)", True), ("(a:.8)", True), ("((a b:1.2)), c", True), ("(a: 2 )", True),
        ("(a:-1)", True), ("((a))", True), ("[a]", True), ("[a:b:0.5]", True), ("[a::3]", True),
        ("[a|b]", True), ("a BREAK b", True), ("a AND b:1.2", True), ("a break and b", False),
        ("a BREAKER, SAND", False), ("[]", False), ("(a (b:1.2) c)", True),
        ("a (red cat)", False), ("a ratio (16:9 b)", False), ("at 12:30", False), ("(a:b)", False),
    ):  # fmt: skip
        for name in ("prompt", "negative_prompt"):
            arguments, warnings = taken(Grey(), **{"prompt": "a", name: text})
            assert arguments[name] == text
            assert [one.partition(" ")[0] for one in warnings] == [name] * is_weighted


def test_numbers_are_taken_as_texts_and_with_a_point() -> None:
    plain: dict[str, Any] = {
        "steps": 20, "cfg_scale": 7, "width": 64, "height": 64, "seed": 5, "n_iter": 2,
    }  # fmt: skip
    arguments, _ = taken(worker := Grey(), prompt="a", **plain)
    kinds: list[Any] = [str, float, lambda number: f"{number}.0"]
    for kind in kinds:
        other = Grey()
        sent = {name: kind(number) for name, number in plain.items()}
        assert taken(other, prompt="a", **sent)[0] == arguments
        assert [job.seed for job in other.jobs] == [job.seed for job in worker.jobs]
    wrong = ("1.5", 1.5, "", "a", "nan", "inf", "1e999", True, [1], "9" * 5000)
    for value in wrong:
        refusal(post(Grey(), prompt="a", steps=value))
    assert taken(Grey(), prompt="a", seed="-1", cfg_scale="6.5")[0]["true_cfg_scale"] == 6.5


def test_escaped_brackets_are_brackets_and_have_no_weight() -> None:
    """As that program reads them: a backslash alone is nothing."""
    for text, meant in (
        (r"miku \(vocaloid\)", "miku (vocaloid)"), (r"\(a:1.3\)", "(a:1.3)"), (r"\[a|b\]", "[a|b]"),
        (r"a \\ b", "a \\ b"), (r"a \b", "a b"), (r"a \<lora:outlined:1>", "a "),
        (r"\((a)\)", "((a))"), (r"a b", "a b"),
    ):  # fmt: skip
        worker = Grey()
        arguments, warnings = taken(worker, prompt=text)
        assert (arguments["prompt"], warnings) == (meant, [])
        if "<" not in text:
            assert taken(Grey(), prompt="a", negative_prompt=text)[0]["negative_prompt"] == meant


# Guidance and eta


def without(card: Card, *names: str) -> Card:
    [task] = card.tasks
    left = tuple(one for one in task.parameters if one.name not in names)
    return replace(card, tasks=(replace(task, parameters=left),))


def with_parameter(name: str, kind: Any = "float") -> Card:
    [task] = CARD.tasks
    parameters = (*task.parameters, Parameter(name, kind))
    return replace(CARD, tasks=(replace(task, parameters=parameters),))


def test_forges_guidance_of_distilled_models_is_that_of_no_others() -> None:
    both: dict[str, Any] = {"prompt": "a", "cfg_scale": 6, "distilled_cfg_scale": 3.5}

    flux, _ = taken(worker_of(CARD), **both)
    sdxl, quiet = taken(worker_of(without(CARD, "true_cfg_scale")), **both)
    flux2, _ = taken(worker_of(without(CARD, "true_cfg_scale", "negative_prompt")), **both)
    _, told = taken(
        worker_of(without(CARD, "true_cfg_scale")), **{**both, "distilled_cfg_scale": 9}
    )

    assert (flux["true_cfg_scale"], flux["guidance_scale"]) == (6, 3.5)
    assert (sdxl["guidance_scale"], flux2["guidance_scale"], quiet) == (6, 3.5, [])
    assert "distilled_cfg_scale=9 changes nothing" in told[0]


def test_eta_is_handed_on_where_the_model_takes_one_and_warned_of_elsewhere() -> None:
    for eta in (1, 1.0, 0.3):
        arguments, warnings = taken(worker_of(with_parameter("eta")), prompt="a", eta=eta)
        assert (arguments["eta"], warnings) == (eta, [])
        arguments, warnings = taken(worker_of(CARD), prompt="a", eta=eta)
        assert "eta" not in arguments
        assert "changes nothing" in warnings[0]
    for resting in (0, 0.0, None):
        arguments, warnings = taken(worker_of(with_parameter("eta")), prompt="a", eta=resting)
        assert ("eta" in arguments, warnings) == (False, [])


def test_the_guidance_of_edits_is_what_it_is_called_there() -> None:
    worker = worker_of(with_parameter("image_guidance_scale"))

    assert taken(worker, prompt="a", image_cfg_scale=1.7)[0]["image_guidance_scale"] == 1.7
    assert "image_guidance_scale" not in taken(Grey(), prompt="a", image_cfg_scale=1.7)[0]


# On models


def alone(pipe: DiffusionPipeline, **arguments: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    chance = torch.Generator().manual_seed(3)
    images = pipe(
        "a cat", num_inference_steps=2, width=64, height=64, generator=chance, **arguments
    ).images
    return pixels(images[0])


def drawn(
    model: DiffusionPipeline | str, **fields: Any
) -> tuple[torch.Tensor, list[str], Arguments]:
    sent = {"prompt": "a cat", "seed": 3, "steps": 2, "width": 64, "height": 64, **fields}
    with driving(model) as drive:
        worker = EngineWorker(drive)
        answer = post(worker, **sent)
    assert answer.status_code == 200, answer.text
    image = pixels(picture(base64.b64decode(answer.json()["images"][0])))
    return image, json.loads(answer.json()["info"])["warnings"], worker.jobs[0].arguments


def layers(count: Any) -> dict[str, Any]:
    return {"override_settings": {"CLIP_stop_at_last_layers": count}}


@pytest.mark.parametrize("family", ["sdxl", "sd3"])
def test_two_text_encoders_stop_where_they_always_do(family: str) -> None:
    expected = alone(fresh(family))

    for count in (1, 2, 3):
        image, warnings, _ = drawn(family, **layers(count))
        assert (image - expected).abs().max() <= 1
        assert any("changes nothing" in one for one in warnings) is (count == 3)
    assert (alone(fresh(family), clip_skip=1) - expected).abs().max() > 1  # it could


def test_stable_diffusion_1_stops_where_it_is_told_to() -> None:
    """Beside transformers 5, its pipeline finds the last norm under the name of 4 only."""
    pipe = fresh("sd15")
    vars(pipe.text_encoder).setdefault("text_model", pipe.text_encoder)
    expected = {count: alone(pipe, clip_skip=count - 1) for count in (2, 3)} | {1: alone(pipe)}

    for count in (1, 2, 3):
        image, warnings, arguments = drawn("sd15", **layers(count))
        assert (image - expected[count]).abs().max() <= 1
        assert (arguments.get("clip_skip"), warnings) == (count - 1 or None, [])
    assert (expected[2] - expected[1]).abs().max() > 1
    assert (expected[3] - expected[2]).abs().max() > 1


def test_the_field_of_sd_next_counts_layers_alike() -> None:
    """SillyTavern sends it beside the other, 1 by default; a pipeline's own 1 is another layer."""
    both = {"clip_skip": 1, **layers(1)}
    expected, _, _ = drawn("sd15")
    for sent in ({"clip_skip": 1}, both, {"clip_skip": None}):
        image, warnings, arguments = drawn("sd15", **sent)
        assert (image - expected).abs().max() <= 1
        assert ("clip_skip" in arguments, warnings) == (False, [])
    for sent in ({"clip_skip": 2}, {"clip_skip": 2, **layers(None)}, {"clip_skip": 3, **layers(2)}):
        assert drawn("sd15", **sent)[2]["clip_skip"] == 1
    taken(worker_of(without(CARD, "clip_skip")), prompt="a", clip_skip=1)
    refusal(post(worker_of(without(CARD, "clip_skip")), prompt="a", clip_skip=2))


def test_more_layers_than_there_are_are_the_clients_fault() -> None:
    with driving("sd15") as drive:
        sent = {"prompt": "a cat", "steps": 2, "width": 64, "height": 64, **layers(12)}
        error = refusal(post(EngineWorker(drive), **sent))

    assert error["param"] == "clip_skip"


def test_stable_diffusion_2_stops_where_it_always_does() -> None:
    pipe = fresh("sd15")
    pipe.text_encoder.config.hidden_size = 1024  # OpenCLIP's

    _, warnings, arguments = drawn(pipe, **layers(3))

    assert "clip_skip" not in arguments
    assert "changes nothing" in warnings[0]


def test_a_model_without_such_layers_refuses_them() -> None:
    worker = worker_of(without(CARD, "clip_skip"))

    wrong: list[Any] = [2, 0, 99, "2", 1.5, True, []]
    for count in wrong:
        assert refusal(post(worker, prompt="a", **layers(count)))["code"] == "invalid_value"
    taken(worker, prompt="a", **layers(1))
    taken(worker, prompt="a", **layers(None))


def test_eta_draws_what_it_does_in_plain_diffusers() -> None:
    def ddim() -> Any:
        pipe = fresh("sd15")
        pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
        return pipe

    for eta in (1, 0.5):
        assert (drawn(ddim(), eta=eta)[0] - alone(ddim(), eta=eta)).abs().max() <= 1
    assert (drawn(ddim(), eta=0)[0] - alone(ddim())).abs().max() <= 1
    assert (alone(ddim(), eta=1) - alone(ddim())).abs().max() > 1


def test_options_of_layers_are_taken_where_they_change_nothing() -> None:
    fixed = replace(with_parameter("prompt_2", "str"), has_fixed_text_layer=True)

    for card, status in ((fixed, 200), (CARD, 400)):
        body = as_json({"CLIP_stop_at_last_layers": 2})
        assert ask(body, API + "options", worker=worker_of(card)).status_code == status
