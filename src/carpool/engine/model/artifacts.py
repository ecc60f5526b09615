"""Meshes and audio in the outputs of pipelines, as arrays.

Audio is `audio` or `audios`, as in diffusers; its rate comes from the pipeline's vocoder, its
autoencoder, or itself. A mesh is any object with vertices and faces: from trimesh, diffusers'
Shap-E, or a mapping.
"""

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from carpool.artifacts import Mesh, Sound

_MESHES = ("meshes", "mesh", "images")
SOUNDS = ("audios", "audio", "sound")
OUTPUTS = {"image": "images", "rgb": "images", "videos": "frames", "video": "frames"}
"""Fields of outputs that have other names in other pipelines."""
_SAMPLERS = ("vocoder", "vae", "audio_vae", "sound_tokenizer")
_RATES = ("output_sampling_rate", "sampling_rate", "sample_rate")


def fields_of(output: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an output under their usual names; a video alone becomes a batch of one."""
    fields = dict(output.items())
    for name, usual in OUTPUTS.items():
        if usual not in fields and (value := fields.pop(name, None)) is not None:
            fields[usual] = _batch(value) if name == "video" else value
    return fields


def _batch(video: Any) -> Any:
    if isinstance(video, list):
        return video if not video or isinstance(video[0], list) else [video]
    return video[None] if video.ndim == 4 else video


def rate_of(pipe: Any) -> int | None:
    """The sampling rate of a pipeline's audio, in Hz; None: unknown."""
    parts = (getattr(pipe, name, None) for name in _SAMPLERS)
    places = (*(getattr(part, "config", None) for part in parts), pipe)
    rates = (getattr(place, name, None) for place in places for name in _RATES)
    return next((int(rate) for rate in rates if isinstance(rate, (int, float))), None)


def sound_of(fields: Mapping[str, Any]) -> Sound | None:
    """The audio of one output; None if it has none, or latents instead of samples."""
    samples = next((fields[name] for name in SOUNDS if fields.get(name) is not None), None)
    rate = fields.get("sampling_rate")
    if samples is None or rate is None:
        return None
    array = _array(samples, np.float32)
    if array.ndim == 3:  # one entry per output
        array = array[0]
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        return None
    return Sound(np.ascontiguousarray(array), int(rate))


def mesh_of(fields: Mapping[str, Any]) -> Mesh | None:
    """The mesh of one output; None if it has none.

    Raises:
        ValueError: its faces refer to missing vertices, or its values are not finite.
    """
    whole = next((mesh for name in _MESHES for mesh in _leaves(fields.get(name))), None)
    if whole is None:
        return None
    vertices = _array(_part(whole, "vertices", "verts"), np.float32)
    faces = _array(_part(whole, "faces"), np.int64)
    if vertices.ndim != 2 or vertices.shape[1] != 3 or faces.ndim != 2 or faces.shape[1] != 3:
        shapes = f"{vertices.shape} vertices and {faces.shape} faces"
        raise ValueError(f"a mesh of {shapes}: triangles in three dimensions are expected")
    if not np.isfinite(vertices).all():
        raise ValueError("a mesh with vertices that are not finite")
    if faces.size and not 0 <= faces.min() <= faces.max() < len(vertices):
        raise ValueError(f"a mesh with faces of other than its {len(vertices)} vertices")
    visual = _part(whole, "visual") or whole
    places = _part(visual, "uv")
    has_colours = places is not None and len(places) == len(vertices)
    return Mesh(
        np.ascontiguousarray(vertices),
        np.ascontiguousarray(faces.astype(np.uint32)),
        _colours(whole, visual, len(vertices)),
        np.ascontiguousarray(_array(places, np.float32)) if has_colours else None,
        _texture(visual) if has_colours else b"",
    )


def _leaves(value: Any) -> Iterator[Any]:
    """The meshes in a field, in nested lists."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    elif _part(value, "faces") is not None and _part(value, "vertices", "verts") is not None:
        yield value


def _part(whole: Any, *names: str) -> Any:
    for name in names:
        part = whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)
        if part is not None:
            return part
    return None


def _array(values: Any, dtype: Any) -> NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().float() if values.is_floating_point() else values.cpu()
    return np.asarray(values).astype(dtype)


def _colours(whole: Any, visual: Any, count: int) -> NDArray[np.uint8] | None:
    """Colours of vertices, as bytes, from named channels (0-1) or vertex colours."""
    channels = _part(whole, "vertex_channels")
    if isinstance(channels, Mapping) and {"R", "G", "B"} <= channels.keys():
        stacked = np.stack([_array(channels[name], np.float32) for name in "RGB"], axis=1)
        return (stacked.clip(0, 1) * 255).round().astype(np.uint8)
    if getattr(visual, "kind", "vertex") != "vertex":  # trimesh would invent vertex colours
        return None
    colours = _part(visual, "vertex_colors")
    if colours is None or len(colours) != count:
        return None
    return np.ascontiguousarray(np.asarray(colours)[:, :3].astype(np.uint8))


def _texture(visual: Any) -> bytes:
    """The texture image of a material, as a PNG."""
    material = _part(visual, "material")
    picture = _part(material, "image", "baseColorTexture") if material is not None else None
    if picture is None:
        return b""
    out = io.BytesIO()
    picture.convert("RGB").save(out, "PNG")
    return out.getvalue()
