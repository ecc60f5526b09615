"""Pipelines whose denoisers have no fusing table: a picture, a video and a sound."""

from typing import Any

import diffusers

from support.tiny.parts import drawn, kl_vae, t5, t5_tokenizer

_WIDTH = 32  # of the text's embeddings


def pixart() -> diffusers.PixArtSigmaPipeline:
    """PixArt-Sigma: cross-attention to T5, a scheduler with a history."""
    return diffusers.PixArtSigmaPipeline(
        tokenizer=t5_tokenizer(), text_encoder=t5(_WIDTH), vae=kl_vae(),
        transformer=drawn(
            diffusers.PixArtTransformer2DModel(
                num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8,
                num_layers=2, cross_attention_dim=32, sample_size=32, caption_channels=_WIDTH,
                use_additional_conditions=False,
            ),
            last="proj_out", gain=0.3,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )  # fmt: skip


def ltx() -> diffusers.LTXPipeline:
    """LTX-Video, the first: both halves of guidance in one call."""
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False), patch_size=1, encoder_causal=True,
        decoder_causal=False,
    )  # fmt: skip
    return diffusers.LTXPipeline(
        tokenizer=t5_tokenizer(), text_encoder=t5(_WIDTH),
        vae=drawn(vae, last="decoder.conv_out", gain=0.5),
        transformer=drawn(
            diffusers.LTXVideoTransformer3DModel(
                in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16,
                cross_attention_dim=32, num_layers=2, caption_channels=_WIDTH,
            ),
            last="proj_out", gain=0.3,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def stable_audio() -> diffusers.StableAudioPipeline:
    """Stable Audio: seconds are read like text, and the sound is two channels of samples."""
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=8, downsampling_ratios=[2, 4], channel_multiples=[1, 2],
        decoder_channels=8, decoder_input_channels=8, sampling_rate=64,
    )  # fmt: skip
    return diffusers.StableAudioPipeline(
        vae=drawn(vae), text_encoder=t5(_WIDTH),
        projection_model=drawn(diffusers.StableAudioProjectionModel(_WIDTH, _WIDTH, 0, 32)),
        tokenizer=t5_tokenizer(),
        transformer=drawn(
            diffusers.StableAudioDiTModel(
                sample_size=32, in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16,
                num_attention_heads=2, num_key_value_attention_heads=2, cross_attention_dim=_WIDTH,
                cross_attention_input_dim=_WIDTH, global_states_input_dim=2 * _WIDTH,
                time_proj_dim=16,
            ),
            last="postprocess_conv", gain=0.3,
        ),
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(
            sigma_min=0.3, sigma_max=50, sigma_data=1.0, prediction_type="v_prediction",
        ),
    )  # fmt: skip


FAMILIES = {"pixart": pixart, "ltx": ltx, "stable_audio": stable_audio}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "pixart": {
        "height": 64, "width": 64, "num_inference_steps": 3, "max_sequence_length": 24,
        "use_resolution_binning": False, "clean_caption": False, "output_type": "pt",
    },
    "ltx": {
        "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3,
        "max_sequence_length": 24, "output_type": "pt",
    },
    "stable_audio": {"audio_end_in_s": 4.0, "num_inference_steps": 3, "output_type": "pt"},
}  # fmt: skip
