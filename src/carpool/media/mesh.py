"""Encode meshes as GLB, OBJ and PLY.

A GLB file has everything: colours, a texture, and the settings in `asset.extras`. OBJ and PLY have
colours, texture coordinates and the settings as comments; the texture is a separate file. OBJ names
it in the material (`.mtl`), PLY in a comment that MeshLab reads.

Sources: glTF 2.0 specification, Khronos Group, sections 3 and 4; PLY, Greg Turk, 1994.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from carpool.artifacts import Mesh
from carpool.errors import InvalidValue
from carpool.media.metadata import as_json

MeshFormat = Literal["glb", "obj", "ply"]
_FLOAT, _UINT, _BYTE = 5126, 5125, 5121  # component types of glTF
_OF_VERTICES, _OF_FACES = 34962, 34963  # targets of glTF buffer views


def check_faces(mesh: Mesh, limit: int) -> None:
    """Refuse a mesh with too many faces.

    Raises:
        InvalidValue: the message has the number of faces.
    """
    if len(mesh.faces) > limit:
        raise InvalidValue(
            f"the mesh has {len(mesh.faces)} faces: at most {limit} (--max-faces): ask for a "
            "coarser one"
        )


def encode_mesh(
    mesh: Mesh,
    format: MeshFormat,
    metadata: Mapping[str, Any] | None = None,
    *,
    stem: str | None = None,
) -> bytes:
    """Encode a mesh.

    Args:
        metadata: see `media.outputs.encode_image`.
        stem: file name without extension, if `files_beside` are written too.
    """
    if format == "glb":
        return _glb(mesh, metadata)
    lines = _notes(metadata)
    texture = stem if _has_texture(mesh) else None
    return _obj(mesh, lines, texture) if format == "obj" else _ply(mesh, lines, texture)


def files_beside(mesh: Mesh, format: MeshFormat, stem: str) -> dict[str, bytes]:
    """Further files of a mesh with a texture: its image, and an OBJ's material."""
    if format == "glb" or not _has_texture(mesh):
        return {}
    material = f"newmtl surface\nKd 1 1 1\nmap_Kd {stem}.png\n".encode()
    return {f"{stem}.png": mesh.texture} | ({f"{stem}.mtl": material} if format == "obj" else {})


def _has_texture(mesh: Mesh) -> bool:
    return bool(mesh.texture) and mesh.places is not None


def _notes(metadata: Mapping[str, Any] | None) -> list[str]:
    """Comment lines; each is one line, so the settings are JSON without line breaks."""
    if metadata is None:
        return []
    comments = ["made by a model (trainedAlgorithmicMedia)"]
    return [*comments, f"carpool {as_json(metadata)}"] if metadata else comments


def _obj(mesh: Mesh, notes: list[str], texture: str | None) -> bytes:
    colours = mesh.colours
    vertices = mesh.vertices if colours is None else np.hstack([mesh.vertices, colours / 255])
    lines = [f"# {note}" for note in notes]
    lines += [f"mtllib {texture}.mtl", "usemtl surface"] if texture else []
    lines += [f"v {' '.join(f'{value:.6g}' for value in vertex)}" for vertex in vertices.tolist()]
    if mesh.places is not None:
        lines += [f"vt {u:.6g} {v:.6g}" for u, v in mesh.places.tolist()]
    named = "f {0}/{0} {1}/{1} {2}/{2}" if mesh.places is not None else "f {0} {1} {2}"
    lines += [named.format(*face) for face in (mesh.faces.astype(np.int64) + 1).tolist()]
    return ("\n".join(lines) + "\n").encode()


