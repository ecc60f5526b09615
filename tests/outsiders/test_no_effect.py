"""Arguments without effect are warned about: in the answer, the log and jobs; others are not."""

import io
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, StableDiffusionXLInpaintPipeline
from PIL import Image

from carpool.engine.observe.no_effect import EffectObserver, unread_parameters
from carpool.request.card import Parameter
from support.app import CARD, open_app
from support.engine_driver import driving, fresh, gap, plain
from support.engine_worker import EngineWorker
from support.matrix import CASES
from support.matrix.case import Case
from support.matrix.stable import MASKS, PICTURES
from support.pictures import png
from support.tiny import ARGUMENTS

WORDS = {"negative_prompt": "blurry", "true_cfg_scale": 4.5, "guidance_scale": 6.5, "eta": 0.5}
NEGATIVE = {"negative_prompt": "blurry"}
GUIDED = "guidance is off for this request: guidance_scale above 1 switches it on"
TRUE_CFG = "guidance is off for this request: true_cfg_scale above 1 switches it on"


def warnings_of(
    family: str | DiffusionPipeline, words: dict[str, Any], name: str = ""
) -> list[str]:
    pipe = fresh(family) if isinstance(family, str) else family
    common = ARGUMENTS[family if isinstance(family, str) else name]
    given = {**common, "num_inference_steps": 2, **words}
    with driving(pipe) as drive:
        recorder = drive.submit(given.pop("prompt", "a red circle"), **given)
        drive.finish()
    assert recorder.error is None, recorder.error
    return list(recorder.outcome.warnings)


@pytest.fixture
def quiet_log() -> Iterator[io.StringIO]:
    """What diffusers' log writes where its verbosity is `error`."""
    logger, stream = logging.getLogger("diffusers"), io.StringIO()
    levels, level = [(one, one.level) for one in logger.handlers], logger.level
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)
    for one, before in levels:
        one.setLevel(before)


def test_what_diffusers_names_is_in_the_answer_although_its_log_is_quiet(
    quiet_log: io.StringIO,
) -> None:
    [warning] = warnings_of("qwen_image", {"guidance_scale": 5.0})

    assert "guidance_scale" in warning
    assert "ignored" in warning  # in diffusers' own words
    assert quiet_log.getvalue() == ""


@pytest.mark.parametrize(
    ("family", "words", "expected"),
    [
        ("sdxl", {**NEGATIVE, "guidance_scale": 1.0}, ["negative_prompt", GUIDED]),
        ("sdxl", {"negative_prompt_2": "x", "guidance_scale": 1.0}, ["negative_prompt_2", GUIDED]),
        ("sd15", {**NEGATIVE, "guidance_scale": 1.0}, ["negative_prompt", GUIDED]),
        ("sd3", {**NEGATIVE, "guidance_scale": 0.0}, ["negative_prompt", GUIDED]),
        ("flux", NEGATIVE, ["negative_prompt", TRUE_CFG]),
        ("flux", {"negative_prompt_2": "blurry"}, ["negative_prompt_2", TRUE_CFG]),
        ("flux", {"true_cfg_scale": 4.0}, ["true_cfg_scale", "it needs a negative_prompt"]),
        ("zimage", {**NEGATIVE, "guidance_scale": 0.0}, ["negative_prompt", "guidance is off"]),
        ("wan21_t2v", {**NEGATIVE, "guidance_scale": 1.0}, ["negative_prompt", GUIDED]),
        ("sdxl", {"eta": 0.5}, ["eta", "EulerDiscreteScheduler takes none"]),
        ("sdxl", {"negative_prompt_2": "blurry"}, ["negative_prompt_2", "did not read it"]),
        ("sdxl", {"negative_original_size": (8, 8)}, ["it needs negative_target_size"]),
        ("sd3", {"skip_layer_guidance_scale": 3.0}, ["it needs skip_guidance_layers"]),
        ("sd3", {"ip_adapter_image": Image.new("RGB", (8, 8))}, ["has no IP-adapter"]),
        ("sdxl", {"cross_attention_kwargs": {"ip_adapter_masks": []}}, ["kwargs had no"]),
        ("cogview3", {"eta": 0.5}, ["eta", "takes none"]),
        ("ltx", {"guidance_rescale": 0.7, "guidance_scale": 1.0}, ["guidance_rescale", GUIDED]),
        ("kontext", {"width": 64, "height": 64}, ["width", "have been adjusted to 32 and 32"]),
        ("qwen_image", {**NEGATIVE, "true_cfg_scale": 1.0}, ["negative_prompt", "not enabled"]),
        ("flux", {"joint_attention_kwargs": {"a": 1}}, ["joint_attention_kwargs", "['a']"]),
        ("sd3", {"joint_attention_kwargs": {"a": 1}}, ["['a'] are not expected"]),
        ("sd15", {"cross_attention_kwargs": {"scale": 0.5}}, ["cross_attention_kwargs had no"]),
        ("wan21_t2v", {"attention_kwargs": {"a": 1}}, ["attention_kwargs", "no module or LoRA"]),
        ("zimage", {"joint_attention_kwargs": {"a": 1}}, ["joint_attention_kwargs", "no module"]),
    ],
)  # fmt: skip
def test_an_argument_without_effect_is_named_in_the_answer(
    family: str, words: dict[str, Any], expected: list[str]
) -> None:
    warnings = warnings_of(family, words)

    assert len(warnings) == 1, warnings
    assert all(part in warnings[0] for part in expected)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("sdxl", {"negative_prompt": "", "guidance_scale": 1.0}),
        ("sdxl", {"guidance_scale": 1.0}),
        ("sdxl", {"eta": 0.0}),
        ("ltx", {"guidance_rescale": 0.7, "guidance_scale": 3.0}),
        ("flux", {"negative_prompt": "Blurry, PHOTO!", "true_cfg_scale": 3.0}),
        ("flux", {"negative_prompt": "a red circle", "true_cfg_scale": 3.0}),
        ("flux", {"true_cfg_scale": 1.0}),
        ("sana", {"negative_prompt": "A  <b>Blurry</b> photo &amp; more", "guidance_scale": 3.0}),
        ("wan21_t2v", {"negative_prompt": " two   words ", "guidance_scale": 3.0}),
        ("qwen_image", {"negative_prompt": "模糊", "true_cfg_scale": 3.0}),
        ("flux", {"joint_attention_kwargs": {}}),
    ],
)
def test_an_argument_with_an_effect_is_not(family: str, words: dict[str, Any]) -> None:
    assert warnings_of(family, words) == []


