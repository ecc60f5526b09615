"""How much memory requests take while weights are streamed, measured in a process of its own.

usage: python -m support.streamed_memory FOLDER NAME=VALUE[,...] ...    (settings of engines)

Each argument is measured in a process forked from the one that has imported all. Prints JSON, a
line each: bytes of the weights, the most resident memory above that before loading, while loading
and after it, and digests of the pictures.
"""

import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from support import engine_driver
from support.engine_driver import Drive, driving, fresh
from support.tiny import ARGUMENTS

HEADS, DOUBLE, SINGLE = 16, 4, 12


def main(folder: str, *engines: str) -> None:
    torch.set_num_threads(1)
    for numerics, stream in (("exact", "none"), ("fast", "transformer")):
        with driving("flux", numerics=numerics, stream=stream, stream_dir=folder) as drive:
            _draw(drive, 2)  # what libraries take once
    engine_driver.served.cache_clear()
    gc.collect()
    for settings in engines:
        if (pid := os.fork()) == 0:
            measure(folder, settings)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            sys.exit(f"{settings}: ended with {os.waitstatus_to_exitcode(status)}")


def measure(folder: str, settings: str) -> None:
    before = _status("VmRSS")
    _reset_peak()
    given: dict[str, Any] = dict(one.split("=", 1) for one in settings.split(","))
    with driving(Path(folder), **given) as drive:
        loading = _status("VmHWM") - before
        _reset_peak()
        pictures = _draw(drive, 2)
        weights = drive.engine.loaded.modules.values()
        found = {
            "weights": sum(p.nbytes for module in weights for p in module.parameters()),
            "loading": loading,
            "peak": _status("VmHWM") - before,
            "pictures": [hashlib.sha256(one).hexdigest() for one in pictures],
        }
    print(json.dumps(found))


def make(folder: Path) -> None:
    """A pipeline whose transformer has some 75 MB."""
    pipe = fresh("flux")
    config = {n: v for n, v in pipe.transformer.config.items() if not n.startswith("_")}
    sizes = {"num_attention_heads": HEADS, "num_layers": DOUBLE, "num_single_layers": SINGLE}
    torch.manual_seed(0)
    pipe.transformer = FluxTransformer2DModel(**{**config, **sizes})
    pipe.save_pretrained(folder)


def _draw(drive: Drive, steps: int) -> list[bytes]:
    arguments = {**ARGUMENTS["flux"], "num_inference_steps": steps}
    heard = [drive.submit("a cat", seed=seed, **arguments) for seed in range(2)]
    drive.finish()
    return [one.image.numpy().tobytes() for one in heard]


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: proc(5)


def _status(name: str) -> int:
    """A figure of `/proc/self/status`, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
