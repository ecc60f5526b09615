"""The command `carpool plan`: predict memory and speed of a model on a device."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from carpool_lab.plan import predict
from carpool_lab.plan.names import check
from carpool_lab.tables import Table

if TYPE_CHECKING:
    from carpool_lab.plan.shapes import ModelShapes
    from carpool_lab.plan.work import CallGroup

GB = 1e9
HEAD = """\
                    weights on  weights   milliseconds a step     requests      requests a second
device   size       the device  streamed  1 request    4 shared  worth sharing    alone    shared"""


@click.command()
@click.argument("model", default="FLUX.1-dev")
@click.option("--on", "devices", help="devices, separated by commas  [default: all known devices]")
@click.option("--sizes", help="WIDTHxHEIGHT,... in pixels  [default: the model's usual ones]")
@click.option("--steps", type=click.IntRange(1), help="denoising steps  [default: the usual ones]")
@click.option("--quantize", help="as in `carpool serve`: [COMPONENT=]KIND,...")
@click.option("--compile", "is_compiled", is_flag=True, help="without Python's launch overhead")
@click.option("--json", "as_json", is_flag=True, help="print JSON, for `carpool simulate --table`")
def plan(
    model: str,
    devices: str | None,
    sizes: str | None,
    steps: int | None,
    quantize: str | None,
    is_compiled: bool,
    as_json: bool,
) -> None:
    """Predict memory and speed of MODEL on other devices, from configs alone.

    MODEL is known to the planner (FLUX.1-dev, FLUX.2-dev, Qwen-Image, Z-Image-Turbo, SDXL,
    SD3.5-medium, SANA-1.5-1.6B, Chroma1-HD, Wan2.1-T2V-1.3B, Wan2.1-T2V-14B, Wan2.2-T2V-A14B,
    FastWan2.1-T2V-1.3B, TurboWan2.1-T2V-1.3B-480P, TurboWan2.1-T2V-14B-480P,
    TurboWan2.1-T2V-14B-720P, TurboWan2.2-I2V-A14B-720P, Hunyuan3D-2, Hunyuan3D-2-turbo,
    Hunyuan3D-2mini, Hunyuan3D-2mini-turbo), or a folder in diffusers layout, whose configs are
    read. It needs neither weights nor a GPU. docs/plans.md compares predictions with measurements;
    sparse attention is counted in its plain torch form.
    """
    keys = devices.split(",") if devices else list(json.loads(predict.DEVICES.read_text()))
    specs = [predict.device(key.strip()) for key in keys]
    check(model, sizes.split(",") if sizes else [], quantize)
    import diffusers  # slow import, after the checks

    from carpool_lab.plan.advice import bits_of
    from carpool_lab.plan.shapes import build, stages, usual_steps

    diffusers.utils.logging.set_verbosity_error()  # hides its warnings about types of weights
    shapes = build(model)
    bits = bits_of(quantize, shapes)
    work_by_size = {
        size: stages(shapes, size) for size in (sizes.split(",") if sizes else shapes.sizes)
    }
    count = steps or usual_steps(shapes)
    plans = {
        (on.key, size): predict.plan(
            size,
            count,
            shapes.parameters(),
            scaled(work, count, usual_steps(shapes)),
            on,
            bits=bits,
            is_compiled=is_compiled,
        )
        for on in specs
        for size, work in work_by_size.items()
    }
    if as_json:
        click.echo(json.dumps(as_data(shapes, plans), indent=1))
        return
    for line in lines(shapes, work_by_size, plans, quantize, is_compiled):
        click.echo(line)


def scaled(work: "list[CallGroup]", steps: int, counted: int) -> "list[CallGroup]":
    """Scale the stages of a request from the counted steps to another number."""
    from dataclasses import replace

    return [
        replace(stage, calls=round(stage.calls * steps / counted))
        if stage.phase == "denoise"
        else stage
        for stage in work
    ]


def as_data(model: "ModelShapes", plans: Mapping[tuple[str, str], predict.Plan]) -> dict[str, Any]:
    """The plan as JSON; `carpool simulate --table FILE` reads its `tables`."""
    return {
        "by": "carpool plan",
        "model": model.name,
        "source": model.source,
        "parameters": model.parameters(),
        "plans": [
            {"device": key, **asdict(plan), "knee": plan.knee, "fits": plan.fits}
            for (key, _), plan in plans.items()
        ],
        "tables": [to_builtins(table(model.name, plan)) for plan in plans.values()],
    }


def table(name: str, plan: predict.Plan) -> Table:
    """A cost table of the simulator."""
    side, _, height = plan.size.partition("x")
    return Table(
        name=f"{name.replace('-', '_')}-{side if side == height else plan.size}",
        steps=plan.steps,
        denoise_s={n: s / plan.steps for n, s in plan.seconds["denoise"].items()},
        encode_s=plan.seconds.get("encode", {}).get(1, 0.0),
        decode_s=plan.seconds.get("decode", {}).get(1, 0.0),
        is_streamed=not plan.fits,
    )


def lines(
    model: "ModelShapes",
    stages: "Mapping[str, list[CallGroup]]",
    plans: Mapping[tuple[str, str], predict.Plan],
    quantize: str | None,
    is_compiled: bool,
) -> Iterator[str]:
    """The plan as lines of text."""
    from carpool_lab.plan.advice import answer, commands

    first = next(iter(plans.values()))
    yield f"{model.name} ({model.source})"
    yield ""
    for (key, size), planned in plans.items():
        lines = list(commands(model, planned, quantize, is_compiled))
        word = answer(planned, lines, quantize)
        yield f"{key}, {size}: {word}"
        for number, line in enumerate(reversed(lines) if word == "fits quantized" else lines):
            yield f"  {'or: ' * bool(number)}{line}"
    yield ""
    yield "Predicted from data sheets and configs, not measured:"
    yield HEAD
    for (key, size), planned in plans.items():
        step = {n: 1e3 * s / planned.steps for n, s in planned.seconds["denoise"].items()}
        streamed = sum(planned.streamed.values())
        yield (
            f"{key:<8} {size:<10} {(sum(planned.weights.values()) - streamed) / GB:7.1f} GB "
            f"{streamed / GB:6.1f} GB {step[1]:10.0f} {step[4]:11.0f} {planned.knee:14} "
            f"{planned.requests_per_s(1):8.3g} {planned.requests_per_s(planned.knee):9.3g}"
        )
    yield ""
    yield "Weights, and the calls of one request:"
    for name, count in model.parameters().items():
        yield f"  {name:<24} {count / 1e9:7.2f} billion weights  {first.weights[name] / GB:6.1f} GB"
    for size, groups in stages.items():
        for group in groups:
            work = group.work
            yield (
                f"  {size:<10} {group.component + '.' + group.method:<24} {group.calls:3} x "
                f"{work.flops / 1e12:7.2f} TFLOP, {work.peak_bytes / GB:.2f} GB of activations"
            )
