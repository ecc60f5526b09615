"""Autoencoders of images, video and audio."""

from carpool.engine.specs.rules import STACK, UNUSED, Spec

SPECS: dict[tuple[str, str], Spec] = {
    # half-precision pipelines with a float32 VAE (see `model/upcast.py`) may rely on the cast
    ("AutoencoderKL", "encode"): Spec(rows="x", rules={"x": STACK}, casts=True),
    ("AutoencoderKL", "decode"): Spec(
        rows="z",
        rules={"z": STACK, "generator": UNUSED},  # Stable Diffusion 1.5 passes `generator`
        casts=True,
    ),
    ("AutoencoderKLFlux2", "encode"): Spec(rows="x", rules={"x": STACK}),
    ("AutoencoderKLFlux2", "decode"): Spec(rows="z", rules={"z": STACK}, peak=72_000),
    # the code of Wan's
    ("AutoencoderKLQwenImage", "encode"): Spec(rows="x", rules={"x": STACK}),
    ("AutoencoderKLQwenImage", "decode"): Spec(rows="z", rules={"z": STACK}, peak=117_000),
    ("AutoencoderDC", "encode"): Spec(rows="x", rules={"x": STACK}),
    ("AutoencoderDC", "decode"): Spec(rows="z", rules={"z": STACK}),
    ("AutoencoderKLHunyuanVideo", "encode"): Spec(rows="x", rules={"x": STACK}),
    ("AutoencoderKLHunyuanVideo", "decode"): Spec(rows="z", rules={"z": STACK}, peak=79_000),
    ("AutoencoderKLLTX2Video", "encode"): Spec(rows="x", rules={"x": STACK}),
    ("AutoencoderKLLTX2Video", "decode"): Spec(
        rows="z",
        rules={"z": STACK, "temb": STACK},  # temb: (rows,), or None
        peak=332_000,
    ),
    ("ShapeVAE", "forward"): Spec(rows="latents", rules={"latents": STACK}),  # Hunyuan3D-2
    ("AutoencoderKLLTX2Audio", "decode"): Spec(rows="z", rules={"z": STACK}),
    ("LTX2Vocoder", "forward"): Spec(rows="hidden_states", rules={"hidden_states": STACK}),
    # caches the last frames of each convolution on itself, only during a call
    ("AutoencoderKLWan", "encode"): Spec(rows="x", rules={"x": STACK}),
    ("AutoencoderKLWan", "decode"): Spec(
        rows="z", rules={"z": STACK}, peak=47_700
    ),  # Wan 2.2 5B; 2.1: a third
}
