"""Check the wheel: its content, and that it serves and generates in a clean environment.

usage: make test-wheel     (or, in an environment with the wheel: python -I .ci/wheel.py WHEEL)
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CARPOOL = Path(sys.executable).with_name("carpool")
MODELS = ("shapes", "shapes_video", "shapes_lora", "shapes_rewriter")
PLAYGROUND = (
    "server/routes/playground.html", "server/playground/style.css", "server/playground/app.js",
)  # fmt: skip
PATIENCE_S = 120


def check_content(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for model in MODELS:
        weights = [n for n in names if f"/models/{model}" in n and n.endswith(".safetensors")]
        assert weights, f"{wheel.name} lacks the weights of {model}"
    for needed in ("models/proof.json", "models/grid", "carpool_lab/", "py.typed", *PLAYGROUND):
        assert any(needed in name for name in names), f"{wheel.name} lacks {needed}"
    tops = {name.split("/")[0] for name in names}
    strays = {top for top in tops if not re.fullmatch(r"carpool(_lab|-.*\.dist-info)?", top)}
    assert not strays, f"{wheel.name} has {', '.join(sorted(strays))}"


def check_install(home: Path) -> None:
    code = "import carpool; print(carpool.__file__)"
    done = run([sys.executable, "-I", "-c", code], home)
    assert "site-packages" in done, f"carpool comes from {done}"


def run(command: list[str | Path], home: Path) -> str:
    done = subprocess.run(
        command, cwd=home, env=environment(home), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout


def environment(home: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    return {**kept, "HOME": str(home), "HF_HUB_OFFLINE": "1"}


def check_commands(home: Path) -> None:
    for command in ("bench", "check", "simulate", "plan", "jobs", "models"):
        assert "Usage:" in run([CARPOOL, command, "--help"], home)
    run([CARPOOL, "models"], home)
    run([CARPOOL, "generate", "a red circle", "--seed", "1", "-o", "circle.png"], home)
    assert (home / "circle.png").read_bytes().startswith(b"\x89PNG")


@contextmanager
def served(home: Path) -> Iterator[str]:
    """Run `carpool serve shapes`; yields its URL, and stops the server afterwards."""
    process = subprocess.Popen(
        [CARPOOL, "serve", "shapes", "--port", "0"],
        cwd=home, env=environment(home), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    too_late = threading.Timer(PATIENCE_S, process.kill)
    too_late.start()
    try:
        assert process.stdout is not None
        output = iter(process.stdout)
        yield next(match[0] for line in output if (match := re.search(r"http://[0-9.]+:\d+", line)))
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, "the server did not end in order"
    finally:
        too_late.cancel()
        process.kill()
        process.wait()


def check_server(home: Path) -> None:
    with served(home) as url:
        body = json.dumps({"prompt": "a red circle", "seed": 1}).encode()
        request = urllib.request.Request(
            f"{url}/v1/images/generations", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["data"][0]["b64_json"]
        for path in ("", "playground/app.js"):
            with urllib.request.urlopen(f"{url}/{path}", timeout=PATIENCE_S) as answer:
                assert answer.read(), f"GET /{path} is empty"


def main() -> None:
    wheel = Path(sys.argv[1])
    check_content(wheel)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        check_install(home)
        check_commands(home)
        check_server(home)
    print(f"{wheel.name} is whole: it serves, generates, and has its commands")


if __name__ == "__main__":
    main()
