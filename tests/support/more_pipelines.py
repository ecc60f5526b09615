"""Pipelines that no test of diffusers builds, put together from the parts of its other tests.

Each entry is given a function that finds the test of another class, and makes what such a test is:
`pipeline_class`, `get_dummy_components` and `get_dummy_inputs`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers.models.controlnets.controlnet_union import ControlNetUnionModel
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from PIL import Image
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from support.isolation import parts
from support.modular import ltx25
from support.newcomers import CHANGED, FILLED, IMAGE, MASK, PICTURE, SIZE, wide_unet
from support.tiny import newest, tiny_pipeline
from support.tiny.parts import drawn

Components = dict[str, Any]
TEXT = {"prompt": "a painting of a squirrel", "num_inference_steps": 2}
Find = Callable[[str], Any]


@dataclass(frozen=True)
class Own:
    """What a test of diffusers knows of a pipeline."""

    name: str
    make: Callable[[], Components]
    inputs: Callable[[], dict[str, Any]]

    @property
    def pipeline_class(self) -> Any:
        return getattr(diffusers, self.name)

    def get_dummy_components(self) -> Components:
        return self.make()

    def get_dummy_inputs(self) -> dict[str, Any]:
        return self.inputs()


def of(
    name: str,
    other: str,
    change: Callable[[Components], Components] = lambda made: made,
    without: tuple[str, ...] = (),
    changed: Mapping[str, Any] | None = None,
    **more: Any,
) -> Callable[[Find], Own]:
    """A pipeline with the components of another test, and its arguments but for those named."""

    def made(find: Find) -> Own:
        test = find(other)

        def inputs() -> dict[str, Any]:
            takes_device = "device" in inspect.signature(test.get_dummy_inputs).parameters
            given = test.get_dummy_inputs(*["cpu"] * takes_device)
            return {
                n: v for n, v in {**given, **(changed or {}), **more}.items() if n not in without
            }

        return Own(name, lambda: change(test.get_dummy_components()), inputs)

    return made


def own(name: str, make: Callable[[], Components], **inputs: Any) -> Callable[[Find], Own]:
    return lambda _: Own(name, make, lambda: {**inputs, "output_type": "np"})


def remade(part: str, cls: Any = None, **config: Any) -> Callable[[Components], Components]:
    """The components, one of them made anew with another config."""

    def change(made: Components) -> Components:
        kind = cls or type(made[part])
        torch.manual_seed(0)
        return {**made, part: kind.from_config({**made[part].config, **config})}

    return change


def union(**_: Any) -> Components:
    pipe = tiny_pipeline("sdxl")
    config = {n: v for n, v in pipe.unet.config.items() if not n.startswith("_")}
    net = ControlNetUnionModel.from_config({
        **config, "conditioning_embedding_out_channels": (4, 8), "num_control_type": 6,
        "num_trans_channel": 4, "num_trans_head": 2, "num_proj_channel": 4,
    })  # fmt: skip
    return {**parts(pipe), "controlnet": drawn(net)}


def upscaler() -> Components:
    pipe = tiny_pipeline("sd15")
    return {
        **parts(pipe, unet=wide_unet(pipe, in_channels=7, num_class_embeds=1000)),
        "low_res_scheduler": diffusers.DDPMScheduler(),
        "scheduler": diffusers.DDIMScheduler(),
        "max_noise_level": 350,
    }


def of_sd15(**more: Any) -> Components:
    return {
        **parts(tiny_pipeline("sd15"), scheduler=diffusers.DDIMScheduler()), "safety_checker": None,
        "feature_extractor": None, "requires_safety_checker": False, **more,
    }  # fmt: skip


def eyes(width: int = 16) -> Components:
    config = SiglipVisionConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        image_size=32, patch_size=16,
    )  # fmt: skip
    return {
        "image_encoder": drawn(SiglipVisionModel(config)),
        "feature_extractor": SiglipImageProcessor(size={"height": 32, "width": 32}),
    }


def redux() -> Components:
    flux = tiny_pipeline("flux_control")
    texts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return {
        **eyes(),
        "image_embedder": drawn(ReduxImageEncoder(redux_dim=16, txt_in_features=32)),
        **{name: flux.components[name] for name in texts},
    }


def controlled_zimage(width: int) -> Callable[[], Components]:
    def make() -> Components:
        net = diffusers.ZImageControlNetModel(
            control_layers_places=[0], control_refiner_layers_places=[0], control_in_dim=width,
            dim=32, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        )  # fmt: skip
        return {**parts(tiny_pipeline("zimage")), "controlnet": drawn(net)}

    return make


def upsampled() -> Components:
    net = LTX2LatentUpsamplerModel(4, 32, 1, use_rational_resampler=False)
    return {"vae": tiny_pipeline("ltx2").vae, "latent_upsampler": drawn(net)}


def denoised() -> Components:
    parts = ltx25()
    return {"scheduler": None, **{name: parts[name] for name in ("vae", "diffusion_decoder")}}


UNION = {**TEXT, "control_image": [PICTURE], "control_mode": [0], "guidance_scale": 5.0}
FRAMES = [Image.new("RGB", (16, 16), (9 * i, 90, 9)) for i in range(5)]
DERIVED: dict[str, Callable[[Find], Own]] = {
    **{
        name: own(name, newest.PARTS[name], num_inference_steps=steps)
        for name, steps in (
            ("ConsistencyModelPipeline", 2), ("DDPMPipeline", 3), ("KarrasVePipeline", 3),
            ("LDMPipeline", 3), ("PNDMPipeline", 6), ("ScoreSdeVePipeline", 2),
        )
    },
    "LDMSuperResolutionPipeline": own(
        "LDMSuperResolutionPipeline", newest.PARTS["LDMSuperResolutionPipeline"],
        num_inference_steps=3, image=PICTURE,
    ),
    "AltDiffusionImg2ImgPipeline": of(
        "AltDiffusionImg2ImgPipeline", "AltDiffusionPipeline", changed=CHANGED
    ),
    "CogView4ControlPipeline": of(
        "CogView4ControlPipeline",
        "CogView4Pipeline",
        remade("transformer", in_channels=8, out_channels=4),
        control_image=PICTURE,
    ),
    "LTX2LatentUpsamplePipeline": own(
        "LTX2LatentUpsamplePipeline", upsampled, video=FRAMES, height=32, width=32, num_frames=5
    ),
    "LTX2VideoDiffusionDecodePipeline": own(
        "LTX2VideoDiffusionDecodePipeline", denoised, latents=torch.ones(1, 4, 3, 4, 4)
    ),
    "FluxPriorReduxPipeline": lambda _: Own(
        "FluxPriorReduxPipeline", redux, lambda: {"prompt": "a cat", "image": PICTURE}
    ),
    "HunyuanVideo15ImageToVideoPipeline": of(
        "HunyuanVideo15ImageToVideoPipeline", "HunyuanVideo15Pipeline",
        lambda made: {**made, **eyes(12)}, image=PICTURE, without=("height", "width"),
    ),
    "LTXI2VLongMultiPromptPipeline": of("LTXI2VLongMultiPromptPipeline", "LTXPipeline"),
    "LucyEditPipeline": of(
        "LucyEditPipeline",
        "WanPipeline",
        remade("transformer", in_channels=32, out_channels=16),
        video=FRAMES * 2,
    ),
    "SemanticStableDiffusionPipeline": own(
        "SemanticStableDiffusionPipeline", of_sd15, **TEXT, **SIZE, guidance_scale=5.0,
        editing_prompt=["a hat"], edit_warmup_steps=0,
    ),
    "StableAudio3AudioToAudioPipeline": of(
        "StableAudio3AudioToAudioPipeline", "StableAudio3Pipeline", audio=torch.rand(1, 2, 4096)
    ),
    "StableDiffusionUpscalePipeline": own(
        "StableDiffusionUpscalePipeline", upscaler, **TEXT, **IMAGE, guidance_scale=5.0
    ),
    "StableDiffusionXLControlNetUnionPipeline": own(
        "StableDiffusionXLControlNetUnionPipeline", union, **UNION, **SIZE
    ),
    "StableDiffusionXLControlNetUnionImg2ImgPipeline": own(
        "StableDiffusionXLControlNetUnionImg2ImgPipeline", union, **UNION, **CHANGED
    ),
    "StableDiffusionXLControlNetUnionInpaintPipeline": own(
        "StableDiffusionXLControlNetUnionInpaintPipeline", union, **UNION, **FILLED
    ),
    "TextToVideoZeroPipeline": own(
        "TextToVideoZeroPipeline", of_sd15, prompt="a painting of a squirrel",
        num_inference_steps=4, t0=1, t1=3, video_length=2, guidance_scale=5.0, **SIZE,
    ),
    "ZImageControlNetPipeline": own(
        "ZImageControlNetPipeline", controlled_zimage(4), **TEXT, **SIZE, control_image=PICTURE
    ),
    "ZImageControlNetInpaintPipeline": own(
        "ZImageControlNetInpaintPipeline",
        controlled_zimage(9),
        **{**TEXT, **SIZE, "image": PICTURE, "mask_image": MASK, "control_image": PICTURE},
    ),
}  # fmt: skip
