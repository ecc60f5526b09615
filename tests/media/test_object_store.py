"""Files are copied whole to S3, Google and Azure, large ones in parts: to servers on loopback."""

import os
from pathlib import Path

import pytest

from carpool.media.object_store import ObjectStore
from support.receivers import Store, listening, name_in_environment

pytest.importorskip("obstore")
LARGE = 11 << 20  # bytes: three parts of the library's size


@pytest.mark.parametrize("statuses", [[], [200, 200, 503]], ids=["", "a part fails once"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_files_of_one_and_of_several_parts_arrive_whole(
    scheme: str, statuses: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"0.png": b"picture", "0.mp4": os.urandom(LARGE)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)

    with listening(Store(*statuses)) as store:
        name_in_environment(store.url, tmp_path, monkeypatch)
        urls = ObjectStore(f"{scheme}://shop/made/").copy("job", [tmp_path / n for n in contents])

    assert urls == [f"{scheme}://shop/made/job/{name}" for name in contents]
    assert store.objects == {f"/shop/made/job/{n}": text for n, text in contents.items()}
    assert len(store.parts) == 3


def test_an_upload_one_part_of_which_is_refused_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.mp4").write_bytes(bytes(LARGE))

    with listening(Store(200, *[503] * 7)) as store:
        name_in_environment(store.url, tmp_path, monkeypatch)
        with pytest.raises(Exception, match="503"):  # of three parts one fails three times
            ObjectStore("s3://shop").copy("job", [tmp_path / "0.mp4"])

    assert store.objects == store.parts == {}
