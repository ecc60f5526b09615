"""Pipelines that are made of the parts of others: builders, and how each is called."""

from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    DiffusionPipeline,
    FluxControlNetImg2ImgPipeline,
    FluxControlNetInpaintPipeline,
    FluxKontextInpaintPipeline,
    MarigoldDepthPipeline,
    MarigoldNormalsPipeline,
    StableDiffusion3PAGImg2ImgPipeline,
    StableDiffusionControlNetImg2ImgPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPAGPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPAGImg2ImgPipeline,
    StableDiffusionPAGInpaintPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPanoramaPipeline,
    StableDiffusionSAGPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLControlNetPAGPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
    StableDiffusionXLPAGImg2ImgPipeline,
    StableDiffusionXLPAGInpaintPipeline,
    UNet2DConditionModel,
    ZImageImg2ImgPipeline,
    ZImageInpaintPipeline,
)
from PIL import Image

from support import isolation
from support.tiny import newest
from support.tiny.control import flux_control, sdxl_control
from support.tiny.parts import drawn
from support.tiny.stable import flux, sd3, sd15, sdxl
from support.tiny.zimage import zimage

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
MASK = Image.fromarray(np.kron(np.eye(2, dtype=np.uint8) * 255, np.ones((32, 32), np.uint8)))
SIZE = {"height": 64, "width": 64}


def parts(pipe: DiffusionPipeline, **others: Any) -> dict[str, Any]:
    """The components of a pipeline, some of them replaced."""
    return {name: one for name, one in {**pipe.components, **others}.items() if one is not None}


def of_sd15(cls: Any, *, has_control: bool = False, **others: Any) -> DiffusionPipeline:
    pipe = sd15()
    given = parts(pipe, scheduler=DDIMScheduler(), **others)
    if has_control:
        given["controlnet"] = control(given["unet"])
    return cls(**given, safety_checker=None, feature_extractor=None, requires_safety_checker=False)


def wide_unet(pipe: DiffusionPipeline, **config: Any) -> UNet2DConditionModel:
    """A UNet as the pipeline's, with other channels or inputs."""
    net = UNet2DConditionModel.from_config({**pipe.unet.config, **config})
    return drawn(net, last="conv_out", gain=0.3)


def control(unet: UNet2DConditionModel) -> ControlNetModel:
    return drawn(ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8)))


def marigold(cls: Any) -> DiffusionPipeline:
    pipe = sd15()
    names = ("vae", "text_encoder", "tokenizer")
    return cls(
        **{name: pipe.components[name] for name in names}, unet=wide_unet(pipe, in_channels=8),
        scheduler=DDIMScheduler(), default_denoising_steps=2, default_processing_resolution=64,
    )  # fmt: skip


def pag_sd3_image() -> DiffusionPipeline:
    return StableDiffusion3PAGImg2ImgPipeline(**parts(sd3()), pag_applied_layers="blocks.1")


def pix2pix_xl() -> DiffusionPipeline:
    pipe = sdxl()
    return StableDiffusionXLInstructPix2PixPipeline(
        **parts(pipe, unet=wide_unet(pipe, in_channels=8), scheduler=DDIMScheduler())
    )


def of_data(name: str, **arguments: Any) -> "Newcomer":
    """A class of the newest, which `newest.json` has under its name."""
    return lambda: getattr(diffusers, name)(**newest.components(name)), arguments


IMAGE = {"image": PICTURE}
CHANGED = {"image": PICTURE, "strength": 0.8}
FILLED = {**CHANGED, "mask_image": MASK}
PAG = {"pag_scale": 3.0}
SPRINT = {"use_resolution_binning": False, "intermediate_timesteps": None}  # of any steps

