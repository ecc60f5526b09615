"""Wan, HunyuanVideo, LTX-2 and Helios: calls of videos that may share a forward, or only seem to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, WanPipeline
from torch import Tensor

from carpool.engine.fuse import Fuser
from fakes import call_on, fuse, run
from matrix.case import VIDEO
from matrix.ltx2 import UNGUIDED
from matrix.wan import CAT, IMAGES, LONG, image_to_video, without_ftfy
from support import Drive, driving, gap, plain, served
from tiny import ARGUMENTS

pytestmark = pytest.mark.slow
VISIBLE = 100 * VIDEO


def pipeline_for(family: str, request: dict[str, Any]) -> DiffusionPipeline:
    """The plain pipeline that does what is asked for: one model of Wan has two."""
    pipe = plain(family)
    if "image" not in request or not isinstance(pipe, WanPipeline):
        return without_ftfy(pipe)
    sister = image_to_video(pipe)
    sister.set_progress_bar_config(disable=True)
    return sister


def alone(family: str, *, seed: int = 0, **request: Any) -> dict[str, Tensor]:
    """What plain diffusers gives: frames, and sound where the model makes any."""
    pipe = pipeline_for(family, request)
    arguments = {**ARGUMENTS[family], **request}
    return dict(pipe(**arguments, generator=torch.Generator().manual_seed(seed)).items())


def calls(family: str, **request: Any) -> list[dict[str, Any]]:
    """What plain diffusers passes to the transformer, call by call."""
    seen: list[dict[str, Any]] = []
    handle = plain(family).transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    try:
        alone(family, **request)
    finally:
        handle.remove()
    return seen


def ride(
    family: str,
    *requests: dict[str, Any],
    later: tuple[dict[str, Any], ...] = (),
    when: Callable[[Drive], object] = lambda drive: True,
) -> Drive:
    """Run requests together, `later` joining `when`, and see that each gets what it gets alone."""
    everyone = [{"seed": seed, **one} for seed, one in enumerate([*requests, *later])]
    expected = [alone(family, **one) for one in everyone]
    with driving(without_ftfy(served(family))) as drive:
        submit = (drive.submit(**{**ARGUMENTS[family], **one}) for one in everyone)
        heard = [next(submit) for _ in requests]
        drive.turn_until(lambda: bool(when(drive)))
        assert not any(recorder.is_done for recorder in heard)
        heard += submit
        drive.finish()
    for recorder, fields in zip(heard, expected, strict=True):
        assert recorder.error is None
        assert recorder.outcome.fields.keys() == fields.keys()
        for name, value in fields.items():
            assert gap(recorder.outcome.fields[name], value) <= VIDEO, name
    return drive


def test_requests_on_either_side_of_the_boundary_fuse_on_an_expert_each() -> None:
    early = {"num_inference_steps": 6, "guidance_scale_2": 2.0}
    drive = ride(
        "wan22_t2v_a14b",
        {"prompt": CAT, **early},
        {"prompt": LONG, "guidance_scale": 3.0, **early},
        later=({"prompt": LONG, "guidance_scale": 2.0}, {"prompt": CAT, "guidance_scale_2": 1.5}),
        when=lambda drive: drive.widths("transformer_2"),
    )

    experts = [forward.component for forward in drive.forwards if forward.phase == "denoise"]
    *_, before, last = (i for i, name in enumerate(experts) if name == "transformer")
    assert experts[before:last] == ["transformer", "transformer_2"]  # in use at once, in turns
    assert drive.widths("transformer") == [2] * 6
    assert drive.widest("transformer_2") == 4  # with those that joined


def test_whole_timesteps_and_fractions_share_no_forward_and_each_kind_shares_its_own() -> None:
    pipe = plain("wan21_t2v")
    whole = calls("wan21_t2v", prompt=CAT)
    before, pipe.scheduler = pipe.scheduler, FlowMatchEulerDiscreteScheduler(shift=3.0)
    try:
        fractions = calls("wan21_t2v", prompt=LONG)
    finally:
        pipe.scheduler = before
    assert whole[0]["timestep"].dtype == torch.int64
    assert all(one["timestep"].frac() > 0 for one in fractions[2:])
    model = pipe.transformer

    assert not fuse(whole[0], fractions[0], module=model)
    for kind in (whole, fractions):
        with torch.no_grad():
            answers = run(Fuser(), [call_on(model, **one) for one in kind])
            for answer, one in zip(answers, kind, strict=True):
                assert gap(answer[0], model(**one)[0]) <= VIDEO


def test_text_and_pictures_to_video_share_forwards_with_a_timestep_for_each_token() -> None:
    picture, text = {"prompt": CAT, "image": IMAGES[0]}, {"prompt": CAT}
    times = [calls("wan22_ti2v_5b", **one)[2]["timestep"] for one in (text, picture)]
    assert times[0].shape == times[1].shape
    assert [len(one.unique()) for one in times] == [1, 2]  # the first picture is without noise

    drive = ride(
        "wan22_ti2v_5b",
        text,
        {**picture, "num_inference_steps": 4},
        later=({"prompt": LONG}, {"prompt": LONG, "image": IMAGES[1], "num_inference_steps": 2}),
        when=lambda drive: 2 in drive.widths("transformer"),
    )

    assert drive.widest("transformer") == 4
    assert drive.widest("vae", "encode") == 1  # one joined later


def test_what_an_encoder_saw_of_a_picture_follows_its_row() -> None:
    requests = [{"prompt": CAT, "image": image} for image in IMAGES[:2]]
    left, right = (calls("wan21_i2v", **one)[0] for one in requests)
    name, model = "encoder_hidden_states_image", plain("wan21_i2v").transformer
    with torch.no_grad():
        assert gap(model(**left)[0], model(**{**left, name: right[name]})[0]) >= VISIBLE

    drive = ride("wan21_i2v", *requests)

    assert drive.widths("image_encoder") == [2]
    assert drive.widths("transformer") == [2] * 6


def test_texts_are_padded_for_the_encoder_and_never_for_a_denoiser_without_a_mask() -> None:
    short, long = {"prompt": CAT, "max_sequence_length": 16}, {"prompt": CAT}
    difference = gap(alone("wan21_t2v", **short)["frames"], alone("wan21_t2v", **long)["frames"])
    assert difference >= VISIBLE, "the trap is none: zeros after the text are not read"

    drive = ride("wan21_t2v", short, long, {**long, "prompt": LONG})

    assert drive.widths("text_encoder") == [3, 3]
    assert sorted(drive.widths("transformer")) == [1] * 6 + [2] * 6


def test_texts_of_all_lengths_and_guidances_share_a_forward_under_a_mask_of_floats() -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": CAT, "guidance_scale": 6.0},
        {"prompt": LONG, "guidance_scale": 1.5, "max_sequence_length": 12},  # cut
        {"prompt": "", "guidance_scale": 3.0, "max_sequence_length": 20},
        {"prompt": LONG, "guidance_scale": 9.0, "max_sequence_length": 64},
    ]
    firsts = [calls("hunyuan_t2v", **one)[0] for one in requests]
    masks = [one["encoder_attention_mask"] for one in firsts]
    assert {mask.dtype for mask in masks} == {torch.float32}
    assert [mask.shape[1] for mask in masks] == [32, 12, 20, 64]
    assert [bool(mask.all()) for mask in masks] == [False, True, False, False]
    assert len({float(one["guidance"]) for one in firsts}) == 4

    drive = ride("hunyuan_t2v", *requests)

    assert drive.widths("text_encoder") == drive.widths("text_encoder_2") == [4]
    assert drive.widths("transformer") == [4, 4, 4]


@pytest.mark.parametrize("guidance", [{}, UNGUIDED], ids=["three-calls-a-step", "one-call-a-step"])
def test_as_many_tokens_in_another_geometry_share_a_forward_by_their_coordinates(
    guidance: dict[str, float],
) -> None:
    wide = {"prompt": CAT, "width": 64, "height": 32, **guidance}
    tall = {"prompt": CAT, "width": 32, "height": 64, **guidance}
    large = {"prompt": CAT, "width": 64, "height": 64, **guidance}
    left, right = (calls("ltx2", **one)[0] for one in (wide, tall))
    assert left["hidden_states"].shape == right["hidden_states"].shape
    model = plain("ltx2").transformer
    with torch.no_grad():
        moved = model(**{**left, "video_coords": right["video_coords"]})
        for ours, theirs in zip(model(**left), moved, strict=True):  # video and sound
            assert gap(ours, theirs) >= VISIBLE

    drive = ride("ltx2", wide, tall, large)

    forwards = 3 if guidance else 9
    assert sorted(drive.widths("transformer")) == [1] * forwards + [2] * forwards
    assert drive.widths("vae", "decode") == [1, 1, 1]
    assert drive.widths("audio_vae", "decode") == [3]  # a sound has no sides


def test_chunks_of_videos_of_all_lengths_share_a_forward_where_their_indices_are_equal() -> None:
    long = {"prompt": CAT, "num_frames": 10}
    first, *_, last = calls("helios_base", **long)  # of another chunk
    model = plain("helios_base").transformer
    assert fuse(first, last, module=model)
    for name in (name for name in last if name.startswith("indices_")):
        moved = {**last, name: last[name] + 8}
        assert not fuse(last, moved, module=model)
        with torch.no_grad():
            assert gap(model(**last)[0], model(**moved)[0]) >= VISIBLE

    other = {"history_sizes": [8, 2, 1]}
    drive = ride(
        "helios_base",
        long,
        {**long, **other},
        later=({"prompt": LONG}, {"prompt": LONG, **other}),
        when=lambda drive: drive.widths("vae", "decode"),  # of the first chunk
    )

    assert sorted(drive.widths("transformer")) == [1] * 20 + [2] * 8


def test_the_causal_decoder_keeps_videos_apart_and_decodes_each_length_by_itself() -> None:
    unguided = {"guidance_scale": 1.0}
    drive = ride(
        "wan21_t2v",
        *({"prompt": prompt, "num_frames": 9, **unguided} for prompt in (CAT, LONG, "")),
        *({"prompt": prompt, "num_frames": 5, **unguided} for prompt in (CAT, LONG)),
        {"prompt": CAT, "num_frames": 13, **unguided},
    )

    assert drive.widths("vae", "decode") == drive.widths("transformer")[:3] == [3, 2, 1]
