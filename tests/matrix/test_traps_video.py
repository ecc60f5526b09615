"""Wan, HunyuanVideo, LTX-2 and Helios: calls that look as if they could share a forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from torch import Tensor

from carpool.engine.fuse import Fuser
from support.engine_driver import Drive, driving, gap, plain, served
from support.fake_models import call_on, fuse, run
from support.matrix.case import VIDEO
from support.matrix.wan import CAT, IMAGES, LONG, image_to_video, without_ftfy
from support.tiny import ARGUMENTS

pytestmark = pytest.mark.slow
VISIBLE = 10 * VIDEO  # in one answer of a denoiser


def alone(family: str, request: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """What plain diffusers gives: frames, and sound where the model makes any."""
    pipe = without_ftfy(plain(family))
    if "image" in request and isinstance(pipe, WanPipeline):
        pipe = image_to_video(pipe)  # over the same modules
    generator = torch.Generator().manual_seed(seed)
    return dict(pipe(**{**ARGUMENTS[family], **request}, generator=generator).items())


def calls(family: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """What plain diffusers passes to the transformer, call by call."""
    seen: list[dict[str, Any]] = []
    with plain(family).transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    ):
        alone(family, request)
    return seen


def moved(family: str, call: dict[str, Any], **said: Tensor) -> float:
    """How far the transformer's answer moves when this is said instead."""
    model = plain(family).transformer
    with torch.no_grad():
        return gap(model(**call)[0], model(**{**call, **said})[0])


def ride(
    family: str,
    *requests: dict[str, Any],
    later: tuple[dict[str, Any], ...] = (),
    when: Callable[[Drive], object] = lambda drive: True,
) -> Drive:
    """Run requests together, `later` joining `when`, and see that each gets what it gets alone."""
    everyone = [{**ARGUMENTS[family], **one} for one in (*requests, *later)]
    expected = [alone(family, one, seed) for seed, one in enumerate(everyone)]
    with driving(without_ftfy(served(family))) as drive:
        submit = (drive.submit(**one, seed=seed) for seed, one in enumerate(everyone))
        heard = [next(submit) for _ in requests]
        drive.turn_until(lambda: bool(when(drive)))
        assert not any(recorder.is_done for recorder in heard)
        heard += submit
        drive.finish()
    for recorder, fields in zip(heard, expected, strict=True):
        assert recorder.error is None
        assert recorder.outcome.fields.keys() - {"sampling_rate"} == fields.keys()
        assert max(gap(recorder.outcome.fields[n], value) for n, value in fields.items()) <= VIDEO
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


def test_whole_timesteps_share_no_forward_with_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = plain("wan21_t2v")
    whole = calls("wan21_t2v", {"prompt": CAT})
    monkeypatch.setattr(pipe, "scheduler", FlowMatchEulerDiscreteScheduler(shift=3.0))
    fractions = calls("wan21_t2v", {"prompt": LONG})
    assert {one["timestep"].dtype for one in whole} == {torch.int64}
    assert all(one["timestep"].frac() > 0 for one in fractions[2:])

    assert not fuse(whole[0], fractions[0], module=pipe.transformer)
    for kind in (whole, fractions):  # which does share its own
        with torch.no_grad():
            answers = run(Fuser(), [call_on(pipe.transformer, **one) for one in kind])
            for answer, one in zip(answers, kind, strict=True):
                assert gap(answer[0], pipe.transformer(**one)[0]) <= VIDEO


def test_text_and_pictures_to_video_share_forwards_with_a_timestep_for_each_token() -> None:
    text, picture = {"prompt": CAT}, {"prompt": CAT, "image": IMAGES[0]}
    left, right = (calls("wan22_ti2v_5b", one)[2]["timestep"] for one in (text, picture))
    assert left.shape == right.shape
    assert (len(left.unique()), len(right.unique())) == (1, 2)  # a given frame has no noise

    drive = ride(
        "wan22_ti2v_5b",
        text,
        {**picture, "num_inference_steps": 4},
        later=({"prompt": LONG}, {"prompt": LONG, "image": IMAGES[1], "num_inference_steps": 2}),
        when=lambda drive: 2 in drive.widths("transformer"),
    )

    assert drive.widest("transformer") == 4


