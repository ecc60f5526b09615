"""Metadata in files: the settings of a picture, and the statement that a model made it.

Settings are stored as JSON, which Carpool reads, and in the text format of the AUTOMATIC1111 web
interface, which many viewers show. The statement is IPTC's digital source type, in XMP.
"""

import json
from collections.abc import Mapping
from typing import Any

from PIL import Image, PngImagePlugin

from carpool.config import ServeSettings
from carpool.request.images import NAMES as PICTURES
from carpool.types import CheckedRequest

_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_MOST_EXIF_BYTES = 65_533 - 6  # capacity of a JPEG segment
_XMP_BOX = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")  # id of XMP's box in an MP4

XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" '
    "Iptc4xmpExt:DigitalSourceType="
    '"http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"/>'
    '</rdf:RDF></x:xmpmeta><?xpacket end="r"?>'
)
"""Source: IPTC Photo Metadata Standard 2023.1, Digital Source Type; XMP specification, part 1."""


def file_metadata(
    model: str,
    request: CheckedRequest | None,
    settings: ServeSettings,
    settings_used: Mapping[str, Any] | None = None,
    **extra: Any,
) -> dict[str, Any] | None:
    """The metadata of one output's file; {} without a request, None if files have none.

    Args:
        settings: define which metadata files may have.
        settings_used: the settings that the engine used, after it has run.
        extra: metadata of this output only, such as its size.
    """
    metadata: dict[str, Any] = {}
    if request is not None:
        options: dict[str, Any] = {"lora": request.lora, "step_cache": request.step_cache}
        options["scheduler"] = request.scheduler
        options["enhance_prompt"] = request.enhance_prompt
        options["prompt_weights"] = request.prompt_weights
        metadata = {"model": model, "seed": request.seed, **request.arguments}
        metadata |= {name: value for name, value in options.items() if value}
        metadata |= {**(settings_used or {}), **extra}
    return permitted(metadata, metadata=settings.metadata, metadata_prompt=settings.metadata_prompt)


def permitted(
    settings: Mapping[str, Any], *, metadata: bool, metadata_prompt: bool
) -> dict[str, Any] | None:
    """The settings that files may have, without pictures; None: no metadata.

    Args:
        metadata, metadata_prompt: the server settings of these names.
    """
    if not metadata:
        return None
    texts = {name: value for name, value in settings.items() if name not in PICTURES}
    return texts if metadata_prompt else without_prompts(texts)


def with_used(data: dict[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Add the used settings to a job's metadata; prompts only if `data` has prompts."""
    if data is None:
        return None
    return {**data, **(settings if "prompt" in data else without_prompts(settings))}


def without_prompts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without prompts; switches about prompts stay."""
    return {
        name: value
        for name, value in settings.items()
        if "prompt" not in name or isinstance(value, bool)
    }


def png_text(metadata: Mapping[str, Any]) -> PngImagePlugin.PngInfo:
    """Text chunks of a PNG: XMP, and the settings as JSON (`carpool`) and text (`parameters`)."""
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", XMP)
    if metadata:
        info.add_itxt("carpool", as_json(metadata))
        info.add_itxt("parameters", as_text(metadata))
    return info


def exif(metadata: Mapping[str, Any]) -> bytes:
    """EXIF with the settings as text; without prompts if they do not fit into a JPEG."""
    for settings in (metadata, without_prompts(metadata)):
        block = Image.Exif()
        text = as_text(settings).encode("utf-16-be", "replace")
        block.get_ifd(_EXIF_IFD)[_USER_COMMENT] = b"UNICODE\0" + text
        if len(content := block.tobytes()) <= _MOST_EXIF_BYTES:
            return content
    return b""


def xmp_box() -> bytes:
    """XMP as the last box of an MP4. Source: XMP specification, part 3."""
    content = b"uuid" + _XMP_BOX + XMP.encode()
    return (len(content) + 4).to_bytes(4, "big") + content


def as_json(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, ensure_ascii=False, default=str)


def as_text(metadata: Mapping[str, Any]) -> str:
    """Settings in the text format of AUTOMATIC1111: prompts first, then one line."""
    has_size = {"width", "height"} <= metadata.keys()
    true_cfg, guidance = metadata.get("true_cfg_scale"), metadata.get("guidance_scale")
    revised = metadata.get("revised_prompt")
    named = {
        "Steps": metadata.get("num_inference_steps"),
        "Sampler": metadata.get("engine", {}).get("scheduler"),
        "CFG scale": guidance if true_cfg is None else true_cfg,
        "Distilled CFG Scale": None if true_cfg is None else guidance,
        "Seed": metadata.get("seed"),
        "Size": "{width}x{height}".format_map(metadata) if has_size else None,
        "Model": metadata.get("model"),
        "Denoising strength": metadata.get("strength"),
        "Revised prompt": json.dumps(revised, ensure_ascii=False) if revised else None,
    }
    lines = [str(metadata["prompt"])] if "prompt" in metadata else []
    if metadata.get("negative_prompt"):
        lines.append(f"Negative prompt: {metadata['negative_prompt']}")
    last = ", ".join(f"{name}: {value}" for name, value in named.items() if value is not None)
    return "\n".join([*lines, last])
