"""`carpool generate`: draw pictures and videos into files, here or on a server."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import click

import carpool
from carpool import jsonfile
from carpool.cli.bars import AdvanceBar, Previews, bars
from carpool.cli.files import FORMATS, check_output, output_for, path_of, reported
from carpool.cli.jobs import ServerClient
from carpool.cli.options import (
    GenerateHelp,
    parameter_option,
    refuse,
    settings_from,
    settings_options,
)
from carpool.cli.show import Protocol, protocol_of, show, why_not
from carpool.config import EngineSettings
from carpool.request.expand import MAX_N
from carpool.types import Event

_NOT_PARAMETERS = {
    "prompt": "give it as an argument",
    "n": "use --n",
    "seed": "use --seed",
    "output_type": "use --output",
    "partial_images": "use --show",
    **dict.fromkeys(("self", "requests", "request_id", "return_errors", "progress"), "not taken"),
}
_PARAMETERS = ("num_inference_steps", "guidance_scale", "negative_prompt", "scheduler")
PREVIEWS = 8  # of each picture, with --show; servers send fewer


@click.command(cls=GenerateHelp)
@click.argument("prompts", nargs=-1)
@click.option("--prompts-file", type=click.File(), help="more prompts, one per line; - reads stdin")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help=".png, .jpg or .webp; .mp4 for videos, .glb, .obj or .ply for meshes, .wav, .flac or .mp3 "
    "for sound; several get -1, -2, ...; {i}, {seed} and {prompt} in the name are replaced  "
    "[default: out.png, out.mp4, out.glb or out.wav]",
)
@click.option("--url", "server", metavar="URL", help="draw on a running server, instead of here")
@click.option("--api-key", envvar="CARPOOL_API_KEY", help="of that server", show_envvar=False)
@click.option("--model", default="", help="as for serve  [default: shapes; on a server, its own]")
@click.option("--steps", "num_inference_steps", type=int, help="denoising steps")
@click.option("--size", help="WIDTHxHEIGHT in pixels")
@click.option("--seed", type=int, help="seed of the first picture of each prompt")
@click.option(
    "--n", type=click.IntRange(1, MAX_N), default=1, show_default=True, help="pictures per prompt"
)
@click.option("--guidance", "guidance_scale", type=float, help="guidance scale")
@click.option("--scheduler", help="sampler, such as dpmpp_2m_karras  [default: the model's own]")
@click.option("--negative-prompt", help="what to avoid")
@click.option(
    "--image",
    "images",
    type=click.Path(path_type=Path),
    multiple=True,
    help="an input or reference picture; repeatable if the model takes several",
)
@click.option("--mask", type=click.Path(path_type=Path), help="mask, white where to redraw")
@click.option(
    "--fps", type=click.FloatRange(1, 240), help="frames a second of videos  [default: 16]"
)
@parameter_option
@click.option(
    "--metadata/--no-metadata",
    envvar="CARPOOL_METADATA",
    default=None,
    help="write the settings into files, and that a model made them  [default: metadata]",
)
@click.option(
    "--metadata-prompt/--no-metadata-prompt",
    envvar="CARPOOL_METADATA_PROMPT",
    default=None,
    help="include prompts in this metadata  [default: metadata-prompt]",
)
@click.option("--show", "is_shown", is_flag=True, help="preview pictures in the terminal too")
@click.option("--json", "as_json", is_flag=True, help="print a JSON line for each picture")
@settings_options(EngineSettings)
def generate(
    prompts: tuple[str, ...],
    prompts_file: Iterable[str] | None,
    server: str | None,
    api_key: str | None,
    is_shown: bool,
    **flags: Any,
) -> None:
    """Draw all PROMPTS together, and write the pictures or videos to files."""
    try:
        texts = [*prompts, *(line.strip() for line in prompts_file or () if line.strip())]
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--prompts-file: not UTF-8: {error}") from None
    if not texts and not flags["images"]:
        raise click.UsageError("give a prompt, --prompts-file, or --image for a model without one")
    if flags["output"] is not None:
        check_output(flags["output"])  # fails before the work
    protocol, parameters = _shown(is_shown), _parameters(flags)
    rest = {f.name: flags.pop(f.name) for f in fields(_Options) if f.name in flags}
    options = _Options(texts or [""], parameters, protocol, **rest)
    if server is None:
        options = replace(options, model=options.model or "shapes")
        _draw_here(options, settings_from(flags).engine())
    else:
        files = {"metadata": options.metadata, "metadata_prompt": options.metadata_prompt}
        refuse(flags | files, "is the server's to decide: leave it out, or --url")
        _on_server(server, api_key, options)


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of one command: prompts, parameters, files."""

    prompts: list[str]  # "": none, for a model that takes only an image
    parameters: dict[str, Any]  # the pipeline's, except for the fields below
    shown: Protocol | None  # pictures in the terminal
    model: str  # "": the default
    output: Path | None
    images: tuple[Path, ...]
    mask: Path | None
    fps: float | None
    size: str | None
    seed: int | None  # seed of each prompt's first picture
    n: int  # pictures of each prompt
    metadata: bool | None
    metadata_prompt: bool | None
    as_json: bool


