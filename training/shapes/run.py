"""A training run: its log, the checkpoints of its stages, and its exported folder."""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from training.shapes.flow_matching import FlowMatching

DOCS = Path("docs")


class TrainingLog:
    """A printed and stored log, with seconds of work that continue after a restart."""

    def __init__(self, path: Path) -> None:
        self._path, self._last_s = path, time.monotonic()
        lines = path.read_text().splitlines() if path.exists() else []
        self._spent_s = float(lines[-1][1:8]) if lines else 0.0

    def __call__(self, line: str) -> None:
        now_s = time.monotonic()
        self._spent_s, self._last_s = self._spent_s + now_s - self._last_s, now_s
        line = f"[{self._spent_s:7.0f} s] {line}"
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


class Checkpoints:
    """The stages' checkpoints in a run's folder, so a stopped run resumes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def load_or_make(self, name: str, make: Callable[[], Any]) -> Any:
        """Load a stage's checkpoint, or run the stage and save its result."""
        if not (self.folder / name).exists():
            self.save(make(), name)
        return torch.load(self.folder / name, weights_only=False)

    def save(self, state: object, name: str) -> None:
        """Write a checkpoint atomically."""
        torch.save(state, self.folder / f"{name}.tmp")
        os.replace(self.folder / f"{name}.tmp", self.folder / name)

    def autoencoder(
        self, build: Callable[[], Any], train: Callable[[], Any], measured: tuple[str, ...]
    ) -> Any:
        """Load or train the autoencoder, and freeze it.

        Args:
            build: makes the untrained autoencoder.
            measured: names of config entries set by the training.
        """

        def trained() -> tuple[dict[str, Any], dict[str, Any]]:
            vae = train()
            return vae.state_dict(), dict(vae.config)

        weights, config = self.load_or_make("vae.pt", trained)
        vae = build().eval().requires_grad_(False)
        vae.load_state_dict(weights)
        vae.register_to_config(**{name: config[name] for name in measured})
        return vae

    def resume(self, flow: FlowMatching, log: TrainingLog) -> None:
        """Resume the transformer's training, if it has begun."""
        if (self.folder / "flow.pt").exists():
            flow.load_state_dict(torch.load(self.folder / "flow.pt", weights_only=False))
            log(f"transformer goes on from step {flow.step}")

    def export(self, pipeline: DiffusionPipeline, serving: Mapping[str, Any], folder: Path) -> int:
        """Write a pipeline as a diffusers folder, with its `carpool.json`; returns its bytes."""
        fresh = self.folder / "export"
        shutil.rmtree(fresh, ignore_errors=True)
        pipeline.save_pretrained(fresh)
        (fresh / "carpool.json").write_text(json.dumps(serving, indent=2) + "\n")
        for path in fresh.rglob("*.safetensors"):
            path.chmod(0o644)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(fresh, folder)
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(
    doc: str | None,
    build: Path,
    name: str,
    *,
    threads: int,
    train: Callable[[TrainingLog, bool], None],
    evaluate: Callable[[TrainingLog], None],
) -> None:
    """Train, export and judge, or only the later stages, by the command line.

    Args:
        doc: text for `--help`.
        build: folder of the run.
        name: name of the model; its log is copied to `docs/NAME-training.log`.
        train: runs the stages; its second argument: to the end, or only the export.
        evaluate: judges the packaged model.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluate", action="store_true", help="only judge the packaged model")
    parser.add_argument("--export", action="store_true", help="only export the last checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(threads)
    build.mkdir(parents=True, exist_ok=True)
    log = TrainingLog(build / "training.log")
    if not options.evaluate:
        train(log, not options.export)
    if not options.export:
        evaluate(log)
        shutil.copy(build / "training.log", DOCS / f"{name}-training.log")
