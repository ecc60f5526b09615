"""Plan all of the planner's models on five devices, and write `docs/plans.md`.

usage: make plans    (no GPU, no weights, no network)
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import diffusers

from carpool_lab.plan.command import table
from carpool_lab.plan.names import known
from carpool_lab.plan.predict import Plan, device, plan
from carpool_lab.plan.shapes import build, stages, usual_steps

PAGE = Path(__file__).parent / "plans.md"
ON = ("h200", "h100", "a100", "rtx5090", "rtx4090")
PUBLISHED: Mapping[tuple[str, str], tuple[Mapping[int, float], str]] = {
    ("Qwen-Image", "512x512"): (
        {1: 0.167, 2: 0.183, 3: 0.186, 4: 0.240, 8: 0.425, 16: 0.832},
        "Qwen-Image-2512, compiled, guidance 4: SGLang, issue 22183",
    ),
    ("Qwen-Image", "1024x1024"): ({1: 0.243, 2: 0.474, 3: 0.711}, "the same"),
}
"""Seconds of a compiled denoising step on an H200, by number of requests."""

MEASURED: Mapping[tuple[str, str], Mapping[int, float]] = {
    ("FLUX.1-dev", "512x512"): {1: 0.0911, 2: 0.1088, 4: 0.2139, 8: 0.4285},
    ("FLUX.1-dev", "1024x1024"): {1: 0.174, 2: 0.3513, 4: 0.7117, 8: 1.386},
    ("Qwen-Image", "512x512"): {1: 0.1904, 2: 0.1829, 3: 0.2562, 4: 0.3311},
    ("Qwen-Image", "1024x1024"): {1: 0.3364, 2: 0.6754, 3: 0.9935, 4: 1.307},
}
"""Seconds of a step that is not compiled, on an H200 (`docs/gpu-h200.md`); guidance is two rows."""

ALONE: Mapping[tuple[str, str, str], tuple[float, str]] = {
    ("FLUX.1-dev", "1024x1024", "h100"): (4.30, "28 steps, compiled: xDiT, performance page"),
    ("Qwen-Image", "1024x1024", "h200"): (12.36, "50 steps, guidance: SGLang, issue 33536"),
}
"""Seconds of a single request, by model, size and device."""

HEAD = (
    "| device | resident GB | streamed GB | step, ms: 1, 2, 4, 8 requests | knee "
    "| requests/s alone | at the knee |"
)
INTRODUCTION = """\
# Plans

`make plans` writes this page. `carpool plan MODEL` needs only configs: it runs each pipeline's own
code on modules without weights, counts the work of each forward (PyTorch's FlopCounterMode on the
device `meta`), and predicts seconds from data sheets (`src/carpool_lab/plan/predict.py`, figures in
`devices.json`). Weights are bfloat16, nothing is quantized or compiled. *Streamed* weights do not
fit and cross the bus at each forward. The *knee* is the largest number of requests that pays.
"""
REMARK = """\
The fractions of the model were fitted to the first table, so its errors show the quality of the
fit, not of predictions; so it is with 1.4 times the traffic and the second table. Python needed 24
to 30 us for each operation on that machine, not 7: so few requests at 512 px take longer than
predicted, there as in the published figures. For FLUX.1-dev, SDXL and Wan there are no published
seconds by number of requests with known settings."""


def main() -> None:
    diffusers.utils.logging.set_verbosity_error()
    PAGE.write_text("\n".join([INTRODUCTION, *_body()]) + "\n")


def _body() -> Iterator[str]:
    published: list[str] = []
    measured: list[str] = []
    alone: list[str] = []
    for name in known():
        model = build(name)
        steps = usual_steps(model)
        weights = ", ".join(f"{n} {count / 1e9:.2f}" for n, count in model.parameters().items())
        yield f"## {name}\n\nBillions of weights: {weights}. {steps} steps."
        yield f"Source: {model.source}.\n"
        for size in model.sizes:
            groups = stages(model, size)
            yield f"### {size}\n\n| call | calls | TFLOP | activations GB | operations |"
            yield "| --- | --- | --- | --- | --- |"
            for group in groups:
                work = group.work
                yield (
                    f"| {group.component}.{group.method} | {group.calls} | "
                    f"{work.flops / 1e12:.2f} | {work.peak_bytes / 1e9:.2f} | {work.operations} |"
                )
            yield f"\n{HEAD}\n| --- | --- | --- | --- | --- | --- | --- |"
            for key in ON:
                planned = plan(size, steps, model.parameters(), groups, device(key))
                yield _row(device(key).name, planned)
                compiled = plan(
                    size, steps, model.parameters(), groups, device(key), is_compiled=True
                )
                if key == "h200" and (name, size) in PUBLISHED:
                    published += _errors(name, compiled, PUBLISHED[name, size][0])
                if key == "h200" and (name, size) in MEASURED:
                    measured += _errors(name, planned, MEASURED[name, size])
                if (name, size, key) in ALONE:
                    alone.append(_alone(name, key, compiled))
            yield ""
    yield "## Errors of predictions\n\nSeconds of a compiled denoising step on an H200:\n"
    yield "| model | size | requests | predicted ms | published ms | error |"
    yield "| --- | --- | --- | --- | --- | --- |"
    yield from published
    yield "\nNot compiled, measured on [one H200](gpu-h200.md):\n"
    yield "| model | size | requests | predicted ms | measured ms | error |"
    yield "| --- | --- | --- | --- | --- | --- |"
    yield from measured
    yield "\nSeconds of a request alone, compiled:\n"
    yield "| model | size | device | predicted s | published s | error | published by |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    yield from alone
    sources = "; ".join(source for _, source in PUBLISHED.values())
    yield f"\nSources: {sources}. {REMARK}"


def _row(name: str, planned: Plan) -> str:
    step = {n: 1000 * s for n, s in table("", planned).denoise_s.items()}
    streamed = sum(planned.streamed.values())
    held = sum(planned.weights.values()) - streamed
    return (
        f"| {name} | {held / 1e9:.1f} | {streamed / 1e9:.1f} | "
        f"{', '.join(f'{step[n]:.0f}' for n in (1, 2, 4, 8))} | {planned.knee} | "
        f"{planned.requests_per_s(1):.3g} | {planned.requests_per_s(planned.knee):.3g} |"
    )


def _errors(name: str, planned: Plan, seconds: Mapping[int, float]) -> Iterator[str]:
    step = table("", planned).denoise_s
    for requests, published_s in seconds.items():
        predicted_s = step[requests]
        yield (
            f"| {name} | {planned.size} | {requests} | {1000 * predicted_s:.0f} | "
            f"{1000 * published_s:.0f} | {predicted_s / published_s - 1:+.0%} |"
        )


def _alone(name: str, key: str, planned: Plan) -> str:
    predicted_s = 1 / planned.requests_per_s(1)
    published_s, source = ALONE[name, planned.size, key]
    return (
        f"| {name} | {planned.size} | {device(key).name} | {predicted_s:.2f} | {published_s:.2f} | "
        f"{predicted_s / published_s - 1:+.0%} | {source} |"
    )


if __name__ == "__main__":
    main()