def _ply(mesh: Mesh, notes: list[str], texture: str | None) -> bytes:
    notes = [*notes, f"TextureFile {texture}.png"] if texture else notes
    columns: list[tuple[str, str, NDArray[Any]]] = [
        (name, "float", mesh.vertices[:, i]) for i, name in enumerate("xyz")
    ]
    if mesh.colours is not None:
        names = ("red", "green", "blue")
        columns += [(name, "uchar", mesh.colours[:, i]) for i, name in enumerate(names)]
    if mesh.places is not None:
        columns += [(name, "float", mesh.places[:, i]) for i, name in enumerate("st")]
    kinds = {"float": "<f4", "uchar": "u1"}
    vertices = np.empty(len(mesh.vertices), [(name, kinds[kind]) for name, kind, _ in columns])
    for name, _, values in columns:
        vertices[name] = values
    faces = np.empty(len(mesh.faces), [("count", "u1"), ("corners", "<u4", 3)])
    faces["count"], faces["corners"] = 3, mesh.faces
    header = [
        "ply", "format binary_little_endian 1.0", *(f"comment {note}" for note in notes),
        f"element vertex {len(vertices)}",
        *(f"property {kind} {name}" for name, kind, _ in columns),
        f"element face {len(faces)}", "property list uchar uint vertex_indices", "end_header", "",
    ]  # fmt: skip
    return "\n".join(header).encode() + vertices.tobytes() + faces.tobytes()


def _glb(mesh: Mesh, metadata: Mapping[str, Any] | None) -> bytes:
    parts: list[bytes] = []
    views: list[dict[str, Any]] = []
    accessors: list[dict[str, Any]] = []

    def view(content: bytes, **extra: Any) -> int:
        offset = sum(map(len, parts))
        views.append({"buffer": 0, "byteOffset": offset, "byteLength": len(content), **extra})
        parts.append(content + bytes(-len(content) % 4))
        return len(views) - 1

    def accessor(values: NDArray[Any], component: int, kind: str, target: int, **extra: Any) -> int:
        at = view(values.tobytes(), target=target, **extra.pop("stride", {}))
        count = values.size if kind == "SCALAR" else len(values)
        accessors.append(
            {"bufferView": at, "componentType": component, "count": count, "type": kind, **extra}
        )
        return len(accessors) - 1

    vertices = mesh.vertices.astype("<f4")
    bounds = {"min": vertices.min(axis=0).tolist(), "max": vertices.max(axis=0).tolist()}
    attributes = {"POSITION": accessor(vertices, _FLOAT, "VEC3", _OF_VERTICES, **bounds)}
    if mesh.colours is not None:  # padded: vertices are aligned to four bytes
        padded = np.pad(mesh.colours, ((0, 0), (0, 1)), constant_values=255)
        attributes["COLOR_0"] = accessor(padded, _BYTE, "VEC4", _OF_VERTICES, normalized=True)
    if mesh.places is not None:  # glTF's origin is at the top
        flipped = np.stack([mesh.places[:, 0], 1 - mesh.places[:, 1]], axis=1).astype("<f4")
        attributes["TEXCOORD_0"] = accessor(flipped, _FLOAT, "VEC2", _OF_VERTICES)
    indices = accessor(mesh.faces.astype("<u4"), _UINT, "SCALAR", _OF_FACES)
    surface: dict[str, Any] = {"metallicFactor": 0.0, "roughnessFactor": 1.0}
    document: dict[str, Any] = {
        "asset": {"version": "2.0", "generator": "Carpool"},
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [{"attributes": attributes, "indices": indices, "material": 0}]}],
        "materials": [{"pbrMetallicRoughness": surface, "doubleSided": True}],
    }
    if mesh.texture and mesh.places is not None:
        document["images"] = [{"bufferView": view(mesh.texture), "mimeType": "image/png"}]
        document["textures"] = [{"source": 0}]
        surface["baseColorTexture"] = {"index": 0}
    if metadata is not None:
        source = {"digitalSourceType": "trainedAlgorithmicMedia"}
        settings = {"carpool": json.loads(as_json(metadata))} if metadata else {}
        document["asset"]["extras"] = source | settings
    document |= {"accessors": accessors, "bufferViews": views}
    document["buffers"] = [{"byteLength": sum(map(len, parts))}]
    return b"".join(_chunks(json.dumps(document).encode(), b"".join(parts)))


def _chunks(text: bytes, content: bytes) -> Iterator[bytes]:
    text += b" " * (-len(text) % 4)
    yield struct.pack("<4sII", b"glTF", 2, 12 + 8 + len(text) + 8 + len(content))
    yield struct.pack("<I4s", len(text), b"JSON") + text
    yield struct.pack("<I4s", len(content), b"BIN\0") + content
