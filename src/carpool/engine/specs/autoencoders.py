"""Autoencoders of pictures, video and sound."""

from carpool.engine.specs.rules import STACK, UNUSED, Spec

SPECS: dict[tuple[str, str], Spec] = {
    # half-precision pipelines with a float32 VAE (see pipeline.py) rely on the cast
    ("AutoencoderKL", "encode"): Spec(rows="x", rules={"x": STACK}, casts=True),
    ("AutoencoderKL", "decode"): Spec(
        rows="z",
        rules={"z": STACK, "generator": UNUSED},  # Stable Diffusion 1.5 passes one
        casts=True,
    ),
    ("AutoencoderDC", "encode"): Spec(rows="x", rules={"x": STACK}),
    ("AutoencoderDC", "decode"): Spec(rows="z", rules={"z": STACK}),
}
