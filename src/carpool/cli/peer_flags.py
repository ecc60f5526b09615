"""Flags of `sglang serve` and `vllm serve --omni`: their commands run unchanged.

Each flag is mapped to a setting, or ignored with a message of one line, or, if Carpool lacks its
feature, refused with an alternative.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import click

from carpool.cli.options import Command, GroupedHelp

RENAMED = {
    "dynamic_batch_max_size": ("batching_max_size", int),
    "dynamic_batch_delay_ms": ("batching_delay_ms", float),
    "dp_size": ("workers", int),
    "data_parallel_size": ("workers", int),
}
ONE_DEVICE = ("tp_size", "tensor_parallel_size", "cfg_parallel_size")
SEQUENCE_PARALLEL = {"ulysses_degree": "ulysses", "ring_degree": "ring", "sp_degree": "ulysses"}
PASSED_OVER = {
    **dict.fromkeys(
        (
            "dit_layerwise_offload", "dit_cpu_offload", "text_encoder_cpu_offload",
            "image_encoder_cpu_offload", "vae_cpu_offload", "enable_cpu_offload",
            "enable_layerwise_offload",
        ),
        "--memory 20GiB streams what does not fit the device",
    ),
    "pin_cpu_memory": "Carpool decides this itself",
    "sleep_on_idle": "an idle engine always sleeps",
    "async_output_save": "pictures are always written while the next forward runs",
    "enable_metrics": "/metrics is always available",
    "trust_remote_code": "code from checkpoints never runs",
    "enforce_eager": "forwards are always eager",
}  # fmt: skip
SWITCHES = ("omni", "step_execution")
SWITCH_VALUES = ("true", "false", "1", "0")


class PeerFlagsCommand(GroupedHelp):
    """A command whose ignored flags may have a value or not."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_values(args))


def _with_values(args: Sequence[str]) -> list[str]:
    """Add `true` after an ignored flag without a value, so that MODEL is not its value."""
    flags = {f"--{name.replace('_', '-')}" for name in PASSED_OVER}
    return [
        f"{arg}=true" if arg in flags and after.lower() not in SWITCH_VALUES else arg
        for arg, after in pairwise([*args, ""])
    ]


def peer_options(command: Command) -> Command:
    """Add the flags; `--help` does not show them."""
    for name, (_, kind) in RENAMED.items():
        command = _option(name, type=kind)(command)
    for name in ("num_gpus", *ONE_DEVICE, *SEQUENCE_PARALLEL):
        command = _option(name, type=int)(command)
    for name in PASSED_OVER:
        command = _option(name)(command)
    for name in SWITCHES:
        command = _option(name, is_flag=True, default=None)(command)
    return _option("backend")(_option("stage_overrides")(command))


def _option(name: str, **how: Any) -> Callable[[Command], Command]:
    return click.option(f"--{name.replace('_', '-')}", hidden=True, **how)


def translated(flags: dict[str, Any]) -> dict[str, Any]:
    """Replace the peers' flags by settings.

    Raises:
        UsageError: Carpool lacks the feature of a flag.
    """
    translation = dict(flags)
    for name, (setting, _) in RENAMED.items():
        _rename(translation, name, setting, translation.pop(name))
    for name in ONE_DEVICE:
        _one_device(name, translation.pop(name))
    _sequence_parallel(translation)
    devices = (translation["context_parallel"] or 1) * (translation["workers"] or 1)
    if (count := translation.pop("num_gpus")) != devices:
        _one_device("num_gpus", count)
    for name, why in PASSED_OVER.items():
        if str(translation.pop(name) or "false").lower() not in ("false", "0"):
            click.echo(f"carpool: --{name.replace('_', '-')} is ignored: {why}", err=True)
    backend = translation.pop("backend")
    if backend not in (None, "auto", "diffusers"):
        click.echo(f"carpool: --backend {backend} is ignored: diffusers is the only one", err=True)
    translation.pop("omni")
    if translation.pop("step_execution"):
        _rename(translation, "step_execution", "batching_mode", "continuous")
        _rename(translation, "max_num_seqs", "max_running", translation.pop("max_num_seqs"))
        translation["max_num_seqs"] = None
    return translation


def _one_device(name: str, count: int | None) -> None:
    if count not in (None, 1):
        whole = f"--workers {count} puts a worker with the whole model on each of {count}"
        parts = f"--context-parallel {count} has them compute each request together"
        flag = f"--{name.replace('_', '-')} {count}"
        raise click.UsageError(f"{flag}: here weights are on one device; {whole}, {parts}")


def _sequence_parallel(flags: dict[str, Any]) -> None:
    """Convert the degrees of sequence parallelism to `context_parallel` and its kind."""
    degrees = {name: flags.pop(name) for name in SEQUENCE_PARALLEL}
    explicit = {name: degree for name, degree in degrees.items() if degree not in (None, 1)}
    if {"ulysses_degree", "ring_degree"} <= explicit.keys():
        pair = "--ulysses-degree {ulysses_degree} and --ring-degree {ring_degree}"
        rule = "devices share a sequence in one of the two ways: say one"
        raise click.UsageError(f"{pair.format_map(explicit)}: {rule}")
    for name, degree in explicit.items():
        _rename(flags, name, "context_parallel", degree)
        if name != "sp_degree":  # sp_degree does not set the kind
            _rename(flags, name, "context_parallel_kind", SEQUENCE_PARALLEL[name])


def _rename(flags: dict[str, Any], name: str, setting: str, value: Any) -> None:
    """Set a setting from a flag, unless the setting's own flag has another value."""
    if value is None:
        return
    if flags[setting] not in (None, value):
        pair = f"--{name} {value} and --{setting} {flags[setting]}".replace("_", "-")
        raise click.UsageError(f"{pair} are the same setting: say one")
    flags[setting] = value
