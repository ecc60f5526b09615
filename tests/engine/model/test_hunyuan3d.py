"""Hunyuan3D-2 by its own package, in its published layout; where `hy3dgen` is installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from count_shapes import counted
from PIL import Image

from carpool.config import EngineSettings
from carpool.engine.model.artifacts import mesh_of
from carpool.engine.model.hunyuan3d import read_shapes
from carpool.engine.model.load import load
from carpool.errors import Cancelled, DeadlineExceeded, LoadFailed, NoSurface
from carpool.models.published import name_of, shapes_in
from carpool.models.pull import pull
from carpool.preflight import check
from carpool_lab.plan.names import known
from support.engine_driver import Drive, Recorder, VirtualClock, driving
from support.matrix.hunyuan3d import PICTURES
from support.mesh_pipeline import SurfacePipeline, mesh_pipeline
from support.tiny.hunyuan3d import IS_THERE, SIZES, config, write

needs_package = pytest.mark.skipif(not IS_THERE, reason="hy3dgen is not installed")
GIVEN: dict[str, Any] = {"octree_resolution": 8, "num_chunks": 200, "mc_level": -1.2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "Hunyuan3D-2").parent


@needs_package
@pytest.mark.parametrize("size", SIZES)
def test_pictures_become_the_meshes_that_the_package_itself_makes(
    size: str, tmp_path: Path
) -> None:
    from hy3dgen.shapegen import Hunyuan3DDiTFlowMatchingPipeline

    place = write(tmp_path / "Hunyuan3D-2", size)
    folder = place.parent
    given = GIVEN | ({} if size == "hunyuan3d-dit-v2-0" else {"mc_level": 0.5})
    judge = Hunyuan3DDiTFlowMatchingPipeline.from_single_file(
        str(place / "model.fp16.safetensors"), str(place / "config.yaml"), device="cpu",
        dtype=torch.float32, use_safetensors=True,
    )  # fmt: skip
    check(str(folder), EngineSettings())

    with driving(folder, numerics="exact") as drive:
        heard = [
            drive.submit(None, image=picture, seed=seed, num_inference_steps=steps, **given)
            for seed, (picture, steps) in enumerate(
                zip(PICTURES[:2] * 2, (3, 5, 3, 2), strict=True)
            )
        ]
        drive.finish()
        card = drive.engine.loaded.card

    assert (card.id, card.tasks[0].name) == ("Hunyuan3D-2", "image-to-mesh")
    for seed, (recorder, picture, steps) in enumerate(
        zip(heard, PICTURES[:2] * 2, (3, 5, 3, 2), strict=True)
    ):
        assert recorder.error is None
        generator = torch.Generator().manual_seed(seed)
        [expected] = judge(image=picture, num_inference_steps=steps, generator=generator, **given)
        mesh = mesh_of(recorder.outcome.fields)
        assert mesh is not None
        np.testing.assert_array_equal(mesh.vertices, np.float32(expected.vertices))
        np.testing.assert_array_equal(mesh.faces, expected.faces)


@needs_package
def test_weights_that_are_missing_and_classes_of_others_are_named(folder: Path) -> None:
    place = folder / "hunyuan3d-dit-v2-0"
    (place / "config.yaml").write_text(yaml.safe_dump(config(scheduler="os.system")))
    with pytest.raises(LoadFailed, match=r"scheduler is of 'os.system': must be of hy3dgen"):
        load(folder, EngineSettings(device="cpu"))
    (place / "config.yaml").write_text(yaml.safe_dump(config()))
    (place / "model.fp16.safetensors").rename(place / "model.ckpt")
    with pytest.raises(LoadFailed, match=r"has no model.fp16.safetensors: .* a .ckpt is not read"):
        load(folder, EngineSettings(device="cpu"))


@needs_package
def test_the_planner_knows_what_the_package_itself_takes_at_its_published_sizes() -> None:
    data = known()["Hunyuan3D-2mini"]

    assert counted(data["components"], 50) == data["counted"]


@pytest.mark.skipif(IS_THERE, reason="hy3dgen is installed")
def test_without_the_package_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config()))

    with pytest.raises(LoadFailed, match="is Hunyuan3D-2: pip install hy3dgen"):
        read_shapes(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("model", "variant", "folder"),
    [
        ("tencent/Hunyuan3D-2", None, "hunyuan3d-dit-v2-0"),
        ("tencent/Hunyuan3D-2mini", "turbo", "hunyuan3d-dit-v2-mini-turbo"),
        ("tencent/Hunyuan3D-2/hunyuan3d-dit-v2-0-fast", None, "hunyuan3d-dit-v2-0-fast"),
    ],
)
def test_a_hub_id_fetches_the_two_files_of_one_folder(
    model: str, variant: str | None, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[str, list[str]]] = []

    def snapshot_download(
        repository: str, *, allow_patterns: list[str], dry_run: bool = False, **_: Any
    ) -> Any:
        if dry_run:
            return []
        requests.append((repository, allow_patterns))
        for name in allow_patterns:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    check(model, EngineSettings(device="cpu"))

    assert pull(model, variant=variant) == tmp_path / folder
    files = [f"{folder}/config.yaml", f"{folder}/model.fp16.safetensors"]
    assert requests == [("/".join(model.split("/")[:2]), files)]
    assert name_of(model) == model


def test_a_repository_is_known_by_its_layout_and_no_other_folder_is(tmp_path: Path) -> None:
    place = tmp_path / "Hunyuan3D-2" / "hunyuan3d-dit-v2-0"
    place.mkdir(parents=True)
    assert shapes_in(str(place.parent)) is None
    (place / "config.yaml").write_text("{}")

    assert shapes_in(str(place.parent)) == shapes_in(str(place)) == place
    turbo = place.with_name("hunyuan3d-dit-v2-0-turbo")
    turbo.mkdir()
    (turbo / "config.yaml").write_text("{}")
    assert shapes_in(str(place.parent), "turbo") == turbo
    assert name_of(str(place.parent)) == "Hunyuan3D-2"
    (place.parent / "model_index.json").write_text("{}")
    assert shapes_in(str(place.parent)) is None


# Surfaces are extracted beside the loop, with progress; they are cancelled, late, and fail


PICTURE = Image.new("RGB", (8, 8), "red")


@contextmanager
def extracting(**options: Any) -> Iterator[tuple[Drive, Recorder, list[Callable[[], None]]]]:
    """A drive, a request of two steps whose surface is about to be extracted, and that work."""
    with driving(mesh_pipeline(SurfacePipeline), **options) as drive:
        work: list[Callable[[], None]] = []
        drive.engine.parts.off_loop.host = work.append
        recorder = drive.submit(
            None, image=PICTURE, num_inference_steps=2, timeout_s=60.0, request_id="a"
        )
        drive.turn_until(lambda: bool(work))
        yield drive, recorder, work


def test_the_parts_of_a_surface_are_told_after_the_steps_and_others_run_meanwhile() -> None:
    with extracting() as (drive, recorder, work):
        other = drive.submit(None, image=PICTURE, seed=1, num_inference_steps=3)
        drive.turn_until(lambda: len(work) == 2)
        between = drive.engine.timeline("a")
        running = {entry.request_id: entry for entry in drive.engine.requests().running}
        for extract in work:
            extract()
        drive.finish()
        timeline = drive.engine.timeline("a")

    assert between is not None
    assert timeline is not None
    assert (timeline["status"], timeline["surface"]) == ("ok", 1.0)
    assert (between["steps"], between["surface"], running["a"].steps) == (2, 0.0, 10)
    told = [(event.step, event.steps) for event in recorder.events if event.kind == "step"]
    assert told == [(1, 10), (2, 10), (4, 10), (6, 10), (8, 10), (10, 10)]
    assert [mesh_of(ended.outcome.fields) is None for ended in (recorder, other)] == [False, False]


@pytest.mark.parametrize("error", [Cancelled, DeadlineExceeded])
def test_a_request_that_ends_in_its_extraction_ends_at_once_and_that_work_too(
    error: type[Exception],
) -> None:
    clock = VirtualClock()
    with extracting(clock=clock) as (drive, recorder, work):
        if error is Cancelled:
            drive.engine.cancel("a")
        else:
            clock.pass_by(61.0)
        drive.turn()
        assert isinstance(recorder.error, error)
        told = len(recorder.events)
        work.pop()()  # ends at its first chunk
        drive.finish()

    assert (len(recorder.events), len(recorder.outcomes)) == (told, 1)


@pytest.mark.parametrize("isolation", ["auto", "private"])
def test_a_shape_without_a_surface_fails_alone_and_once(isolation: str) -> None:
    with driving(mesh_pipeline(SurfacePipeline), isolation=isolation) as drive:
        empty, whole = (
            drive.submit(None, image=PICTURE, num_inference_steps=2, is_empty=is_empty)
            for is_empty in (True, False)
        )
        drive.finish()

    assert isinstance(empty.error, NoSurface)
    assert str(empty.error) == "the shape has no surface"
    assert whole.error is None
    assert not drive.second_runs
