"""Pipelines that are made of the parts of others: builders, and how each is called."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from support import isolation
from support.isolation import build, parts
from support.matrix.qwen import shrunk
from support.tiny import newest, tiny_pipeline
from support.tiny.parts import drawn

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
MASK = Image.fromarray(np.kron(np.eye(2, dtype=np.uint8) * 255, np.ones((32, 32), np.uint8)))
SIZE: dict[str, Any] = {"height": 64, "width": 64}


def of_sd15(name: str, *, has_control: bool = False, **others: Any) -> diffusers.DiffusionPipeline:
    given = parts(tiny_pipeline("sd15"), scheduler=diffusers.DDIMScheduler(), **others)
    if has_control:
        given["controlnet"] = control(given["unet"])
    given |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return getattr(diffusers, name)(**given)


def of_sdxl(name: str) -> diffusers.DiffusionPipeline:
    given = (
        parts(tiny_pipeline("sdxl_control"))
        if "ControlNet" in name
        else parts(tiny_pipeline("sdxl"))
    )
    more = {} if "ControlNet" in name else {"pag_applied_layers": "mid"}
    return getattr(diffusers, f"StableDiffusionXL{name}Pipeline")(**given, **more)


def wide_unet(pipe: diffusers.DiffusionPipeline, **config: Any) -> diffusers.UNet2DConditionModel:
    """A UNet as the pipeline's, with other channels or inputs."""
    own = {n: v for n, v in pipe.unet.config.items() if not n.startswith("_")}
    net = diffusers.UNet2DConditionModel(**{**own, **config})
    return drawn(net, last="conv_out", gain=0.3)


def control(unet: diffusers.UNet2DConditionModel) -> diffusers.ControlNetModel:
    return drawn(
        diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8))
    )


def two_controls() -> diffusers.StableDiffusionXLControlNetPipeline:
    """Two ControlNets: pictures, scales and spans are lists."""
    pipe = tiny_pipeline("sdxl")
    nets = [control(pipe.unet), control(pipe.unet)]
    return diffusers.StableDiffusionXLControlNetPipeline(**parts(pipe, controlnet=nets))


def two_adapters() -> diffusers.StableDiffusionXLAdapterPipeline:
    pipe = tiny_pipeline("sdxl")
    config = {"channels": pipe.unet.config.block_out_channels, "num_res_blocks": 1}
    config |= {"downscale_factor": 4, "adapter_type": "full_adapter_xl"}
    nets = diffusers.MultiAdapter([drawn(diffusers.T2IAdapter(**config)) for _ in range(2)])
    return diffusers.StableDiffusionXLAdapterPipeline(**parts(pipe), adapter=nets)


def marigold(cls: Any) -> diffusers.DiffusionPipeline:
    pipe = tiny_pipeline("sd15")
    names = ("vae", "text_encoder", "tokenizer")
    return cls(
        **{name: pipe.components[name] for name in names}, unet=wide_unet(pipe, in_channels=8),
        scheduler=diffusers.DDIMScheduler(), default_denoising_steps=2,
        default_processing_resolution=64,
    )  # fmt: skip


def pix2pix_xl() -> diffusers.DiffusionPipeline:
    pipe = tiny_pipeline("sdxl")
    return diffusers.StableDiffusionXLInstructPix2PixPipeline(
        **parts(pipe, unet=wide_unet(pipe, in_channels=8), scheduler=diffusers.DDIMScheduler())
    )


def of_data(
    name: str, change: Callable[[Any], Any] | None = None, base: str = "", **arguments: Any
) -> "Newcomer":
    """A class of the newest: `newest.json` has its parts, or those that differ from the base's."""

    def make() -> diffusers.DiffusionPipeline:
        made = {**(parts(tiny_pipeline(base)) if base else {}), **newest.components(name)}
        pipe = getattr(diffusers, name)(**made)
        if change is not None:
            change(pipe)
        return pipe

    return make, arguments


def at_64px(pipe: Any) -> None:
    """Have Kandinsky edit small pictures, too."""
    pipe.resolutions = [(64, 64)]


def in_twenty_steps(pipe: Any) -> None:
    """Have a protein folded in few steps: the config has them."""
    pipe.register_to_config(recycle_depths=[0] * 20)


def unguided(pipe: Any) -> None:
    """Say of a Chroma what its pipeline reads of the config."""
    pipe.transformer.register_to_config(guidance_embeds=False)


