"""`carpool pull` from a hub on this machine: only what is needed, once, and if it fits the disk."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.errors import LoadFailed
from carpool.models import pull as pulling
from carpool.models.pull import places, wanted

INDEX = {
    "_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"], "tokenizer": ["transformers", "CLIPTokenizer"],
    "safety_checker": [None, None],
}  # fmt: skip
FILES = {
    "model_index.json": json.dumps(INDEX).encode(),
    "README.md": b"about",
    "flux1-dev.safetensors": b"all of it once more",
    "vae/config.json": b"{}",
    "vae/diffusion_pytorch_model.safetensors": b"vae" * 100,
    "vae/diffusion_pytorch_model.fp16.safetensors": b"half" * 50,
    "vae/diffusion_pytorch_model.bin": b"pickle",
    "transformer/config.json": b"{}",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": b"one" * 1000,
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors": b"two" * 1000,
    "transformer/diffusion_pytorch_model.safetensors.index.json": b"{}",
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/tokenize.py": b"import os",
    "safety_checker/model.safetensors": b"unused",
}
FILES = {
    name: body + name.encode() for name, body in FILES.items() if name != "model_index.json"
} | {"model_index.json": FILES["model_index.json"]}  # no two alike: a hub keeps equal files once
NEEDED = {
    name
    for name in FILES
    if name.startswith(("vae/", "transformer/", "tokenizer/", "model_index"))
    and not name.endswith((".bin", ".py", ".fp16.safetensors"))
}
NO_TORCH = """
import sys, time
from carpool.cli.main import main
time.sleep = lambda _: None  # the library waits between its tries
try:
    main()
finally:
    assert "torch" not in sys.modules, "torch was loaded"
