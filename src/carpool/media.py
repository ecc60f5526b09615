"""Pictures and videos out, with the settings that made them inside; pictures in."""

import io
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from carpool.errors import InvalidValue, LibraryMissing

Format = Literal["png", "jpeg", "webp"]


def encode(
    rgb: bytes,
    width: int,
    height: int,
    *,
    format: Format = "png",
    compression: int = 100,
    settings: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode a picture.

    Args:
        rgb: 3 * width * height bytes, row by row.
        format: of the file.
        compression: quality of JPEG and WebP, 0-100; OpenAI's name for it.
        settings: what the picture was made with; a PNG carries them (see `png_text`).
    """
    return encode_image(Image.frombytes("RGB", (width, height), rgb), format, compression, settings)


def encode_image(
    image: Image.Image,
    format: Format,
    compression: int = 100,
    settings: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode a PIL image; see `encode`."""
    out = io.BytesIO()
    if format == "png":
        image.save(out, "PNG", pnginfo=png_text(settings or {}))
    else:
        image.save(out, format.upper(), quality=compression)
    return out.getvalue()


def encode_video(
    frames: Sequence[Image.Image],
    fps: float,
    settings: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode frames of one size as an MP4: H.264, 4:2:0, so odd sides lose a pixel.

    Raises:
        LibraryMissing: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise LibraryMissing("videos need PyAV: pip install 'carpool[video]'") from error
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options={"movflags": "use_metadata_tags"}) as container:
        if settings:
            container.metadata["comment"] = json.dumps(settings, ensure_ascii=False, default=str)
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = (side - side % 2 for side in frames[0].size)
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "14"}
        for image in frames:
            cut = image.crop((0, 0, stream.width, stream.height))
            frame = av.VideoFrame.from_ndarray(np.asarray(cut), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def read_picture(path: Path, *, is_mask: bool = False) -> Image.Image:
    """A picture from its file, upright, as pipelines want it: RGB, or 8-bit grey for a mask.

    Raises:
        InvalidValue: it is no picture that can be read.
    """
    try:
        with Image.open(path) as image:
            upright: Image.Image = ImageOps.exif_transpose(image)
            return upright.convert("L" if is_mask else "RGB")
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise InvalidValue(f"{path}: not a picture that can be read: {error}") from error


def png_text(settings: Mapping[str, Any]) -> PngImagePlugin.PngInfo:
    """The settings twice: as JSON under `carpool`, and as the line that other tools read.

    `parameters` is the text that the AUTOMATIC1111 web interface writes and many viewers show.
    """
    info = PngImagePlugin.PngInfo()
    if settings:
        info.add_itxt("carpool", json.dumps(settings, ensure_ascii=False, default=str))
        info.add_itxt("parameters", _a1111(settings))
    return info


def read_settings(png: bytes) -> dict[str, Any]:
    """The settings that a PNG of ours carries; empty for any other picture."""
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        text = getattr(image, "text", {}).get("carpool", "{}")
    settings: dict[str, Any] = json.loads(text)
    return settings


def _a1111(settings: Mapping[str, Any]) -> str:
    has_size = {"width", "height"} <= settings.keys()
    named = {
        "Steps": settings.get("num_inference_steps"),
        "CFG scale": settings.get("true_cfg_scale") or settings.get("guidance_scale"),
        "Seed": settings.get("seed"),
        "Size": "{width}x{height}".format_map(settings) if has_size else None,
        "Model": settings.get("model"),
    }
    lines = [str(settings.get("prompt", ""))]
    if settings.get("negative_prompt"):
        lines.append(f"Negative prompt: {settings['negative_prompt']}")
    lines.append(
        ", ".join(f"{name}: {value}" for name, value in named.items() if value is not None)
    )
    return "\n".join(lines)