def asked(name: str, requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Requests with what a call needs, as far as the class takes it."""
    make, own = NEWCOMERS[name]
    taken = signature(type(build(make)).__call__).parameters
    form = own.get("prompt", "%s")  # JSON, for some
    more = own.get("more", {})  # for a class that fails with less
    requests = [{n: v + more[n] if n in more else v for n, v in one.items()} for one in requests]
    kept = {n: v for n, v in own.items() if n == "output_type"}  # of tokens
    merged = [{**USUAL, **own, **one, **kept, "prompt": form % one["prompt"]} for one in requests]
    texts = {n for n, one in taken.items() if one.default == ""}  # which are never None
    return [
        {n: v for n, v in request.items() if n in taken and not (v is None and n in texts)}
        for request in merged
    ]


USUAL = {"output_type": "pt", "max_sequence_length": 24, "complex_human_instruction": []}
IMAGE: dict[str, Any] = {"image": PICTURE}
CHANGED: dict[str, Any] = {"image": PICTURE, "strength": 0.8}
FILLED = {**CHANGED, "mask_image": MASK}
PAG = {"pag_scale": 3.0}
SOUND = torch.linspace(-9, 9, 32).sin().reshape(1, 2, 16)
SPRINT: dict[str, Any] = {"use_resolution_binning": False, "intermediate_timesteps": None}
VIDEO = [PICTURE.resize((24, 16))] * 5
PHRASES: dict[str, Any] = {"gligen_phrases": ["a hat"], "gligen_images": [PICTURE]}
PHRASES |= {"gligen_boxes": [[0.1, 0.2, 0.5, 0.6]], "gligen_scheduled_sampling_beta": 0.5}
DIRECTION = torch.linspace(-9, 9, 77 * 32).sin().reshape(1, 77, 32)
ZERO: dict[str, Any] = {"video_length": 2, "t0": 1, "t1": 2}
ZERO["more"] = {"num_inference_steps": 2, "guidance_scale": 1.0}
TOKENS = torch.ones(1, 6, dtype=torch.bool)
PROTEIN: dict[str, Any] = {"padding_mask": TOKENS, "is_in_context_conditioning": ~TOKENS}
PROTEIN |= {"supports_local_latent": TOKENS, "conditioning_features": {
    name: torch.zeros(1, 6, dtype=torch.long)
    for name in ("condition_sequence_1_residue", "molecule_iid")
}}  # fmt: skip
CAMERA = {**IMAGE, "action": "w-8", "intrinsics": [60.0, 60.0, 32.0, 32.0], "num_frames": 9}

COSMOS3: dict[str, Any] = {"height": 16, "width": 16, "num_frames": 1, "use_system_prompt": False}
COSMOS3 |= {"add_resolution_template": False, "add_duration_template": False}

Newcomer = tuple[Callable[[], diffusers.DiffusionPipeline], dict[str, Any]]
NEWCOMERS: dict[str, Newcomer] = {
    **{
        name: of_data(name, **own)
        for name, own in (
            ("Cosmos3OmniPipeline", COSMOS3),
            ("DiffusionGemmaPipeline", {"gen_length": 16, "output_type": "seq"}),
            ("Ideogram4Pipeline", dict(**SIZE, guidance_scale=5.0, guidance_schedule=None)),
            ("Kandinsky6TI2VAPipeline", dict(**SIZE, num_frames=5, sample_audio=False)),
            ("LongCatImagePipeline", dict(**SIZE, enable_prompt_rewrite=False)),
            ("QwenImageControlNetInpaintPipeline",
             dict(**SIZE, control_image=PICTURE, control_mask=MASK)),
            ("QwenImageEditInpaintPipeline", dict(change=shrunk, **FILLED, **SIZE)),
            ("BriaFiboPipeline", SIZE),
            ("BriaFiboEditPipeline", dict(**IMAGE, **SIZE, prompt='{"edit_instruction": "%s"}')),
            ("BriaFibo2Pipeline", SIZE),
            ("HunyuanImageRefinerPipeline", dict(**IMAGE, **SIZE)),
            ("StableAudio3InpaintPipeline",
             {"duration": 1.0, "audio": SOUND, "mask_start_seconds": 0.2, "mask_end_seconds": 0.6}),
            ("Kandinsky5I2IPipeline",
             dict(change=at_64px, **IMAGE, **SIZE, max_sequence_length=512)),
            ("SanaSprintImg2ImgPipeline", dict(**CHANGED, **SIZE, **SPRINT)),
            ("SanaSprintPipeline", dict(**SIZE, **SPRINT)),
            ("ZImageOmniPipeline", SIZE),
            ("AnimateDiffSDXLPipeline", dict(base="sdxl", **SIZE, num_frames=2)),
            ("LTX2DFRPipeline",
             {"base": "ltx2", "height": 32, "width": 64, "num_frames": 9,
              "max_sequence_length": 32}),
            ("ChromaInpaintPipeline", dict(change=unguided, base="chroma", **FILLED, **SIZE)),
            ("LongCatImageEditPipeline", dict(change=shrunk, **IMAGE)),
            ("AudioLDM2Pipeline", {}),
            ("VQDiffusionPipeline", {}),
            ("UniDiffuserPipeline", {}),
            ("VersatileDiffusionTextToImagePipeline", SIZE),
            ("VersatileDiffusionImageVariationPipeline", dict(**IMAGE, **SIZE)),
            ("DanceDiffusionPipeline", {}),
            ("I2VGenXLPipeline", dict(**IMAGE, **SIZE, num_frames=2, clip_skip=None)),
            ("AmusedImg2ImgPipeline", {"image": PICTURE.resize((16, 16)), "strength": 0.8}),
            ("StableDiffusionGLIGENTextImagePipeline", dict(base="sd15", **SIZE, **PHRASES)),
            ("StableDiffusionPix2PixZeroPipeline",
             dict(base="sd15", **SIZE, source_embeds=DIRECTION, target_embeds=-DIRECTION)),
            ("Kandinsky6SRPipeline", {"video": VIDEO, "resolution_scale": 2}),
            ("SanaWMPipeline", dict(**CAMERA, **SIZE)),
            ("StableDiffusionParadigmsPipeline", dict(base="sd15", **SIZE)),
            ("TextToVideoZeroPipeline", dict(base="sd15", **SIZE, **ZERO)),
            ("TextToVideoZeroSDXLPipeline", dict(base="sdxl", **SIZE, **ZERO)),
            ("RFD4ProteinaPipeline", dict(change=in_twenty_steps, **PROTEIN)),
        )
    },
    "FluxControlNetImg2ImgPipeline": (
        lambda: diffusers.FluxControlNetImg2ImgPipeline(**parts(tiny_pipeline("flux_control"))),
        {**CHANGED, "control_image": PICTURE, "control_mode": 0, **SIZE}),
    "FluxControlNetInpaintPipeline": (
        lambda: diffusers.FluxControlNetInpaintPipeline(**parts(tiny_pipeline("flux_control"))),
        {**FILLED, "control_image": PICTURE, "control_mode": 0, **SIZE}),
    "FluxKontextInpaintPipeline": (
        lambda: diffusers.FluxKontextInpaintPipeline(**parts(tiny_pipeline("flux"))),
        {**FILLED, **SIZE, "max_area": 64 * 64, "_auto_resize": False}),
    "MarigoldDepthPipeline": (lambda: marigold(diffusers.MarigoldDepthPipeline), IMAGE),
    "MarigoldNormalsPipeline": (lambda: marigold(diffusers.MarigoldNormalsPipeline), IMAGE),
    "StableDiffusion3PAGImg2ImgPipeline": (
        lambda: diffusers.StableDiffusion3PAGImg2ImgPipeline(
            **parts(tiny_pipeline("sd3")), pag_applied_layers="blocks.1"),
        {**CHANGED, **PAG, **SIZE}),
    "StableDiffusionInstructPix2PixPipeline": (
        lambda: of_sd15(
            "StableDiffusionInstructPix2PixPipeline",
            unet=wide_unet(tiny_pipeline("sd15"), in_channels=8),
        ),
        {**IMAGE, "image_guidance_scale": 1.5}),
    **{
        name: (partial(of_sd15, name, has_control="ControlNet" in name), own)
        for name, own in (
            ("StableDiffusionControlNetPipeline", IMAGE),
            ("StableDiffusionControlNetImg2ImgPipeline", {**CHANGED, "control_image": PICTURE}),
            ("StableDiffusionControlNetInpaintPipeline", {**FILLED, "control_image": PICTURE}),
            ("StableDiffusionControlNetPAGPipeline", {**IMAGE, **PAG}),
            ("StableDiffusionPAGPipeline", {**SIZE, **PAG}),
            ("StableDiffusionPAGImg2ImgPipeline", {**CHANGED, **PAG}),
            ("StableDiffusionPAGInpaintPipeline", {**FILLED, **PAG, **SIZE}),
            ("StableDiffusionPanoramaPipeline", SIZE),
            ("StableDiffusionSAGPipeline", {**SIZE, "sag_scale": 0.75}),
            ("StableDiffusionPipelineSafe", {**SIZE, "sld_warmup_steps": 1}),
            ("StableDiffusionInpaintPipelineLegacy", FILLED),
        )
    },
    **{
        f"StableDiffusionXL{name}Pipeline": (partial(of_sdxl, name), own)
        for name, own in (
            ("ControlNetImg2Img", {**CHANGED, "control_image": PICTURE}),
            ("ControlNetInpaint", {**FILLED, "control_image": PICTURE}),
            ("ControlNetPAG", {**IMAGE, **PAG}),
            ("PAGImg2Img", {**CHANGED, **PAG}),
            ("PAGInpaint", {**FILLED, **PAG, **SIZE}),
        )
    },
    "StableDiffusionXLInstructPix2PixPipeline": (pix2pix_xl, {**IMAGE, **SIZE}),
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
    "ZImageImg2ImgPipeline": (
        lambda: diffusers.ZImageImg2ImgPipeline(**parts(tiny_pipeline("zimage"))), CHANGED),
    "ZImageInpaintPipeline": (
        lambda: diffusers.ZImageInpaintPipeline(**parts(tiny_pipeline("zimage"))), FILLED),
}  # fmt: skip
"""By pipeline class: what builds it, and its arguments beside the usual ones."""
