"""Servers start whatever disks, streams and folders are like, or say in one line why not.

Damaged model folders are those that torn downloads, full disks and editors leave.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from carpool.config import EngineSettings
from carpool.errors import LoadFailed, SettingRejected
from carpool.models.damage import damage_in
from carpool.preflight import check
from carpool.worker import encoding, protocol
from carpool.worker.process import WorkerProcess
from support.endpoints import ENDPOINT
from support.server_process import MODEL, PATIENCE_S, body, eventually

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
CONFIG = "text_encoder/config.json"


def cut(file: Path, share: float = 0.5) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


def sharded(folder: Path) -> tuple[list[Path], Path]:
    """Split the denoiser's weights into two files with an index; returns these."""
    weights = folder / WEIGHTS
    tensors, names = load_file(weights), dict[str, str]()
    shards = [weights.with_name(f"{weights.stem}-0000{n}-of-00002.safetensors") for n in (1, 2)]
    for n, shard in enumerate(shards):
        part = dict(list(tensors.items())[n::2])
        save_file(part, shard, {"format": "pt"})
        names |= dict.fromkeys(part, shard.name)
    weights.unlink()
    index = weights.with_name(f"{weights.name}.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return shards, index


def utf16(file: Path) -> None:
    file.write_bytes(file.read_text().encode("utf-16"))


def linked(file: Path) -> None:
    file.unlink()
    file.symlink_to("../../blobs/gone")


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "weights cut": (lambda at: cut(at / WEIGHTS), f"{WEIGHTS} is cut off"),
    "weights of an encoder cut": (
        lambda at: cut(at / "text_encoder/model.safetensors", 0.999),
        "text_encoder/model.safetensors is cut off",
    ),
    "weights empty": (lambda at: cut(at / WEIGHTS, 0), f"{WEIGHTS} is empty"),
    "weights cut in their header": (
        lambda at: cut(at / "vae/diffusion_pytorch_model.safetensors", 0.001),
        "vae/diffusion_pytorch_model.safetensors is cut off",
    ),
    "a page of an error": (
        lambda at: (at / WEIGHTS).write_text("<html>502</html>"),
        f"{WEIGHTS} is a web page",
    ),
    "a pointer": (
        lambda at: (at / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid"),
        "git lfs pull",
    ),
    "a link to nothing": (lambda at: linked(at / WEIGHTS), "is a link to"),
    "a shard is missing": (
        lambda at: sharded(at)[0][1].unlink(),
        "names diffusion_pytorch_model-00002-of-00002.safetensors, which does not exist",
    ),
    "a shard cut": (lambda at: cut(sharded(at)[0][0]), "00001-of-00002.safetensors is cut off"),
    "an index cut": (lambda at: cut(sharded(at)[1]), "index.json is no JSON"),
    "an index of no weights": (
        lambda at: sharded(at)[1].write_text('{"weight_map": null}'),
        "has no weight_map",
    ),
    "a configuration cut": (lambda at: cut(at / CONFIG), f"{CONFIG} is no JSON"),
    "a configuration empty": (lambda at: cut(at / CONFIG, 0), f"{CONFIG} is empty"),
    "a configuration in UTF-16": (lambda at: utf16(at / CONFIG), f"{CONFIG} is no UTF-8"),
    "a configuration with a BOM": (
        lambda at: (at / CONFIG).write_bytes(b"\xef\xbb\xbf" + (at / CONFIG).read_bytes()),
        "BOM",
    ),
    "a configuration that is a list": (
        lambda at: (at / CONFIG).write_text("[]"),
        f"{CONFIG} holds a list",
    ),
    "the index of the pipeline cut": (
        lambda at: cut(at / "model_index.json"),
        "model_index.json is no JSON",
    ),
    "the index of the pipeline a list": (
        lambda at: (at / "model_index.json").write_text("[]"),
        "model_index.json holds a list",
    ),
    "a tokenizer cut": (
        lambda at: cut(at / "tokenizer/tokenizer.json"),
        "tokenizer/tokenizer.json is no JSON",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder of the test's own."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_folder_is_refused_in_one_line_that_names_the_file(
    name: str, folder: Path
) -> None:
    from carpool.engine.model.load import load

    assert damage_in(folder) is None
    damage, message = DAMAGES[name]
    damage(folder)

    with pytest.raises(LoadFailed) as refused:
        load(folder, EngineSettings(device="cpu"))

    assert message in str(refused.value)
    assert "download or copy it again" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_damaged_beside_a_model_keeps_nobody_from_loading_it(folder: Path) -> None:
    """Half a download of another variant, and a folder that the index does not name."""
    from carpool.engine.model.load import load

    shutil.copytree(folder / "vae", folder / "vae_old")
    cut(folder / "vae_old/diffusion_pytorch_model.safetensors")
    shutil.copy(folder / WEIGHTS, other := (folder / WEIGHTS).with_suffix(".fp16.safetensors"))
    cut(other)

    load(folder, EngineSettings(device="cpu")).undo()


def test_an_exception_that_nobody_foresaw_is_told_to_the_front_and_ends_no_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unforeseen(Exception):
        pass

    def build(*_: Any) -> None:
        raise Unforeseen("two\nlines")

    monkeypatch.setattr("carpool.worker.process.MessageHandler", build)
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        worker = threading.Thread(target=WorkerProcess(theirs).serve)
        worker.start()
        ours.sendall(encoding.encode(protocol.LoadModel("a", EngineSettings())))
        ours.settimeout(30)
        told = encoding.decode_to_front(encoding.read(ours.makefile("rb")) or b"")
        ours.shutdown(socket.SHUT_RDWR)
        worker.join()

    assert told == protocol.LoadFailure("cannot load a: Unforeseen: two lines", False)


def test_a_message_about_a_path_that_is_no_utf8_arrives() -> None:
    sent = protocol.RequestFailed("one", "PipelineFailed", "no file /a\udcff/\ud800 there")
    told = encoding.decode_to_front(encoding.encode_body(sent))
    assert told == protocol.RequestFailed("one", "PipelineFailed", r"no file /a\udcff/\ud800 there")


@pytest.mark.parametrize("settings", [{"lora_dir": "/adapters\udcff"}, {"lora": ("a=\udce4.b",)}])
def test_a_path_that_is_no_utf8_is_refused_where_workers_need_it(settings: Any) -> None:
    with pytest.raises(SettingRejected, match="its bytes are no UTF-8"):
        check("shapes", EngineSettings(device="cpu", **settings))
    with pytest.raises(SettingRejected, match=r"model=.*its bytes are no UTF-8"):
        check("/models/\udcff", EngineSettings(device="cpu"))


# Streams

PROGRAM = """
import logging, os, sys
from carpool.telemetry import logs, standard_streams
standard_streams.protect()
standard_streams.protect()
logs.set_up("info", "text")
for n in range(3000):
    logging.getLogger("carpool").warning("line %d of many", n)
    print("printed", n)
    print("\\udcff", file=sys.stderr, flush=True)
assert os.open(os.devnull, os.O_RDONLY) > 2
sys.stdout.flush()
os._exit(7) if "hard" in sys.argv else sys.exit(7)
"""


def ended(stdout: Any, stderr: Any, before: str = "") -> int:
    """The exit status of a program that prints much."""
    command = [sys.executable, "-c", before + PROGRAM]
    return subprocess.run(command, stdout=stdout, stderr=stderr, timeout=60).returncode


def stalled_pipe() -> int:
    """The end of a pipe for writing that is full, and never read."""
    _, writing = os.pipe()
    os.set_blocking(writing, False)
    while select.select([], [writing], [], 0)[1]:
        os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    return writing


def broken_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def stalled_socket() -> int:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    while select.select([], [ours], [], 0)[1]:
        try:
            ours.send(bytes(4096))
        except BlockingIOError:
            break
    ours.setblocking(True)
    theirs.detach()
    return ours.detach()


def full_device() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("make", [full_device, broken_pipe, stalled_pipe, stalled_socket])
def test_a_stream_that_takes_nothing_fails_nobody_and_stops_nobody(make: Callable[[], int]) -> None:
    handle = make()
    assert ended(handle, handle) == 7
    os.close(handle)


@pytest.mark.parametrize("closed", [(2,), (1, 2), (0, 1, 2), (1,)])
def test_what_is_opened_never_takes_the_place_of_a_closed_stream(closed: tuple[int, ...]) -> None:
    close = f"import os; [os.close(one) for one in {closed}]\n"
    command = ["sh", "-c", f'exec "$@" {" ".join(f"{one}>&-" for one in closed)}', "sh"]
    assert subprocess.run([*command, sys.executable, "-c", PROGRAM], timeout=60).returncode == 7
    assert ended(subprocess.DEVNULL, subprocess.DEVNULL, before=close) == 7


def test_a_stream_that_is_read_gets_every_line() -> None:
    command = [sys.executable, "-c", PROGRAM]
    told = subprocess.run(command, capture_output=True, timeout=60)
    assert told.stdout.splitlines() == [f"printed {n}".encode() for n in range(3000)]
    assert told.stderr.count(b" of many\n") == told.stderr.count(b"\\udcff\n") == 3000


# A server

STORE = """
import os, pathlib, sys, threading, time
from contextlib import suppress
from carpool.config import ServeSettings
from carpool.jobs.store import JobStore
from carpool.server import run

folder = pathlib.Path(sys.argv[1])
settings = ServeSettings(state_dir=str(folder / "state"))
if sys.argv[2] != "new":
    store = run.opened_store(settings)
    for _ in range(3):
        store.submit("image", {}, {})
    store.take(2)
    if sys.argv[2] == "closed":
        store.close()
    else:  # as if it had been killed
        os.dup2(os.open(os.devnull, os.O_RDONLY), store._claim._lock)
filler = folder / "filler"
def fill():
    with suppress(OSError), filler.open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
fill()
run.ROOM_AGAIN_S = 0.01
waits = []
def look(seconds):
    waits.append(seconds)  # recovery of a killed store's log frees some pages: fill them, too
    filler.unlink() if len(waits) == 3 else fill()
run.time = type("time", (), {"sleep": look})
again = run.opened_store(settings)
print(len(waits), sorted(record.state for record in again.page()[0]))
"""


@pytest.mark.parametrize("before", ["killed", "closed", "new"])
def test_on_a_full_disk_a_server_waits_for_room_and_keeps_its_jobs(
    before: str, tmp_path: Path
) -> None:
    script = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" -c "$3" "$1" "$4"'
    arguments = ["sh", str(tmp_path), sys.executable, STORE, before]
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, *arguments]
    if subprocess.run([*command[:4], "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine lets no user mount a file system")
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert told.returncode == 0, told.stderr
    jobs = [] if before == "new" else ["queued"] * 3
    assert told.stdout == f"3 {jobs}\n"
    assert told.stderr.count("is full: jobs need room there; the server starts once") == 1


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(bytes(path)) == 0


@pytest.mark.timeout(200)
def test_a_server_whose_folder_is_no_utf8_and_whose_log_is_full_draws_and_keeps_jobs(
    tmp_path: Path,
) -> None:
    state = os.fsencode(tmp_path) + b"/st\xffte/\xe4"
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "carpool.cli.main", "serve", MODEL, "--uds", str(path)]
    with open("/dev/full", "wb") as full:
        server = subprocess.Popen([*command, "--state-dir", state], stdout=full, stderr=full)
    try:
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport, base_url="http://localhost", timeout=60) as http:
            eventually(lambda: _accepts(path), PATIENCE_S, "it listens")
            ready = lambda: http.get("/health").status_code == 200  # noqa: E731
            eventually(ready, PATIENCE_S, "it is ready")
            assert http.post(ENDPOINT, json=body()).status_code == 200
            assert http.post(ENDPOINT, json=body(nonsense=1)).status_code == 400
            job = http.post(ENDPOINT, json=body(background_job=True)).json()["id"]
            ended = lambda: http.get(f"/v1/jobs/{job}").json()["status"] == "completed"  # noqa: E731
            eventually(ended, PATIENCE_S, "the job is drawn")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert b"jobs.sqlite" in os.listdir(state)