def _parameters(flags: dict[str, Any]) -> dict[str, Any]:
    """Take the pipeline's parameters out of the flags."""
    values = {name: flags.pop(name) for name in _PARAMETERS}
    named = {name: v for name, v in values.items() if v is not None} | sides(flags["size"])
    parameters: dict[str, Any] = {}
    for name, value in (*pairs(flags.pop("parameter")), *named.items()):
        if name in parameters:
            raise click.UsageError(f"--parameter {name}: it is given twice: give it once")
        parameters[name] = value
    return parameters


def _draw_here(options: _Options, settings: EngineSettings) -> None:
    """Load the model into this process, draw, and write the files."""
    from carpool.models import grid  # slow import, not needed for `--help`
    from carpool.models.source import pipeline_of
    from carpool.preflight import check

    check(options.model, settings)
    if makes := grid.makes(pipeline_of(options.model)):
        output_for(makes, options.output, options.fps)
    from carpool.engine.model.libraries import log_as_others
    from carpool.media import read_picture
    from carpool.request.sizes import area_of, check_size

    read = [read_picture(path, "RGBA") for path in options.images]
    pictures: dict[str, Any] = {"image": read} if read else {}
    if options.mask is not None:
        pictures["mask_image"] = read_picture(options.mask, "L")
    log_as_others(bars=sys.stderr.isatty())  # large models take minutes to load
    with carpool.load(options.model, **asdict(settings)) as engine:
        if options.size is not None:  # file names and metadata need it
            size = sides(options.size) | area_of(engine.card, sides(options.size))
            check_size(replace(engine.card, rounds_sizes=False), size)
            pictures |= area_of(engine.card, {**options.parameters, **pictures})
        task = engine.card.task_for(pictures)
        if task.makes == "text":
            way = f"carpool serve {options.model}, or carpool.load({options.model!r})"
            raise click.UsageError(f"{engine.card.id} writes texts, and this command draws: {way}")
        output = output_for(task.makes, options.output, options.fps)
        if read := [picture.convert(task.image_mode) for picture in read]:
            pictures["image"] = read[0] if len(read) == 1 else read
        if task.takes("output_type") and task.file_type is not None:
            pictures["output_type"] = task.file_type
        previews = None if options.shown is None else Previews()
        prompts = [prompt for prompt in options.prompts for _ in range(options.n)]
        with bars(prompts, previews) as move:
            outputs = engine.generate(
                [prompt or carpool.Request() for prompt in options.prompts],
                n=options.n, seed=options.seed, return_errors=True,
                **options.parameters, **pictures,
                partial_images=0 if previews is None else PREVIEWS,
                progress=lambda i, event: _update_bar(move, previews, i, event),
            )  # fmt: skip
    _write(options, output, outputs, prompts)


