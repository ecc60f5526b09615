"""Names of adapters' tensors: what ComfyUI, kohya and others write is changed to what is read."""

import pytest
import torch

from carpool.engine.adapters.names import readable

PATHS = [QWEN := "transformer_blocks.0.attn.to_q", "blocks.0.attn1.to_q"]
UP = f"transformer.{QWEN}.lora_B.weight"


@pytest.mark.parametrize(
    ("component", "name", "expected"),
    [
        ("transformer", f"{QWEN}.lora_up.weight", UP),
        ("transformer", f"diffusion_model.{QWEN}.lora_up.weight", UP),
        ("transformer", f"transformer.{QWEN}.lora_up.weight", UP),
        ("transformer", f"lycoris_{QWEN.replace('.', '_')}.lora_up.weight", UP),
        ("transformer", f"lora_transformer_{QWEN.replace('.', '_')}.lora_up.weight", UP),
        ("transformer", f"base_model.model.{QWEN}.lora_m", f"transformer.{QWEN}.lora_m"),
        ("transformer", name := "transformer.blocks.0.ffn.net.2.alpha", name),
        ("transformer", "blocks.0.self_attn.q.lora_A.default.weight",
         "diffusion_model.blocks.0.self_attn.q.lora_A.weight"),
        ("flux", "diffusion_model.double_blocks.0.img_attn.qkv.lora_B.weight",
         "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"),
        ("unet", "diffusion_model.middle_block.1.proj_in.lora_A.weight",
         "lora_unet_middle_block_1_proj_in.lora_down.weight"),
        ("unet", "text_encoders.clip_g.transformer.a.fc1.alpha", "lora_te2_a_fc1.alpha"),
    ],
)  # fmt: skip
def test_a_name_becomes_one_that_is_read(component: str, name: str, expected: str) -> None:
    paths = PATHS + ["single_transformer_blocks.0.proj_mlp"] * (component == "flux")
    assert list(readable({name: torch.ones(4, 2)}, component, paths)) == [expected]


def test_an_alpha_becomes_part_of_the_pair() -> None:
    pair = {f"{QWEN}.lora_up.weight": torch.ones(3, 2), f"{QWEN}.alpha": torch.tensor(8.0)}

    assert readable(pair, "transformer", PATHS)[UP].tolist() == [[4.0, 4.0]] * 3
