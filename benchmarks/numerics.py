"""What each numerics mode promises, measured: alone against in company, by model and type.

    python -m benchmarks.numerics [MODEL ...]

Every request of a model runs alone, and then all of them together; differences are those of pixel
values from 0 to 1. Seconds are of the process, so that other work on the machine hardly counts.
"""

import sys
import time
from typing import Any

import numpy as np

import carpool
from carpool.config import DType, Numerics

REQUESTS = 6
MODELS = ("shapes",)


def measured(model: str, dtype: DType, numerics: Numerics) -> tuple[float, float, float]:
    """The largest difference; seconds of all requests one after another, and together."""
    with carpool.load(model, device="cpu", dtype=dtype, numerics=numerics) as engine:
        requests = [
            carpool.Request(
                f"{n} red circle", seed=n, num_inference_steps=4 + n % 3, output_type="np"
            )
            for n in range(REQUESTS)
        ]
        for _ in range(3):  # what has to be proven is proven
            engine.generate(requests)
        began_s = time.process_time()
        alone = [pixels(engine.generate([one])[0]) for one in requests]
        between_s = time.process_time()
        together = [pixels(one) for one in engine.generate(requests)]
        ended_s = time.process_time()
    pairs = zip(alone, together, strict=True)
    most = max(float(np.abs(one - other).max()) for one, other in pairs)
    return most, between_s - began_s, ended_s - between_s


def pixels(output: Any) -> Any:
    return np.asarray(output.frames if output.frames is not None else output.images, np.float32)


def main(models: list[str]) -> None:
    print("| model | type | numerics | largest difference | one by one, s | together, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in models:
        for dtype in ("float32", "bfloat16"):
            for numerics in ("fast", "exact"):
                most, alone_s, together_s = measured(model, dtype, numerics)
                figures = f"{most:.1e} | {alone_s:.2f} | {together_s:.2f}"
                print(f"| {model} | {dtype} | {numerics} | {figures} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))