def _write(
    options: _Options, output: Path, outputs: "list[carpool.Output]", prompts: list[str]
) -> None:
    """Write the outputs and print their paths; then raise the first error."""
    from carpool.media.metadata import permitted, without_prompts
    from carpool.python.files import write_output

    paths: set[Path] = set()
    for i, (item, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        if item.error is not None:
            continue
        path = path_of(output, i, len(outputs), item.seed or 0, prompt, paths)
        data: dict[str, Any] = {"model": options.model} | ({"prompt": prompt} if prompt else {})
        data |= {"seed": item.seed, **options.parameters}
        data |= without_prompts(item.settings)
        if (text := item.settings.get("revised_prompt")) is not None:
            data["revised_prompt"] = text
            click.echo(f"carpool: drawn as {text!r}", err=True)
        pictures = item.frames[0] if item.frames is not None else item.images
        first = pictures[0] if pictures and hasattr(pictures[0], "width") else None
        data |= {} if first is None else {"width": first.width, "height": first.height}
        metadata = permitted(
            data,
            metadata=options.metadata is not False,
            metadata_prompt=options.metadata_prompt is not False,
        )
        with reported(path, item.seed, item.timings.total_s):
            write_output(item, path, options.fps or 16, metadata, quality=95)
        facts = {**data, "timings": asdict(item.timings)}
        _report(options, path, facts, item.warnings, first)
    for item in outputs:  # after all outputs are on the disk
        if item.error is not None:
            raise item.error


def _report(
    options: _Options, path: Path, facts: dict[str, Any], warnings: Sequence[str], picture: Any
) -> None:
    """Print the path of a written file, or its line of JSON; show its picture, if there is one."""
    for warning in warnings:
        click.echo(f"carpool: {warning}", err=True)
    click.echo(json.dumps({"path": str(path), **facts}) if options.as_json else str(path))
    if options.shown is not None and picture is not None:
        show(picture, options.shown)


def _shown(is_wanted: bool) -> Protocol | None:
    """The terminal's picture protocol, or None; warns if `--show` is impossible."""
    if not is_wanted:
        return None
    if (why := why_not(os.environ)) is None:
        return protocol_of(os.environ)
    click.echo(f"carpool: --show: {why}: pictures are only written", err=True)
    return None


def _update_bar(move: AdvanceBar, previews: Previews | None, i: int, event: Event) -> None:
    """Update the bar of a request for an event."""
    if event.kind == "preview" and previews is not None:
        from carpool.worker.encoding import image_of
        from carpool.worker.protocol import Picture

        height, width, _ = event.picture.shape
        previews[i] = image_of(Picture(width, height, event.picture.tobytes()))
    if event.kind == "step":
        move(i, min(event.step / max(event.steps, 1), 0.99))  # decoding follows
    elif event.kind in ("started", "finished"):
        move(i, float(event.kind == "finished"))


def _on_server(url: str, api_key: str | None, options: _Options) -> None:
    """Draw on a server, and write the files."""
    from carpool.cli import remote
    from carpool.media import read_picture
    from carpool.media.inputs import transparent_mask

    images, mask, model = options.images, options.mask, options.model
    with closing(ServerClient(url, api_key)) as server:
        kind = remote.makes(server, model or None)
        output = output_for(kind, options.output, options.fps)
        body = _body_for(kind, output, options) | ({"model": model} if model else {})
        read = [remote.data_url(remote.read(path), path.name) for path in images]
        painted = None if mask is None else transparent_mask(remote.read(mask))
        results = remote.draw(
            server, options.prompts, body, kind=kind, images=read,
            mask=None if painted is None else remote.data_url(painted, "mask.png"),
            are_shown=options.shown is not None,
        )  # fmt: skip
        count = len(options.prompts) * options.n
        paths: set[Path] = set()
        for item in results:
            path = path_of(output, item.place, count, item.seed, item.prompt, paths)
            ended_s, begun_s = item.job.get("completed_at"), item.job.get("created_at")
            took_s = None if ended_s is None or begun_s is None else float(ended_s - begun_s)
            with reported(path, item.seed, took_s):
                path.write_bytes(item.content)
            facts = {"prompt": item.prompt, "seed": item.seed, "job": item.job["id"]}
            picture = None
            if options.shown is not None and kind in ("pictures", "videos"):
                picture = read_picture(BytesIO(item.thumbnail or item.content))
            _report(options, path, facts, item.job.get("warnings") or (), picture)


def _body_for(kind: str, output: Path, options: _Options) -> dict[str, Any]:
    """The body that all requests to a server share, for pictures or videos."""
    body = options.parameters | ({} if options.seed is None else {"seed": options.seed})
    if kind == "pictures":
        if options.mask is not None and not options.images:
            raise click.UsageError("--mask marks where to redraw --image: give --image too")
        return {"n": options.n, **body, "output_format": FORMATS[output.suffix.lower()]}
    if options.n != 1:
        rule = f"a server makes one output of a prompt where the model makes {kind}"
        raise click.UsageError(f"--n: {rule}; repeat the prompt")
    if options.mask is not None or len(options.images) > 1:
        raise click.UsageError(f"a server's {kind} begin with one --image, and no --mask")
    if kind != "videos":
        return body | {"output_format": output.suffix.lower()[1:]}
    return body if options.fps is None else body | {"fps": options.fps}


def pairs(texts: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Parse names and values of `-p NAME=VALUE`."""
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--parameter {text!r}: write NAME=VALUE")
        if name in _NOT_PARAMETERS:
            raise click.UsageError(f"--parameter {name}: {_NOT_PARAMETERS[name]}")
        try:
            yield name, jsonfile.loads(value)
        except ValueError:
            yield name, value


def sides(size: str | None) -> dict[str, int]:
    if size is None:
        return {}
    width, _, height = size.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise click.UsageError(f"--size {size!r}: write WIDTHxHEIGHT, such as 1024x1024")
    return {"width": int(width), "height": int(height)}
