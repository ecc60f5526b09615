"""Every command of the pages runs: hub ids are folders here, devices CPUs, and sizes small."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from support.lora_files import adapter
from support.prepared import gguf_of
from support.server_process import Server, eventually, serving
from support.tiny import checkpoint
from support.tiny.writers import save_writer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KEY = "a-secret-key"
SAVED = re.compile(r"\S+: seed \d+")  # the line of a written file
DEVICE = re.compile(r"\bcuda(:\d)?")
ELSEWHERE = {
    "make serve": "Makefile",
    "make demo": "Makefile",
    "carpool pull": "tests/cli/test_pull.py",
    "hf auth login": "tests/cli/test_pull.py",  # what a hub refuses without it
    "python -m venv": ".ci/run",
    "pip install": ".ci/run",  # `make test-wheel`
    "carpool bench --sweep": "tests/lab/test_load_http.py",  # ten minutes of load
    "ray start": "tests/fleet/test_ray.py",
    "carpool serve MODEL --ray": "tests/fleet/test_ray.py",
    "vllm serve": "tests/engine/model/test_language_server.py",  # a server that speaks its protocol
}
"""Commands that cannot run here, or take too long, and what holds them."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def lines() -> list[str]:
    """The commands of the pages, each once; those of several lines, and pipes, whole."""
    found: dict[str, None] = {}
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.S | re.M):
            whole = block.replace("\\\n", " ").replace("json, sys\n", "json, sys;")
            found |= dict.fromkeys(re.sub(r"\s+#.*", "", line) for line in whole.splitlines())
    return [line for line in found if not line.startswith(tuple(ELSEWHERE))]


def served() -> list[str]:
    return [line for line in lines() if line.startswith("carpool serve")]


def others() -> list[str]:
    return [line for line in lines() if not line.startswith("carpool serve")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder that has what the commands name."""
    root = tmp_path_factory.mktemp("pages")
    flux, sdxl, wan = checkpoint("flux"), checkpoint("sdxl"), checkpoint("wan22_t2v_a14b")
    [weights] = (flux / "transformer").glob("*.safetensors")
    links = {
        "M": flux, "MODEL": flux, "org/name": flux, "org/large-model": flux, "org/flux": flux,
        "black-forest-labs/FLUX.1-dev": flux, "black-forest-labs/FLUX.2-dev": checkpoint("flux2"),
        "Qwen/Qwen3-0.6B": save_writer(root / "writer"),
        "my-flux-checkpoint": flux, "my-sdxl-checkpoint": sdxl, "org/another-vae": flux / "vae",
        # A tiny SDXL has no file in its first layout: a transformer's file takes the same way.
        "org/sdxl": flux, "sdxl-tuned.safetensors": weights, "org/wan2.2": wan,
    }  # fmt: skip
    for name, target in links.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).symlink_to(target)
    gguf_of(load_file(weights), root / "tuned-Q8_0.gguf")
    for part, name in (("transformer", "high-noise"), ("transformer_2", "low-noise")):
        [weights] = (wan / part).glob("*.safetensors")
        gguf_of(load_file(weights), root / f"{name}-Q8_0.gguf")
    adapter(root, "flux", 1).rename(root / "pixel-art.safetensors")
    for seed, name in enumerate(("ink", "adapters")):
        (root / name).mkdir()
        adapter(root, "flux", seed).rename(root / name / "one.safetensors")
    (root / "mine.py").write_text(
        "from diffusers import DiffusionPipeline\n\n"
        f"def build():\n    return DiffusionPipeline.from_pretrained({str(sdxl)!r})\n"
    )
    [models] = re.findall(
        r"^```yaml\n(models:.*?)^```", (ROOT / "docs/scale-out.md").read_text(), re.S | re.M
    )
    (root / "models.yaml").write_text(DEVICE.sub("cpu", models))
    Image.new("RGB", (64, 64), "white").save(root / "before.png")
    Image.new("L", (64, 64), "white").save(root / "mask.png")
    with chdir(root):
        yield root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(model="shapes") as running:
        yield running


@pytest.fixture(scope="module")
def writing(folder: Path) -> Iterator[Server]:
    with serving(model="Qwen/Qwen3-0.6B") as running:
        yield running


@pytest.fixture(scope="module")
def keyed(folder: Path) -> Iterator[Server]:
    with serving("--api-key", KEY, model="shapes") as running:
        yield running


def here(line: str) -> str:
    """A command that means what there is on this machine."""
    there = re.sub(r"(cpu,){2,}cpu", "cpu,cpu", DEVICE.sub("cpu", line))  # ranks share a CPU
    return re.sub(r"\b(512|1024)x(512|1024)\b", "64x64", there)


def job(running: Server, steps: int, *, is_awaited: bool) -> str:
    """The id of a new job."""
    body = {"prompt": "a red circle", "background_job": True, "num_inference_steps": steps}
    with running.client() as client:
        made: str = client.post("/v1/images/generations", json=body).json()["id"]
        if is_awaited:
            eventually(
                lambda: client.get(f"/v1/jobs/{made}").json()["status"] == "completed", 60, made
            )
    return made


@pytest.mark.parametrize("line", served())
def test_what_the_pages_serve_is_served(line: str, folder: Path) -> None:
    said = shlex.split(re.sub(r"--port \d+", "", here(line)))[2:]

    with serving(*said, model="") as running:
        assert running.get("/v1/models").json()["data"]
        running.signal()
        assert running.wait() == 0


@pytest.mark.parametrize("line", others())
def test_what_the_pages_ask_is_answered(line: str, request: pytest.FixtureRequest) -> None:
    name = "keyed" if "$KEY" in line else "writing" if "/chat/" in line else "server"
    running: Server = request.getfixturevalue(name)
    command = re.sub(r"(http://)?(localhost|127\.0\.0\.1):8000", running.url, here(line))
    if command.startswith(("carpool jobs", "carpool bench")):
        words = command.split()
        command = " ".join([*words, "--url", running.url])
    if re.search(r"\bID\b", command):
        is_fetched = "fetch" in command
        made = job(running, 4 if is_fetched else 200, is_awaited=is_fetched)
        command = re.sub(r"\bID\b", made, command)
    environ = {**os.environ, "KEY": KEY, "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"

    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env=environ, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
    if command.startswith("carpool generate"):
        noise = [text for text in done.stderr.splitlines() if not SAVED.match(text)]
        assert noise == [], "a library is noisy"
    if command.startswith("curl"):
        answers = [text.removeprefix("data: ") for text in done.stdout.splitlines()]
        bodies = [json.loads(text) for text in answers if text.startswith("{")]
        assert bodies or ">" in command or "| jq" in command
        assert not any(body.get("error") for body in bodies), done.stdout
        assert answers != ["null"]


def test_what_runs_elsewhere_is_held_there() -> None:
    for command, where in ELSEWHERE.items():
        assert (ROOT / where).exists(), command