def test_only_the_requests_whose_arguments_a_forward_ignores_are_told() -> None:
    with driving("flux") as drive:
        sizes = {**ARGUMENTS["flux"], "num_inference_steps": 2}
        keys: Any = {"joint_attention_kwargs": {"a": 1}}, {}, {"joint_attention_kwargs": {"b": 1}}
        told = [drive.submit("a", **{**sizes, **words}) for words in keys]
        drive.finish()

    warnings = [one.outcome.warnings for one in told]
    assert [len(one) for one in warnings] == [1, 0, 1]
    assert "['b']" in warnings[2][0]


def test_guidance_of_a_distilled_model_has_no_effect() -> None:
    pipe = fresh("flux")
    pipe.transformer.register_to_config(guidance_embeds=False)  # as FLUX.1-schnell
    pipe.transformer.time_text_embed = _without_guidance(pipe)

    [warning] = warnings_of(pipe, {"guidance_scale": 7.0}, "flux")
    assert warning == "guidance_scale had no effect: the pipeline does not use it with this model"


def _without_guidance(pipe: Any) -> Any:
    from diffusers.models.embeddings import CombinedTimestepTextProjEmbeddings

    embedder = pipe.transformer.time_text_embed
    plain = CombinedTimestepTextProjEmbeddings(pipe.transformer.inner_dim, 32)
    plain.load_state_dict(embedder.state_dict(), strict=False)
    return plain


def test_eta_has_an_effect_where_the_scheduler_takes_it() -> None:
    pipe = fresh("sdxl")
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    assert warnings_of(pipe, {"eta": 0.5}, "sdxl") == []


def test_only_the_refiner_reads_an_aesthetic_score() -> None:
    pipe = StableDiffusionXLInpaintPipeline.from_pipe(fresh("sdxl"))
    pictures = {"image": PICTURES[0], "mask_image": MASKS[0], "strength": 1.0}

    [warning] = warnings_of(pipe, {**pictures, "aesthetic_score": 9.0}, "sdxl")
    assert warning == "aesthetic_score had no effect: only the refiner reads it"