Newcomer = tuple[Callable[[], DiffusionPipeline], dict[str, Any]]
NEWCOMERS: dict[str, Newcomer] = {
    "Cosmos3OmniPipeline": of_data(
        "Cosmos3OmniPipeline",
        **{"height": 16, "width": 16, "num_frames": 1, "use_system_prompt": False},
        **{"add_resolution_template": False, "add_duration_template": False},
    ),
    "Ideogram4Pipeline": of_data(
        "Ideogram4Pipeline", **SIZE, guidance_scale=5.0, guidance_schedule=None
    ),
    "Kandinsky6TI2VAPipeline": of_data(
        "Kandinsky6TI2VAPipeline", **SIZE, num_frames=5, sample_audio=False
    ),
    "LongCatImagePipeline": of_data("LongCatImagePipeline", **SIZE, enable_prompt_rewrite=False),
    "QwenImageControlNetInpaintPipeline": of_data(
        "QwenImageControlNetInpaintPipeline", **SIZE, control_image=PICTURE, control_mask=MASK
    ),
    "SanaSprintImg2ImgPipeline": of_data("SanaSprintImg2ImgPipeline", **CHANGED, **SIZE, **SPRINT),
    "SanaSprintPipeline": of_data("SanaSprintPipeline", **SIZE, **SPRINT),
    "ZImageOmniPipeline": of_data("ZImageOmniPipeline", **SIZE),
    "FluxControlNetImg2ImgPipeline": (
        lambda: FluxControlNetImg2ImgPipeline(**parts(flux_control())),
        {**CHANGED, "control_image": PICTURE, "control_mode": 0, **SIZE},
    ),
    "FluxControlNetInpaintPipeline": (
        lambda: FluxControlNetInpaintPipeline(**parts(flux_control())),
        {**FILLED, "control_image": PICTURE, "control_mode": 0, **SIZE},
    ),
    "FluxKontextInpaintPipeline": (
        lambda: FluxKontextInpaintPipeline(**parts(flux())),
        {**FILLED, **SIZE, "max_area": 64 * 64, "_auto_resize": False},
    ),
    "MarigoldDepthPipeline": (lambda: marigold(MarigoldDepthPipeline), IMAGE),
    "MarigoldNormalsPipeline": (lambda: marigold(MarigoldNormalsPipeline), IMAGE),
    "StableDiffusion3PAGImg2ImgPipeline": (pag_sd3_image, {**CHANGED, **PAG, **SIZE}),
    "StableDiffusionControlNetPipeline": (
        lambda: of_sd15(StableDiffusionControlNetPipeline, has_control=True),
        IMAGE,
    ),
    "StableDiffusionControlNetImg2ImgPipeline": (
        lambda: of_sd15(StableDiffusionControlNetImg2ImgPipeline, has_control=True),
        {**CHANGED, "control_image": PICTURE},
    ),
    "StableDiffusionControlNetInpaintPipeline": (
        lambda: of_sd15(StableDiffusionControlNetInpaintPipeline, has_control=True),
        {**FILLED, "control_image": PICTURE},
    ),
    "StableDiffusionControlNetPAGPipeline": (
        lambda: of_sd15(StableDiffusionControlNetPAGPipeline, has_control=True),
        {**IMAGE, **PAG},
    ),
    "StableDiffusionInstructPix2PixPipeline": (
        lambda: of_sd15(
            StableDiffusionInstructPix2PixPipeline, unet=wide_unet(sd15(), in_channels=8)
        ),
        {**IMAGE, "image_guidance_scale": 1.5},
    ),
    "StableDiffusionPAGPipeline": (lambda: of_sd15(StableDiffusionPAGPipeline), {**SIZE, **PAG}),
    "StableDiffusionPAGImg2ImgPipeline": (
        lambda: of_sd15(StableDiffusionPAGImg2ImgPipeline),
        {**CHANGED, **PAG},
    ),
    "StableDiffusionPAGInpaintPipeline": (
        lambda: of_sd15(StableDiffusionPAGInpaintPipeline),
        {**FILLED, **PAG, **SIZE},
    ),
    "StableDiffusionPanoramaPipeline": (lambda: of_sd15(StableDiffusionPanoramaPipeline), SIZE),
    "StableDiffusionSAGPipeline": (
        lambda: of_sd15(StableDiffusionSAGPipeline),
        {**SIZE, "sag_scale": 0.75},
    ),
    "StableDiffusionXLControlNetImg2ImgPipeline": (
        lambda: StableDiffusionXLControlNetImg2ImgPipeline(**parts(sdxl_control())),
        {**CHANGED, "control_image": PICTURE},
    ),
    "StableDiffusionXLControlNetInpaintPipeline": (
        lambda: StableDiffusionXLControlNetInpaintPipeline(**parts(sdxl_control())),
        {**FILLED, "control_image": PICTURE},
    ),
    "StableDiffusionXLControlNetPAGPipeline": (
        lambda: StableDiffusionXLControlNetPAGPipeline(**parts(sdxl_control())),
        {**IMAGE, **PAG},
    ),
    "StableDiffusionXLInstructPix2PixPipeline": (pix2pix_xl, {**IMAGE, **SIZE}),
    "StableDiffusionXLPAGImg2ImgPipeline": (
        lambda: StableDiffusionXLPAGImg2ImgPipeline(**parts(sdxl()), pag_applied_layers="mid"),
        {**CHANGED, **PAG},
    ),
    "StableDiffusionXLPAGInpaintPipeline": (
        lambda: StableDiffusionXLPAGInpaintPipeline(**parts(sdxl()), pag_applied_layers="mid"),
        {**FILLED, **PAG, **SIZE},
    ),
    **{
        f"{name}Pipeline": (getattr(isolation, make), {**isolation.ARGUMENTS[make], **own})
        for name, make, own in (
            ("StableDiffusionXLPAG", "pag_sdxl", PAG),
            ("StableDiffusion3PAG", "pag_sd3", PAG),
            ("StableDiffusion3ControlNet", "control_sd3", {"control_image": PICTURE}),
            ("HunyuanImage", "guided", {}),
            ("StableDiffusion", "ddim", {}),
        )
    },
    "ZImageImg2ImgPipeline": (lambda: ZImageImg2ImgPipeline(**parts(zimage())), CHANGED),
    "ZImageInpaintPipeline": (lambda: ZImageInpaintPipeline(**parts(zimage())), FILLED),
}
"""By pipeline class: what builds it, and its arguments beside the usual ones."""
