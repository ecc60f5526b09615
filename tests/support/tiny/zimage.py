"""Z-Image; Turbo is the same without guidance."""

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import nn
from transformers import Qwen3Config, Qwen3Model

from support.tiny.parts import drawn, flow_vae, qwen2_tokenizer, sharpened

_WIDTH = 32  # of the text's embeddings


def qwen3() -> Qwen3Model:
    """Draw a Qwen 3 that is read as a text encoder."""
    config = Qwen3Config(
        vocab_size=len(qwen2_tokenizer()), hidden_size=_WIDTH, intermediate_size=37,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=512,
    )  # fmt: skip
    return drawn(Qwen3Model(config))


def transformer() -> ZImageTransformer2DModel:
    """Draw a transformer over lists of pictures and texts, each padded to a multiple of 32."""
    model = drawn(
        ZImageTransformer2DModel(
            in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
            cap_feat_dim=_WIDTH, axes_dims=[8, 4, 4], axes_lens=[256, 64, 64],
        ),
        last="all_final_layer.2-1.linear", gain=0.3,
    )  # fmt: skip
    for token in (model.x_pad_token, model.cap_pad_token):  # zeros at first, and they are attended
        nn.init.normal_(token)
    return sharpened(model)


def zimage() -> ZImagePipeline:
    """Z-Image: the text is as long as it is, both halves of guidance in one call."""
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=flow_vae(), text_encoder=qwen3(),
        tokenizer=qwen2_tokenizer(), transformer=transformer(),
    )  # fmt: skip


FAMILIES = {"zimage": zimage}
ARGUMENTS = {
    "zimage": {
        "height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 96,
        "output_type": "pt",
    },
}  # fmt: skip
