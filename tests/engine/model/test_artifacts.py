"""Meshes and sound in the outputs of pipelines, of whatever shape and class they are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from carpool.artifacts import Mesh
from carpool.engine.model.artifacts import fields_of, mesh_of, rate_of, sound_of
from carpool.engine.model.tasks import tasks_of
from carpool.request.parameters import check
from carpool.types import Request
from support.engine_driver import Recorder, driving
from support.mesh_pipeline import FACES, MeshPipeline, mesh_pipeline
from support.tiny import ARGUMENTS, checkpoint

VERTICES = torch.arange(18.0).reshape(6, 3)
WHOLE = {"vertices": VERTICES, "faces": FACES}
SAMPLES = torch.linspace(-1, 1, 40)


@pytest.mark.parametrize(
    "fields",
    [
        {"meshes": [[SimpleNamespace(**WHOLE)]]},
        {"mesh": SimpleNamespace(verts=VERTICES, faces=torch.tensor(FACES))},
        {"images": [[SimpleNamespace(vertices=VERTICES.numpy(), faces=FACES.tolist())]]},
        {"meshes": [WHOLE]},
    ],
)
def test_whatever_has_vertices_and_faces_is_a_mesh(fields: dict[str, Any]) -> None:
    mesh = mesh_of(fields)

    assert isinstance(mesh, Mesh)
    np.testing.assert_array_equal(mesh.vertices, VERTICES)
    np.testing.assert_array_equal(mesh.faces, FACES)
    assert (mesh.vertices.dtype.name, mesh.faces.dtype.name) == ("float32", "uint32")
    assert (mesh.colours, mesh.places, mesh.texture) == (None, None, b"")


def test_other_outputs_are_no_meshes() -> None:
    picture = Image.new("RGB", (2, 2))

    for images in (None, [], [picture], torch.zeros(1, 3, 4, 4), [[picture]]):
        assert mesh_of({"images": images}) is None


def test_colours_come_from_channels_or_from_a_visual_and_textures_from_its_material() -> None:
    channels = {
        name: torch.full((6,), value) for name, value in zip("RGB", (0, 0.5, 2), strict=True)
    }
    shap_e = SimpleNamespace(verts=VERTICES, faces=FACES, vertex_channels=channels)
    colours = np.full((6, 4), 7, np.uint8)
    coloured = SimpleNamespace(
        **WHOLE, visual=SimpleNamespace(kind="vertex", vertex_colors=colours)
    )
    material = SimpleNamespace(image=Image.new("RGB", (2, 3), "blue"))
    painted = SimpleNamespace(kind="texture", uv=np.zeros((6, 2)), material=material)

    of_shap_e, of_visual, of_texture = (
        mesh_of({"meshes": [one]})
        for one in (shap_e, coloured, SimpleNamespace(**WHOLE, visual=painted))
    )

    assert of_shap_e is not None
    assert of_shap_e.colours is not None
    assert of_shap_e.colours[0].tolist() == [0, 128, 255]
    assert of_visual is not None
    assert of_visual.colours is not None
    assert of_visual.colours[0].tolist() == [7, 7, 7]
    assert of_texture is not None
    assert of_texture.places is not None
    assert of_texture.texture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"faces": np.array([[0, 1, 6]])}, "other than its 6 vertices"),
        ({"faces": np.array([[0, 1, -1]])}, "other than its 6 vertices"),
        ({"faces": np.array([[0, 1, 2, 3]])}, "triangles"),
        ({"vertices": VERTICES / 0}, "not finite"),
    ],
)
def test_a_mesh_that_no_file_could_hold_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_of({"meshes": [WHOLE | change]})


@pytest.mark.parametrize(
    ("output", "name", "expected"),
    [
        ({"image": ["picture"]}, "images", ["picture"]),
        ({"rgb": ["picture"], "depth": ["map"]}, "images", ["picture"]),
        ({"video": ["first", "second"], "sound": None}, "frames", [["first", "second"]]),
        ({"video": [["first", "second"]]}, "frames", [["first", "second"]]),
        ({"video": np.ones((2, 4, 4, 3))}, "frames", np.ones((1, 2, 4, 4, 3))),
        ({"images": ["result"], "image": "what was given"}, "images", ["result"]),
    ],
)
def test_pictures_and_videos_have_one_name_however_a_pipeline_calls_them(
    output: dict[str, Any], name: str, expected: Any
) -> None:
    np.testing.assert_array_equal(fields_of(output)[name], expected)


@pytest.mark.parametrize(
    ("samples", "channels"),
    [
        (SAMPLES, 1), (SAMPLES.numpy(), 1), (SAMPLES[None].to(torch.bfloat16), 1),
        (SAMPLES.expand(1, 2, 40), 2), ([SAMPLES], 1),
    ],
)  # fmt: skip
def test_sound_is_channels_of_samples_however_a_pipeline_gives_it(
    samples: Any, channels: int
) -> None:
    for name in ("audio", "audios", "sound"):
        sound = sound_of({name: samples, "sampling_rate": 100})
        assert sound is not None
        assert (sound.samples.shape, sound.samples.dtype.name, sound.rate) == (
            (channels, 40), "float32", 100,
        )  # fmt: skip
    assert sound_of({"audios": samples}) is None
    assert sound_of({"sampling_rate": 100}) is None


def test_the_rate_is_that_of_what_makes_the_samples() -> None:
    def of(**names: Any) -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(**names))

    vocoder = of(output_sampling_rate=24_000, input_sampling_rate=16_000)
    assert rate_of(SimpleNamespace(vocoder=vocoder, vae=of(sampling_rate=1))) == 24_000
    assert rate_of(SimpleNamespace(vae=of(sampling_rate=44_100))) == 44_100
    assert rate_of(SimpleNamespace(vae=of(), sample_rate=48_000)) == 48_000
    assert rate_of(SimpleNamespace(vae=of())) is None


@pytest.mark.parametrize(
    "family", ["stable_audio", "ltx2"], ids=["of an autoencoder", "of a vocoder"]
)
def test_sound_of_diffusers_pipelines_comes_with_its_rate(family: str) -> None:
    pipe = DiffusionPipeline.from_pretrained(checkpoint(family))
    with driving(pipe) as drive:
        heard = drive.submit("a bell", **ARGUMENTS[family])
        drive.finish()

    sound = sound_of(heard.outcome.fields)
    assert sound is not None
    assert sound.rate == rate_of(pipe)
    assert sound.samples.ndim == 2


def test_a_pipeline_of_ones_own_makes_meshes_together_as_it_would_alone() -> None:
    pictures = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (0, 90, 255)]
    requests: list[dict[str, Any]] = [
        {"image": picture, "num_inference_steps": steps, "seed": seed}
        for seed, (picture, steps) in enumerate(zip(pictures, (4, 6, 3), strict=True))
    ]
    with driving(mesh_pipeline(), numerics="exact") as drive:
        heard = [drive.submit(None, **one) for one in requests * 2]
        drive.finish()
        card = drive.engine.loaded.card

    assert (card.tasks[0].name, card.tasks[0].makes) == ("image-to-mesh", "meshes")
    assert drive.widest("net") > 1
    for recorder, given in zip(heard, requests * 2, strict=True):
        arguments = {name: value for name, value in given.items() if name != "seed"}
        generator = torch.Generator().manual_seed(given["seed"])
        expected = mesh_of({"meshes": mesh_pipeline()(**arguments, generator=generator).meshes})
        mesh = mesh_of(recorder.outcome.fields)
        assert mesh is not None
        assert expected is not None
        np.testing.assert_array_equal(mesh.vertices, expected.vertices)


def test_pipelines_of_diffusers_that_make_sound_are_named_so() -> None:
    [name] = tasks_of(DiffusionPipeline.from_pretrained(checkpoint("stable_audio")))

    assert name == "text-to-audio"


class Rendering(MeshPipeline):
    """Renders pictures unless it is asked for meshes: as Shap-E does."""

    def __call__(  # type: ignore[override]
        self,
        image: Any,
        num_inference_steps: int = 4,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
    ) -> dict[str, Any]:
        if output_type not in ["np", "pil", "latent", "mesh"]:
            raise ValueError(output_type)
        meshes = super().__call__(image, num_inference_steps, generator).meshes[0]
        return {"images": meshes if output_type == "mesh" else [Image.new("RGB", (4, 4))]}


def test_files_of_a_pipeline_that_knows_the_output_type_mesh_are_meshes() -> None:
    whole = mesh_pipeline()
    picture = Image.new("RGB", (8, 8), "red")
    with driving(Rendering(whole.net, whole.scheduler)) as drive:
        card = drive.engine.loaded.card
        request = Request(None, seed=3, image=picture, output_type="mesh")
        recorder = Recorder()
        drive.engine.submit(check(card, request), recorder)
        drive.finish()

    expected = mesh_of(vars(mesh_pipeline()(picture, generator=torch.Generator().manual_seed(3))))
    mesh = mesh_of(recorder.outcome.fields)
    assert (card.tasks[0].name, card.tasks[0].file_type) == ("image-to-mesh", "mesh")
    assert mesh is not None
    assert expected is not None
    np.testing.assert_array_equal(mesh.vertices, expected.vertices)
