"""Write a tiny checkpoint with a wider denoiser, for the comparison of servers in `benchmarks/`.

usage: PYTHONPATH=tests python -m support.tiny.wider FAMILY CONFIG FOLDER

CONFIG is JSON: what differs in the denoiser's configuration.
"""

import json
import sys

import torch

from support.tiny.checkpoints import build
from support.tiny.parts import drawn


def main(family: str, config: str, folder: str) -> None:
    pipe = build(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wider = type(pipe.transformer).from_config(
            {**pipe.transformer.config, **json.loads(config)}
        )
        pipe.register_modules(transformer=drawn(wider, last="proj_out", gain=0.3).eval())
    pipe.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