def test_a_guidance_that_a_callback_ends_halfway_had_an_effect() -> None:
    def ends(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        pipe._guidance_scale = 0.0 if step else pipe._guidance_scale
        return {}

    words = {"negative_prompt": "blurry", "guidance_scale": 3.0, "callback_on_step_end": ends}
    words |= {"callback_on_step_end_tensor_inputs": []}
    assert warnings_of("sd3", words | {"num_inference_steps": 1}) == []


def test_what_a_pipelines_code_never_reads_is_known() -> None:
    import diffusers

    assert unread_parameters(diffusers.AudioLDM2Pipeline) == {"cross_attention_kwargs"}
    assert unread_parameters(diffusers.FluxPipeline) == frozenset()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.is_fast else [pytest.mark.slow], id=case.name)
        for case in CASES
        if not case.needs_torchvision
    ],
)
def test_a_warning_is_true_and_nothing_without_effect_goes_without_one(case: Case) -> None:
    family = {n: v for n, v in ARGUMENTS[case.family].items() if n not in case.without}
    base = {**family, **case.common, **case.requests[0]}
    base = {n: v for n, v in base.items() if n not in WORDS and "negative" not in n}
    pipe = fresh(case.family)
    with driving(case.adapt(pipe) if case.adapt else pipe) as drive:
        task = drive.engine.loaded.card.tasks[0]

        def drawn(**words: Any) -> tuple[torch.Tensor, str]:
            recorder = drive.submit(**{**base, **words})
            drive.finish()
            assert recorder.error is None
            fields = recorder.outcome.fields
            made = fields["frames" if "frames" in fields else "images"]
            return made, " ".join(recorder.outcome.warnings)

        for off in ({}, {"guidance_scale": 1.0} if task.takes("guidance_scale") else {}):
            plain, _ = drawn(**off)
            for name, value in WORDS.items():
                if task.takes(name) and name not in off:
                    changed, warnings = drawn(**off, **{name: value})
                    has_effect = gap(changed, plain) > 0
                    assert has_effect != (name in re.findall(r"\w+", warnings)), (name, warnings)


async def test_warnings_reach_every_door_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    told: dict[str, Any] = {}
    body = {"prompt": "a", "negative_prompt": "blurry", "num_inference_steps": 1, "size": "64x64"}
    body |= {"max_sequence_length": 48}
    user = {"messages": [{"role": "user", "content": "a"}]} | {
        name: value for name, value in body.items() if name != "prompt"
    }

    with caplog.at_level(logging.WARNING), driving(fresh("flux")) as drive:
        async with open_app(EngineWorker(drive)) as opened:
            http, images = opened.http, "/v1/images/generations"
            told["images"] = (await http.post(images, json=body)).json()["warnings"]
            told["stream"] = (await http.post(images, json={**body, "stream": True})).text
            told["chat"] = (await http.post("/v1/chat/completions", json=user)).json()["warnings"]
            chunks = await http.post("/v1/chat/completions", json={**user, "stream": True})
            told["chunks"] = chunks.text
            sent = {"prompt": "a", "negative_prompt": "blurry", "steps": 1}
            sent |= {"width": 64, "height": 64}
            told["sdapi"] = (await http.post("/sdapi/v1/txt2img", json=sent)).json()["info"]
            inner = {name: value for name, value in body.items() if name not in ("prompt", "size")}
            inner["target_size"] = {"width": 64, "height": 64}
            drawn = await http.post("/", json={"inputs": "a", "parameters": inner})
            told["hub"] = drawn.headers["x-warnings"]
            job = (await http.post(images, json={**body, "background_job": True})).json()
            told["job"] = (await opened.ended(job["id"]))["warnings"]

    for door, said in told.items():
        assert "negative_prompt had no effect" in str(said), door
    assert "negative_prompt had no effect" in caplog.text


@pytest.mark.parametrize(("words", "is_warned"), [({}, True), ({"image": png(8, 8)}, False)])
def test_a_strength_without_a_picture_has_no_effect(words: dict[str, Any], is_warned: bool) -> None:
    task = replace(CARD.tasks[0], parameters=(*CARD.parameters, Parameter("image", "other")))
    observer = EffectObserver(CARD, task, {"prompt": "a", "strength": 0.5, **words})

    assert ("strength" in dict(observer.reasons(plain("flux")))) is is_warned


def test_a_servers_own_defaults_and_the_models_are_not_warned_about() -> None:
    card = replace(CARD, defaults={"strength": 0.5, "negative_prompt": "blurry"})
    own = {one.name: one.default for one in CARD.parameters if one.default is not None}
    observer = EffectObserver(card, CARD.tasks[0], {"prompt": "a", **own, **card.defaults})

    assert observer.arguments.keys() == {"prompt"}
