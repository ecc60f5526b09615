"""What jobs begin from lies in the store from their acceptance to their end, and no longer."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from carpool import errors
from carpool.jobs.database import Record
from carpool.jobs.store import JobStore
from carpool.media.inputs import packed, unpacked

ONE = {"a.png": b"12345"}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., JobStore]]:
    """Opens the same store again and again; in the end it is closed."""
    stores: list[JobStore] = []

    def open_(**options: Any) -> JobStore:
        if stores:
            stores.pop().close()
        stores.append(JobStore(tmp_path, **options))
        return stores[-1]

    yield open_
    stores[-1].close()


def submit(store: JobStore, inputs: dict[str, bytes] = ONE, **options: Any) -> Record:
    return store.submit("video", {}, {}, inputs=inputs, **options)


def write(folder: Path) -> None:
    (folder / "b.txt").write_bytes(b"123")


def kept(store: JobStore) -> set[str]:
    return {path.name for path in (store.folder / "inputs").iterdir()}


def test_an_input_may_become_a_file_of_its_job(opened: Callable[..., JobStore]) -> None:
    store = opened()
    job = submit(store, {"a.png": b"12345", "c.png": b"6"})
    store.take(1)

    assert store.complete(job.id, write, keep=["a.png"])

    assert store.get(job.id).files == {"a.png": 5, "b.txt": 3}
    assert store.input(job.id, "a.png") == b"12345"
    assert store.input(job.id, "c.png") is None
    assert kept(store) == set()


def test_files_that_are_refused_leave_the_job_open_with_its_inputs(
    opened: Callable[..., JobStore],
) -> None:
    store = opened()
    job = submit(store)
    store.take(1)

    with pytest.raises(errors.StoreFailed, match="No such file"):
        store.complete(job.id, write, keep=["z.png"])

    assert store.get(job.id).is_open
    assert store.input(job.id, "a.png") == b"12345"


def test_inputs_of_no_open_job_are_swept(tmp_path: Path, opened: Callable[..., JobStore]) -> None:
    store = opened()
    job, done = submit(store), submit(store)
    store.take(2)
    store.complete(done.id, write)
    # as a kill at any moment leaves them
    for name in (done.id, f"video_{'0' * 32}.part", f"{job.id}.part"):
        (tmp_path / "inputs" / name).mkdir()

    store = opened()

    assert kept(store) == {job.id}
    assert store.input(job.id, "a.png") == b"12345"


def test_inputs_take_half_of_the_room_and_completed_jobs_make_way(
    opened: Callable[..., JobStore],
) -> None:
    store = opened(max_bytes=20)
    old = submit(store)
    store.take(1)
    store.complete(old.id, lambda folder: (folder / "b").write_bytes(b"1" * 12))

    jobs = [submit(store), submit(store)]

    assert [job.id for job in store.page()[0]] == [jobs[1].id, jobs[0].id]
    with pytest.raises(
        errors.StoreFailed, match="5 bytes, 10 more are held by jobs that have not ended"
    ):
        submit(store)
    assert kept(store) == {job.id for job in jobs}
    store.take(2)
    with pytest.raises(errors.StoreFailed, match="16 bytes, 5 more are held"):
        store.complete(jobs[0].id, lambda folder: (folder / "b").write_bytes(b"1" * 16))
    assert store.complete(jobs[0].id, lambda folder: (folder / "b").write_bytes(b"1" * 15))


ROOM = 100_000  # bytes that a file may have where the disk is said to be full


@pytest.mark.parametrize("what", ["a picture", "the last picture", "the job itself"])
def test_a_disk_that_is_full_at_any_write_refuses_the_job_and_keeps_nothing_of_it(
    what: str, tmp_path: Path, opened: Callable[..., JobStore]
) -> None:
    """With the limit on file sizes the kernel itself refuses to write on."""
    large = b"x" * 2 * ROOM
    inputs = {"a picture": {"a": large, "b": b""}, "the last picture": {"a": b"", "b": large}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = opened()
    jobs = {submit(store).id}
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, limits[1]))
    try:
        if what == "the job itself":
            with pytest.raises(errors.StoreFailed, match="the store of jobs cannot be written"):
                jobs.update(
                    store.submit("video", {"filler": "x" * 9000}, {}, inputs=ONE).id
                    for _ in range(999)
                )
        else:
            with pytest.raises(errors.StoreFailed, match=r"could not be stored: .*File too large"):
                submit(store, inputs[what])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    for _ in range(2):
        assert {job.id for job in store.page(limit=9999)[0]} == jobs == kept(store)
        store = opened()


def test_a_place_that_cannot_be_written_refuses_the_job(
    tmp_path: Path, opened: Callable[..., JobStore]
) -> None:
    store = opened()
    (tmp_path / "inputs").rmdir()

    with pytest.raises(errors.StoreFailed, match="could not be stored"):
        submit(store)

    assert store.page() == ([], False)
    (tmp_path / "inputs").mkdir()
    assert submit(store).state == "queued"


# As files


@given(
    st.sampled_from(["RGB", "RGBA", "L"]),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.integers(0, 9),
)
def test_a_picture_comes_back_with_every_pixel(mode: Any, size: tuple[int, int], seed: int) -> None:
    bands = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), np.uint8)
    image = Image.fromarray(pixels.squeeze(2) if mode == "L" else pixels, mode)

    named, files = packed({"prompt": "a", "image": [image, image], "mask_image": image})

    assert named == {
        "image": [["input-0.png", mode], ["input-1.png", mode]],
        "mask_image": [["input-2.png", mode]],
    }
    for file in files.values():
        again = unpacked(file, mode)
        assert (again.mode, again.size, again.tobytes()) == (mode, size, image.tobytes())


def test_arguments_without_pictures_need_no_files_and_a_spoiled_one_is_told() -> None:
    assert packed({"prompt": "a", "width": 64}) == ({}, {})
    with pytest.raises(errors.UnsupportedImage, match="cannot be read"):
        unpacked(b"\x89PNG", "RGB")