def test_what_an_encoder_saw_of_a_picture_follows_its_row() -> None:
    requests = [{"prompt": CAT, "image": image} for image in IMAGES[:2]]
    left, right = (calls("wan21_i2v", one)[0] for one in requests)
    seen = {name: right[name] for name in right if name == "encoder_hidden_states_image"}
    assert moved("wan21_i2v", left, **seen) >= VISIBLE

    drive = ride("wan21_i2v", *requests)

    assert drive.widths("image_encoder") == [2]
    assert drive.widths("transformer") == [2] * 6


def test_texts_are_padded_for_the_encoder_and_never_for_a_denoiser_without_a_mask() -> None:
    short, long = {"prompt": CAT, "max_sequence_length": 16}, {"prompt": CAT}
    left, right = (alone("wan21_t2v", one)["frames"] for one in (short, long))
    assert gap(left, right) >= VISIBLE, "the trap is none: zeros after the text are not read"

    drive = ride("wan21_t2v", short, long, {"prompt": LONG})

    assert drive.widths("text_encoder") == [3, 3]
    assert sorted(drive.widths("transformer")) == [1] * 6 + [2] * 6


def test_texts_of_all_lengths_and_guidances_share_a_forward_under_a_mask_of_floats() -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": CAT, "guidance_scale": 6.0},
        {"prompt": LONG, "guidance_scale": 1.5, "max_sequence_length": 12},  # cut
        {"prompt": "", "guidance_scale": 3.0, "max_sequence_length": 20},
        {"prompt": LONG, "guidance_scale": 9.0, "max_sequence_length": 64},
    ]
    masks = [calls("hunyuan_t2v", one)[0]["encoder_attention_mask"] for one in requests]
    assert {mask.dtype for mask in masks} == {torch.float32}
    assert [mask.shape[1] for mask in masks] == [32, 12, 20, 64]
    assert [bool(mask.all()) for mask in masks] == [False, True, False, False]

    drive = ride("hunyuan_t2v", *requests)

    assert drive.widths("text_encoder") == drive.widths("text_encoder_2") == [4]
    assert drive.widths("transformer") == [4, 4, 4]


def test_as_many_tokens_in_another_geometry_share_a_forward_by_their_coordinates() -> None:
    sizes = (64, 32), (32, 64), (64, 64)
    wide, tall, large = ({"prompt": CAT, "width": w, "height": h} for w, h in sizes)
    left, right = (calls("ltx2", one)[0] for one in (wide, tall))
    assert left["hidden_states"].shape == right["hidden_states"].shape
    assert moved("ltx2", left, video_coords=right["video_coords"]) >= VISIBLE

    drive = ride("ltx2", wide, tall, large)

    assert sorted(drive.widths("transformer")) == [1] * 9 + [2] * 9  # three steps of three calls
    assert drive.widths("vae", "decode") == [1, 1, 1]
    assert drive.widths("audio_vae", "decode") == [3]  # a sound has no sides


def test_chunks_of_videos_of_all_lengths_share_a_forward_where_their_indices_are_equal() -> None:
    long, other = {"prompt": CAT, "num_frames": 10}, {"history_sizes": [8, 2, 1]}
    first, *_, last = calls("helios_base", long)  # of another chunk
    model = plain("helios_base").transformer
    assert fuse(first, last, module=model)
    for name in (name for name in last if name.startswith("indices_")):
        assert not fuse(last, {**last, name: last[name] + 8}, module=model)
        assert moved("helios_base", last, **{name: last[name] + 8}) >= VISIBLE

    drive = ride(
        "helios_base",
        long,
        {**long, **other},
        later=({"prompt": LONG}, {"prompt": LONG, **other}),
        when=lambda drive: drive.widths("vae", "decode"),  # of the first chunk
    )

    assert sorted(drive.widths("transformer")) == [1] * 20 + [2] * 8


def test_the_causal_decoder_keeps_videos_apart_and_decodes_each_length_by_itself() -> None:
    drive = ride("wan21_t2v", *({"prompt": CAT, "num_frames": n} for n in (9, 9, 9, 5, 5, 13)))

    assert drive.widths("vae", "decode") == [3, 2, 1]
