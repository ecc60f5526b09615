"""Autoencoders of images, video and audio."""

from carpool.engine.specs.rules import STACK, UNUSED, Spec

SPECS: dict[tuple[str, str], Spec] = {
    # half-precision pipelines with a float32 VAE (see `model/upcast.py`) may rely on the cast
    ("AutoencoderKL", "encode"): Spec(rules={"x": STACK}, casts=True),
    ("AutoencoderKL", "decode"): Spec(
        rules={"z": STACK, "generator": UNUSED},  # Stable Diffusion 1.5 passes `generator`
        casts=True,
    ),
    ("AutoencoderKLFlux2", "encode"): Spec(rules={"x": STACK}),
    ("AutoencoderKLFlux2", "decode"): Spec(rules={"z": STACK}, peak=72_000),
    # the code of Wan's
    ("AutoencoderKLQwenImage", "encode"): Spec(rules={"x": STACK}),
    ("AutoencoderKLQwenImage", "decode"): Spec(rules={"z": STACK}, peak=117_000),
    ("AutoencoderDC", "encode"): Spec(rules={"x": STACK}),
    ("AutoencoderDC", "decode"): Spec(rules={"z": STACK}),
    ("AutoencoderKLHunyuanVideo", "encode"): Spec(rules={"x": STACK}),
    ("AutoencoderKLHunyuanVideo", "decode"): Spec(rules={"z": STACK}, peak=79_000),
    ("AutoencoderKLLTX2Video", "encode"): Spec(rules={"x": STACK}),
    ("AutoencoderKLLTX2Video", "decode"): Spec(
        rules={"z": STACK, "temb": STACK},  # temb: (rows,), or None
        peak=332_000,
    ),
    ("ShapeVAE", "forward"): Spec(rules={"latents": STACK}),  # Hunyuan3D-2
    ("AutoencoderKLLTX2Audio", "decode"): Spec(rules={"z": STACK}),
    ("LTX2Vocoder", "forward"): Spec(rules={"hidden_states": STACK}),
    # caches the last frames of each convolution on itself, only during a call
    ("AutoencoderKLWan", "encode"): Spec(rules={"x": STACK}),
    ("AutoencoderKLWan", "decode"): Spec(rules={"z": STACK}, peak=47_700),  # 5B; 2.1: a third
}
