"""Mistakes in a command are found before anything is loaded: no torch, no worker, no server."""

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from carpool.config import EngineSettings
from carpool.errors import CarpoolError
from carpool.preflight import check
from support.server_process import ended

NO_TORCH = """
import sys
from carpool.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules, "torch was loaded"
"""


def carpool(*arguments: str, **environ: str) -> tuple[int, list[str]]:
    """Run `carpool`, which must load no torch; returns its status and what it said."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("CARPOOL_")}
    run = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *arguments], capture_output=True, text=True,
        env={**clean, "HF_HUB_OFFLINE": "1", **environ}, timeout=50, check=False,
    )  # fmt: skip
    assert run.stdout == ""
    return run.returncode, run.stderr.splitlines()


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A download that broke off: a header, and half of the weights."""
    header = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    file = tmp_path / "torn.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return file


WRONG = {
    "model": (["shapez"], "no model at 'shapez'; did you mean 'shapes'?"),
    "device": (["--device", "cuba"], "device='cuba': must be auto, cpu, cuda, xpu, mps, or cuda:N"),
    "adapter syntax": (["--lora", "ink"], "lora='ink': write NAME=PATH"),
    "adapter file": (["--lora", "ink=./ink.safetensors"], "'ink': there is no file ink.safe"),
    "adapter name": (["--lora", "outlined=./x"], "there is an adapter 'outlined' already"),
    "pickle": (["--lora", "ink=./ink.bin"], "a pickle can run code"),
    "adapter folder": (["--lora-dir", "./nowhere"], "there is no such folder"),
    "shares": (["--fair-share", "a=none"], "fair_share='a=none': write TENANT=WEIGHT"),
    "number type": (["--dtype", "float8"], "dtype='float8': must be one of auto, float32"),
    "number types": (["--dtype", "vae=float32", "--dtype", "vae=bfloat16"], "one value only"),
    "quantization": (["--quantize", "int9"], "'int9' is unknown; did you mean 'int8'?"),
    "its component": (["--quantize", "unet=int8"], "no component 'unet'; it has text_encoder, "),
    "its JSON": (["--quantize", "{"], "quantize is no JSON"),
    "its back end": (["--quantize", '{"vae": {}}'], "'vae' has no quant_backend"),
    "its device": (
        ["--quantize", "int4", "--device", "cpu"],
        "needs a GPU; on a CPU take quanto-int4",
    ),
    "its package": (["--quantize", "nf4"], "needs bitsandbytes: pip install bitsandbytes"),
    "component": (["--component", "vae"], "component='vae': write NAME=FILE_OR_MODEL"),
    "component twice": (
        ["--component", "vae=a", "--component", "vae=b"],
        "there is another 'vae' already",
    ),
    "quantized twice": (
        ["--component", "transformer=a.gguf", "--quantize", "transformer=int8"],
        "leave one of them out",
    ),
    "place": (["--place", "cuda:1"], "place='cuda:1': write COMPONENT=VALUE"),
    "place of none": (["--place", "clip=cpu"], "no component 'clip'; it has"),
    "a group and streams": (
        ["--context-parallel", "2", "--stream", "transformer"],
        "context_parallel=2: ranks cannot stream weights, so leave stream out",
    ),
    "a group and a budget": (
        ["--context-parallel", "2", "--memory", "1GiB"],
        "ranks cannot stream weights, so leave memory out",
    ),
    "a group, compiled": (["--context-parallel", "2", "--compile"], "leave compile out"),
    "a denoiser of a group elsewhere": (
        ["--context-parallel", "2", "--place", "transformer=cuda:3"],
        "computes transformer on the devices of the group: leave it out of place",
    ),
    "a ring without its back end": (
        ["--context-parallel", "2", "--context-parallel-kind", "ring"],
        "needs an attention_backend that returns the log-sum-exp: one of flash,",
    ),
    "a ring on CPUs": (
        ["--context-parallel", "2", "--context-parallel-kind", "ring", "--device", "cpu"],
        "take context_parallel_kind=ulysses",
    ),
    "too few devices of a group": (
        ["--context-parallel", "3", "--device", "cuda:0+cuda:1"],
        "names 2 devices, and context_parallel is 3",
    ),
    "one device twice": (
        ["--context-parallel", "2", "--device", "cuda:0+cuda:0"],
        "context_parallel=2 needs different devices",
    ),
    "compile": (["--compile", "--numerics", "exact"], "leave one of them out"),
    "warm-up": (["--warmup", "1024"], "warmup='1024': write WIDTHxHEIGHT"),
    "large warm-up": (["--warmup", "4096x4096"], "4096x4096 is never drawn: max_pixels is"),
    "configuration": (["--model-config", "org/name"], "is for a MODEL that is one file"),
    "rules": (
        ["--batching-mode", "dynamic", "--batching-config", "nowhere.json"],
        "nowhere.json cannot be read",
    ),
}


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize(("flags", "told"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_one_line_and_nothing_is_loaded(
    command: str, flags: list[str], told: str
) -> None:
    if command == "generate":
        flags = ["a star", *(["--model", *flags] if flags[0][0] != "-" else flags)]

    status, said = ended(command, *flags)

    assert status in (1, 2)
    [line] = said.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("model", "output", "told"),
    [
        ("shapes", "a.mp4", "the model makes pictures: use .png"),
        ("shapes-video", "a.png", "the model makes videos: use .mp4"),
    ],
)
def test_a_file_that_cannot_hold_what_a_known_model_makes_is_refused(
    model: str, output: str, told: str
) -> None:
    status, lines = carpool("generate", "a star", "--model", model, "-o", output)

    assert status == 2
    assert told in lines[-1]


def test_a_torn_adapter_is_found_by_its_header(torn: Path) -> None:
    with pytest.raises(CarpoolError, match=r"adapter 'ink': torn.safetensors is not a readable"):
        check("shapes", EngineSettings(lora=(f"ink={torn}",)))


def test_what_is_right_passes(torn: Path) -> None:
    torn.write_bytes(torn.read_bytes() + bytes(8))

    check("shapes", EngineSettings(lora=(f"ink={torn}",), device="cuda:1", fair_share=("*=2",)))


def test_a_taken_port_is_told_before_anything_else() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        status, lines = carpool("serve", "--port", str(port))

    assert status == 1
    [line] = lines
    assert line.startswith(f"carpool: port {port} is taken; use --port")


def test_an_address_of_another_machine_is_refused() -> None:
    status, [line] = carpool("serve", "--host", "192.0.2.1")

    assert status == 1
    assert "host='192.0.2.1' is no address of this machine" in line


# The hub


def test_offline_mode_is_named_where_a_model_is_not_in_the_cache(tmp_path: Path) -> None:
    status, [line] = carpool("serve", "org/name", HF_HOME=str(tmp_path))

    assert status == 1
    assert f"org/name is not in the hub cache ({tmp_path}/hub), and HF_HUB_OFFLINE is set" in line
    assert "model_index.json" not in line


def test_a_hub_that_cannot_be_reached_is_told_at_once(tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"  # the discard port

    status, [line] = carpool(
        "serve", "org/name", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0", HF_ENDPOINT=nobody
    )

    assert status == 1
    assert f"{nobody} cannot be reached" in line
    assert "model_index.json" not in line


@contextmanager
def hub(status: int, code: str) -> Iterator[str]:
    """A hub that gives every question the same answer; yields its URL."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (403, "GatedRepo", "org/name is gated: accept its terms at "),
        (401, "RepoNotFound", "the hub has no model 'org/name' that this token may see"),
        (404, "RevisionNotFound", "org/name has no revision 'main2'"),
        (404, "EntryNotFound", "has no model_index.json: it is no diffusers pipeline"),
    ],
)
def test_the_hub_says_why_it_gives_no_model(
    status: int, code: str, told: str, tmp_path: Path
) -> None:
    with hub(status, code) as url:
        ended_with, lines = carpool(
            "serve", "org/name", *("--revision", "main2"), HF_HOME=str(tmp_path),
            HF_HUB_OFFLINE="0", HF_ENDPOINT=url,
        )  # fmt: skip

    assert ended_with == 1
    assert told in lines[-1]