"""
QUIET = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
COMMIT = "0" * 39 + "1"


@contextmanager
def hub(
    *, cut: str = "", always: bool = False, files: dict[str, bytes] = FILES, is_gated: bool = False
) -> Iterator[tuple[str, Counter[str]]]:
    """A hub with one repository; yields its URL and how often each file was fetched.

    Args:
        cut: a file whose connection breaks in the middle the first time, or `always`.
        is_gated: no file is given to who has not accepted the terms.
    """
    fetched: Counter[str] = Counter()

    class Hub(http.server.BaseHTTPRequestHandler):
        def answer(self, body: bytes, kind: str, extra: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, text in {"Content-Type": kind, **extra}.items():
                self.send_header(name, text)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def part(self, name: str, body: bytes, headers: dict[str, str]) -> None:
            """The rest of a file, of which half is sent where the connection breaks."""
            begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            fetched[f"{name} from {begin}"] += 1
            left, half = body[begin:], len(body) // 2
            self.send_response(206 if begin else 200)
            if begin:
                headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
            for key, text in {**headers, "Content-Length": str(len(left))}.items():
                self.send_header(key, text)
            self.end_headers()
            is_cut = always or fetched[name] == 1
            self.wfile.write(left[: half if is_cut else None])
            self.close_connection = True

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/org/name"):
                siblings = [{"rfilename": name, "size": len(one)} for name, one in files.items()]
                told: Any = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
                if "/tree/" in path:
                    told = [
                        {"type": "file", "path": name, "size": len(one), "oid": COMMIT}
                        for name, one in files.items()
                    ]
                self.answer(json.dumps(told).encode(), "application/json", {})
                return
            name = path.split("/", 5)[-1]
            if is_gated:
                self.answer(b"", "text/plain", {"X-Error-Code": "GatedRepo"}, 403)
                return
            if name not in files:
                self.answer(b"", "text/plain", {"X-Error-Code": "EntryNotFound"}, 404)
                return
            etag = hashlib.sha256(files[name]).hexdigest()
            fetched[name] += self.command == "GET"
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if name == cut and self.command == "GET":
                self.part(name, files[name], headers)
                return
            self.answer(files[name], "application/octet-stream", headers)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", fetched
        server.shutdown()
        thread.join()


def pull(url: str, folder: Path, *arguments: str) -> tuple[int, str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("CARPOOL_")}
    ended = subprocess.run(
        [sys.executable, "-c", NO_TORCH, "pull", *arguments],
        capture_output=True,
        text=True,
        env={**clean, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url, **QUIET},
        timeout=50,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_what_loading_reads_is_fetched_once_and_nothing_else(tmp_path: Path) -> None:
    with hub() as (url, fetched):
        first = pull(url, tmp_path, "org/name")
        again = pull(url, tmp_path, "org/name")

    assert first[0] == again[0] == 0
    folder = Path(first[1].strip())
    there = {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}
    assert there == NEEDED
    assert {name: fetched[name] for name in NEEDED} == dict.fromkeys(NEEDED, 1)
    assert set(fetched) - {name for name, n in fetched.items() if not n} == NEEDED


SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"


def test_a_file_whose_connection_breaks_is_resumed_where_it_was(tmp_path: Path) -> None:
    large = {**FILES, SHARD: bytes(24_000_000)}  # the library keeps pieces of ten
    with hub(cut=SHARD, files=large) as (url, fetched):
        status, said, _ = pull(url, tmp_path, "org/name")

    assert status == 0
    assert (Path(said.strip()) / SHARD).read_bytes() == large[SHARD]
    begins = [int(name.rpartition(" ")[2]) for name in fetched if name.startswith(f"{SHARD} from")]
    assert min(begins) == 0 < max(begins)


def test_what_a_hub_refuses_or_breaks_off_is_told_in_a_line(tmp_path: Path) -> None:
    with hub(is_gated=True) as (url, _):
        gated, _, closed = pull(url, tmp_path, "org/name")
    with hub(files={**FILES, "model_index.json": b"[1, 2]"}) as (url, _):
        strange, _, listed = pull(url, tmp_path, "org/name")
    with hub(cut=SHARD, always=True) as (url, _):
        broken, _, why = pull(url, tmp_path / "other", "org/name")

    assert (gated, strange, broken) == (1, 1, 1)
    assert "org/name is gated: accept its terms at" in closed
    assert "org/name: model_index.json is a list: must be an object" in listed
    assert "the connection to the hub broke while org/name was fetched" in why
    assert "Traceback" not in closed + listed + why


def test_one_file_of_a_repository_is_fetched(tmp_path: Path) -> None:
    with hub() as (url, _):
        status, said, _ = pull(url, tmp_path, "org/name/flux1-dev.safetensors")
        missing, _, why = pull(url, tmp_path, "org/name/flux1-def.safetensors")

    assert status == 0
    assert Path(said.strip()).read_bytes() == FILES["flux1-dev.safetensors"]
    assert missing == 1
    assert "org/name has no flux1-def.safetensors: see its files at" in why


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        ("fp16", "vae/diffusion_pytorch_model.fp16.safetensors"),
        ("int3", "vae/diffusion_pytorch_model.safetensors"),
        (None, "vae/diffusion_pytorch_model.safetensors"),
    ],
)
def test_a_variant_is_taken_where_there_is_one(variant: str | None, weights: str) -> None:
    found = wanted(FILES, places("m", INDEX)["m"], variant)

    assert [name for name in found if name.startswith("vae/diff")] == [weights]
    assert "transformer/diffusion_pytorch_model-00002-of-00002.safetensors" in found


def test_weights_that_are_pickles_only_are_refused() -> None:
    files = [name for name in FILES if not name.startswith("vae/") or name.endswith(".bin")]

    with pytest.raises(LoadFailed, match=r"there is no \.safetensors of vae"):
        wanted(files, places("m", INDEX)["m"], None)


def test_a_model_that_does_not_fit_the_disk_is_refused_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=30 * 10**9))
    files = [SimpleNamespace(file_size=16 * 10**9, will_download=n != 1) for n in range(3)]

    with pytest.raises(LoadFailed, match=r"org/name takes 32.0 GB, and .* has 30.0 GB free"):
        pulling._check_disk("org/name", files)


def test_what_is_here_already_is_not_looked_for(tmp_path: Path) -> None:
    status, said, _ = pull("http://127.0.0.1:9", tmp_path, "shapes")

    assert status == 0
    assert (Path(said.strip()) / "model_index.json").is_file()
