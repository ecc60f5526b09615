"""Install lock files into an environment, with a progress line and the seconds of each part.

usage: python3 .ci/install.py ENVIRONMENT LOCK... [--editable FOLDER]

uv needs a sixth of pip's time. It comes from the path or the index; if it is missing or fails, pip
installs. uv gets pip's settings: index, find-links, constraint. If PyTorch's index is reachable,
torch is the build for this machine's driver, or the CPU build.
"""

import ast
import contextlib
import ensurepip
import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

WIDTH = 76  # characters of the progress line
TICK_S = 0.5
AS_UV_SAYS = {  # pip's settings
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
}
TORCH_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
# Packages that are imported nearly whole before the first picture, in the order of imports.
IMPORTED = (
    "torch/nn", "torch/distributed", "torch/utils", "torch/_functorch", "torch/autograd",
    "torch/fx", "torch/optim", "torch/ao", "torch/_subclasses", "torch/_higher_order_ops",
    "torch/_refs", "torch/_dynamo", "mpmath", "sympy", "transformers/utils",
    "transformers/generation", "diffusers/models", "diffusers/loaders", "peft",
)  # fmt: skip


def main(environment: Path, arguments: list[str]) -> None:
    python = environment / "bin" / "python"
    locks = [text for name in arguments if name.endswith(".lock") for text in ("-r", name)]
    rest = [name for name in arguments if not name.endswith(".lock")]
    with timed("environment"):
        pip = created(environment)
        environ = with_pip_settings(pip)
    with timed("uv"):
        uv = shutil.which("uv") or from_index(pip, environment)
    with timed("libraries"):
        if not (uv and installed_by(uv, python, [*locks, *rest, "pip"], environ)):
            run([*pip, "install", *locks])
            run([*pip, "install", "--no-deps", "pip", *rest])
    compile_ahead(environment, python)


def created(environment: Path) -> list[str]:
    """Make an empty environment, if it is missing; return its pip command.

    Python's bundled pip runs from its wheel: installing it first would take seconds.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment)])
    bundled = Path(ensurepip.__file__).parent / "_bundled"
    wheels = [*bundled.glob("pip-*.whl"), *Path("/usr/share/python-wheels").glob("pip-*.whl")]
    if wheels:
        return [str(python), f"{wheels[0]}/pip"]
    run([str(python), "-m", "ensurepip"])
    return [str(python), "-m", "pip"]


def with_pip_settings(pip: list[str]) -> dict[str, str]:
    """The process's environment, with pip's settings as defaults for uv."""
    environ = {"UV_INDEX_STRATEGY": "unsafe-best-match", **os.environ}  # pip's rule for several
    if importlib.util.find_spec("pip"):  # compiled, unlike pip's wheel: 1 s instead of 3
        pip = [sys.executable, "-m", "pip"]
    done = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False)
    # variables override files; pip 26 lists files first, earlier versions list variables first
    for line in sorted(done.stdout.splitlines(), key=lambda text: not text.startswith(":env:")):
        name, _, value = line.partition("=")
        variable = AS_UV_SAYS.get(name.rpartition(".")[2])
        if variable is not None and value:
            environ.setdefault(variable, " ".join(str(ast.literal_eval(value)).split()))
    return environ


def from_index(pip: list[str], environment: Path) -> str | None:
    with contextlib.suppress(subprocess.CalledProcessError):
        run([*pip, "install", "uv"])
        return str(environment / "bin" / "uv")
    return None


def installed_by(uv: str, python: Path, packages: list[str], environ: dict[str, str]) -> bool:
    backend = ["--torch-backend", "auto"] if can_reach(TORCH_INDEX) else []
    for extra in dict.fromkeys((tuple(backend), ())):
        with contextlib.suppress(subprocess.CalledProcessError):
            run([uv, "pip", "install", "--python", str(python), *extra, *packages], environ)
            return True
    return False


def compile_ahead(environment: Path, python: Path) -> None:
    """Start to compile libraries to bytecode on a second core, while the server starts.

    Wheels contain no bytecode, and an import compiles one file after another.
    """
    folders = [str(path) for name in IMPORTED for path in environment.glob(f"lib/*/*/{name}")]
    if folders and not sys.dont_write_bytecode and (os.cpu_count() or 1) > 1:
        command = [str(python), "-m", "compileall", "-qq", "-x", "sympy/.*/tests/", *folders]
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def can_reach(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=3):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def timed(part: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    print(f"{part}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)


def run(command: list[str], environ: dict[str, str] | None = None) -> None:
    """Run a command; a terminal shows its last line and the seconds on one line."""
    is_terminal = sys.stderr.isatty()
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    assert process.stdout is not None
    output = process.stdout

    def read() -> None:
        for line in output:
            lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    begun, kept, message, is_open = time.monotonic(), [], "", True
    while is_open:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=TICK_S)
            is_open = line is not None
            kept.append(line or "")
            if line and line[0] not in "+~-":  # skips the list of packages
                message = line
                if not is_terminal:
                    print(f"  {line[:WIDTH]}", file=sys.stderr, flush=True)
        if is_terminal:
            text = f"  {time.monotonic() - begun:.0f} s  {message}"[:WIDTH]
            print(f"\r\033[K{text if is_open else ''}", end="", file=sys.stderr, flush=True)
    if process.wait() != 0:
        print("\n".join(kept[-20:]), file=sys.stderr, flush=True)
        raise subprocess.CalledProcessError(process.returncode, command)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd[:6])} ... ended with {error.returncode}")
