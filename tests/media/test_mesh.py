"""Meshes as files: what is in them is read back with nothing but their formats' rules."""

import json
import struct
from typing import Any

import numpy as np
import pytest

from carpool.artifacts import Mesh
from carpool.errors import InvalidValue
from carpool.media import encode_mesh, files_beside
from carpool.media.mesh import check_faces
from support.pictures import png

VERTICES = np.array([[0, 0, 0], [1, 0, 0], [0, 1.5, 0], [0, 0, -2]], np.float32)
FACES = np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]], np.uint32)
COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 8, 7]], np.uint8)
PLACES = np.array([[0, 0], [1, 0], [0, 1], [0.5, 0.25]], np.float32)
PLAIN = Mesh(VERTICES, FACES)


RICH = Mesh(VERTICES, FACES, COLOURS, PLACES, png(3, 2))


def read_glb(data: bytes) -> tuple[dict[str, Any], bytes]:
    magic, version, length = struct.unpack_from("<4sII", data)
    assert (magic, version, length) == (b"glTF", 2, len(data))
    text_bytes, kind = struct.unpack_from("<I4s", data, 12)
    document = json.loads(data[20 : 20 + text_bytes])
    at = 20 + text_bytes
    content_bytes, kind_of_content = struct.unpack_from("<I4s", data, at)
    assert (kind, kind_of_content) == (b"JSON", b"BIN\0")
    assert text_bytes % 4 == content_bytes % 4 == 0
    assert at + 8 + content_bytes == len(data)
    return document, data[at + 8 :]


def values_of(document: dict[str, Any], content: bytes, number: int) -> np.ndarray[Any, Any]:
    accessor = document["accessors"][number]
    view = document["bufferViews"][accessor["bufferView"]]
    assert view["byteOffset"] % 4 == 0
    kinds = {5126: "<f4", 5125: "<u4", 5121: "u1"}
    columns = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4}[accessor["type"]]
    part = content[view["byteOffset"] : view["byteOffset"] + view["byteLength"]]
    array = np.frombuffer(part, kinds[accessor["componentType"]]).reshape(-1, columns)
    assert len(array) == accessor["count"]
    return array


@pytest.mark.parametrize("mesh", [PLAIN, RICH], ids=["plain", "rich"])
def test_a_glb_has_all_that_a_mesh_has(mesh: Mesh) -> None:
    document, content = read_glb(encode_mesh(mesh, "glb"))
    [primitive] = document["meshes"][0]["primitives"]
    arrays = {
        name: values_of(document, content, number)
        for name, number in primitive["attributes"].items()
    }

    np.testing.assert_array_equal(arrays["POSITION"], mesh.vertices)
    np.testing.assert_array_equal(
        values_of(document, content, primitive["indices"]).reshape(-1, 3), mesh.faces
    )
    bounds = document["accessors"][primitive["attributes"]["POSITION"]]
    assert (bounds["min"], bounds["max"]) == ([0, 0, -2], [1, 1.5, 0])
    assert document["asset"] == {"version": "2.0", "generator": "Carpool"}
    if mesh is RICH:
        np.testing.assert_array_equal(arrays["COLOR_0"][:, :3], COLOURS)
        np.testing.assert_array_equal(arrays["TEXCOORD_0"][:, 1], 1 - PLACES[:, 1])
        view = document["bufferViews"][document["images"][0]["bufferView"]]
        at = view["byteOffset"]
        assert content[at : at + view["byteLength"]] == RICH.texture
        surface = document["materials"][primitive["material"]]["pbrMetallicRoughness"]
        assert surface["baseColorTexture"] == {"index": 0}
    else:
        assert arrays.keys() == {"POSITION"}


def test_an_obj_has_vertices_colours_places_and_faces_from_one_on() -> None:
    lines = encode_mesh(RICH, "obj").decode().splitlines()

    assert lines[0] == "v 0 0 0 1 0 0"
    assert lines[3] == "v 0 0 -2 0.0352941 0.0313725 0.027451"
    assert lines[4:8] == ["vt 0 0", "vt 1 0", "vt 0 1", "vt 0.5 0.25"]
    assert lines[8:] == ["f 1/1 3/3 2/2", "f 1/1 2/2 4/4", "f 1/1 4/4 3/3", "f 2/2 3/3 4/4"]
    assert encode_mesh(PLAIN, "obj").decode().splitlines()[-1] == "f 2 3 4"


def test_a_texture_of_an_obj_or_a_ply_is_a_file_beside_it_that_it_names() -> None:
    obj, ply = (encode_mesh(RICH, format, stem="cup") for format in ("obj", "ply"))
    of_obj, of_ply = (files_beside(RICH, format, "cup") for format in ("obj", "ply"))

    assert obj.startswith(b"mtllib cup.mtl\nusemtl surface\nv ")
    assert of_obj["cup.mtl"].endswith(b"map_Kd cup.png\n")
    assert b"\ncomment TextureFile cup.png\n" in ply
    assert of_obj["cup.png"] == of_ply["cup.png"] == RICH.texture
    assert files_beside(RICH, "glb", "cup") == files_beside(PLAIN, "obj", "cup") == {}
    assert b"cup" not in encode_mesh(PLAIN, "obj", stem="cup")


def test_a_ply_is_what_its_header_says() -> None:
    data = encode_mesh(RICH, "ply")
    header, _, body = data.partition(b"end_header\n")
    vertex = struct.Struct("<3f3B2f")
    first = vertex.unpack_from(body, vertex.size * 3)
    at = vertex.size * len(VERTICES)

    assert header.startswith(b"ply\nformat binary_little_endian 1.0\nelement vertex 4\n")
    assert b"element face 4\nproperty list uchar uint vertex_indices\n" in header
    assert first == (0, 0, -2, 9, 8, 7, 0.5, 0.25)
    assert struct.unpack_from("<B3I", body, at) == (3, 0, 2, 1)
    assert len(body) == at + 13 * len(FACES)


@pytest.mark.parametrize("format", ["glb", "obj", "ply"])
def test_a_file_says_what_made_it_where_it_may(format: Any) -> None:
    told = {"model": "m", "prompt": "a\ncup", "seed": 3}

    said, statement, nothing = (encode_mesh(PLAIN, format, one) for one in (told, {}, None))

    assert b'"seed": 3' in said
    assert b"trainedAlgorithmicMedia" in said
    assert b"trainedAlgorithmicMedia" in statement
    assert b'"seed"' not in statement
    assert b"trainedAlgorithmicMedia" not in nothing
    if format == "glb":
        assert read_glb(said)[0]["asset"]["extras"]["carpool"] == told
    else:  # a comment ends with its line
        assert rb"a\ncup" in said


def test_a_mesh_of_no_faces_is_a_file_as_well() -> None:
    mesh = Mesh(VERTICES, FACES[:0])

    assert read_glb(encode_mesh(mesh, "glb"))[0]["accessors"][1]["count"] == 0
    assert b"element face 0\n" in encode_mesh(mesh, "ply")


def test_too_many_faces_are_refused_with_their_number() -> None:
    check_faces(PLAIN, 4)
    with pytest.raises(InvalidValue, match=r"has 4 faces: at most 3 \(--max-faces\)"):
        check_faces(PLAIN, 3)
