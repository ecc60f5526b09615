"""ERNIE-Image; Turbo is the same without guidance."""

from diffusers import (
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import Mistral3Config, Mistral3Model

from support.tiny.parts import drawn, flux2_vae, qwen2_tokenizer, sharpened

_WIDTH = 32  # of the text's embeddings


def mistral3() -> Mistral3Model:
    """Draw a Mistral 3 that reads text; its eyes are never used."""
    config = Mistral3Config(
        text_config={
            "model_type": "mistral", "vocab_size": len(qwen2_tokenizer()), "hidden_size": _WIDTH,
            "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
            "sliding_window": None,
        },
        vision_config={
            "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 12, "patch_size": 6,
        },
        image_token_index=6,
    )  # fmt: skip
    return drawn(Mistral3Model(config))


def ernie() -> ErnieImagePipeline:
    """ERNIE-Image: texts of their own lengths, padded; no rewriting of prompts."""
    return ErnieImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flux2_vae(),
        text_encoder=mistral3(),
        tokenizer=qwen2_tokenizer(),
        transformer=sharpened(
            drawn(
                ErnieImageTransformer2DModel(
                    hidden_size=32,
                    num_attention_heads=2,
                    num_layers=2,
                    ffn_hidden_size=37,
                    in_channels=16,  # 4 latent channels of 2x2 latent pixels
                    out_channels=16,
                    text_in_dim=_WIDTH,
                    rope_axes_dim=(8, 4, 4),
                ),
                last="final_linear",
                gain=0.3,
            )
        ),
    )


FAMILIES = {"ernie": ernie}
ARGUMENTS = {"ernie": {"height": 32, "width": 32, "num_inference_steps": 3, "output_type": "pt"}}
