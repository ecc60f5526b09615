"""The models of a server with their devices, from the command line or a file."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from carpool.config import EngineSettings, ServeSettings
from carpool.errors import SettingRejected, nearest
from carpool.fleet.autoscaler import Scale
from carpool.models.published import name_of
from carpool.models.source import find
from carpool.settings.batching_mode import with_mode

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")
_MODEL_KEYS = ("model", "name", "workers", "devices", "load", "keep_alive")
LOADS = ("start", "on_demand")
_OF_SCALE = ("scale_up_wait", "scale_down_after")
_OF_RAY = (
    "fleet_name", "workers_per_node", "gpus_per_worker", "worker_keep_alive", "fleet_cert",
    "fleet_key",
)  # fmt: skip
_NEEDED = dict.fromkeys(_OF_SCALE, "max_workers") | dict.fromkeys(_OF_RAY, "ray")
"""The setting without which another one has no effect."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a server."""

    model: str
    settings: EngineSettings
    name: str  # name in requests; empty: its own id
    devices: tuple[str, ...]  # one for each possible worker
    factory: str | None = None  # builds the pipeline, as `module:function`
    is_on_demand: bool = False
    keep_alive_s: float = float("inf")
    workers: int | None = None  # initial number; None: one for each device
    scale: Scale | None = None  # bounds for scaling with the load


def models_of(
    models: Sequence[str], settings: ServeSettings, factory: str | None = None
) -> list[ModelSpec]:
    """The models of a command line, each `MODEL` or `NAME=MODEL`.

    Raises:
        SettingRejected: two models have one name, or devices and workers do not match.
        LoadFailed: a model does not exist.
    """
    workers, scale = _workers(settings, settings.workers)
    count = scale.high if scale else workers
    devices = _devices(settings, settings.device, count, None, settings.context_parallel)
    specs = []
    for text in models:
        named = None if Path(text).exists() else _NAMED.fullmatch(text)
        name, model = (named[1], named[2]) if named else ("", text)
        name = name or ("" if len(models) == 1 else _id(model))
        spec = ModelSpec(model, settings.engine(), name, devices, factory)
        specs.append(replace(spec, workers=workers, scale=scale))
    return _checked(specs, settings)


def listed_models(entries: Any, settings: ServeSettings, path: str) -> list[ModelSpec]:
    """The models of a file: the entries under its `models:`.

    Raises:
        SettingRejected: an entry breaks a rule.
        LoadFailed: a model does not exist.
    """
    if not isinstance(entries, list) or not entries:
        raise SettingRejected(f"config={path!r}: write `models:` and a list of models")
    return _checked([_spec(entry, settings, path) for entry in entries], settings)


def _spec(entry: Any, settings: ServeSettings, path: str) -> ModelSpec:
    entry = {"model": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        raise SettingRejected(f"config={path!r}: every model needs `model:`, as in `model: shapes`")
    names = [*_MODEL_KEYS, *(field.name for field in fields(EngineSettings))]
    for key in entry:
        if key not in names:
            hint = nearest(str(key), names)
            raise SettingRejected(f"config={path!r}: unknown setting {key!r}{hint}")
    overrides = {key: value for key, value in entry.items() if key not in _MODEL_KEYS}
    overrides = {key: tuple(v) if isinstance(v, list) else v for key, v in overrides.items()}
    engine = settings.engine()
    values = {field.name: getattr(engine, field.name) for field in fields(EngineSettings)}
    model_settings = EngineSettings(**with_mode(values | overrides))
    load, keep_alive = entry.get("load", "start"), entry.get("keep_alive", float("inf"))
    if load not in LOADS:
        raise SettingRejected(f"config={path!r}: load={load!r}: must be of {', '.join(LOADS)}")
    is_number = isinstance(keep_alive, (int, float)) and not isinstance(keep_alive, bool)
    if not is_number or not keep_alive >= 0:  # refuses NaN, too
        raise SettingRejected(f"config={path!r}: keep_alive={keep_alive!r}: must be seconds")
    count, devices = entry.get("workers", settings.workers), entry.get("devices", settings.devices)
    devices = ",".join(map(str, devices)) if isinstance(devices, list) else devices
    if count is not None and (type(count) is not int or not 1 <= count <= 1024):
        raise SettingRejected(f"config={path!r}: workers={count!r}: must be a whole number from 1")
    workers, scale = _workers(settings, count)
    places, ranks = scale.high if scale else workers, model_settings.context_parallel
    return ModelSpec(
        entry["model"], model_settings, str(entry.get("name") or _id(entry["model"])),
        _devices(settings, model_settings.device, places, devices, ranks),
        is_on_demand=load == "on_demand", keep_alive_s=float(keep_alive),
        workers=workers, scale=scale,
    )  # fmt: skip


def _workers(settings: ServeSettings, workers: int | None) -> tuple[int | None, Scale | None]:
    """The initial number of workers, and the bounds for scaling with the load."""
    low, high = settings.min_workers, settings.max_workers
    if low is None and high is None:
        return workers, None
    low = low or 1
    if high is None:
        raise SettingRejected(f"min_workers={low}: needs max_workers, the most that there may be")
    if not low <= (workers or low) <= high:
        text = "" if workers is None else f"workers={workers}, "
        rule = "must not decrease in the order min_workers, workers, max_workers"
        raise SettingRejected(f"{text}min_workers={low}, max_workers={high}: {rule}")
    return workers or low, Scale(low, high, settings.scale_up_wait, settings.scale_down_after)


def _devices(
    settings: ServeSettings, device: str, workers: int | None, devices: str | None, ranks: int
) -> tuple[str, ...]:
    """Like `devices_of`; with Ray, every worker uses the devices that Ray assigns."""
    devices = devices or settings.devices
    if settings.ray is None:
        return devices_of(device, workers, devices, ranks)
    if devices is not None:
        raise SettingRejected(f"devices={devices!r}: with ray each worker takes what Ray gives it")
    if ranks > 1 and device not in ("auto", "cpu", "cuda", "xpu"):
        rule = f"with ray a group takes the {ranks} devices that Ray gives it"
        raise SettingRejected(f"device={device!r}: {rule}: say auto, cuda, xpu or cpu")
    return (device,) * (workers or 1)


def _checked(specs: Sequence[ModelSpec], settings: ServeSettings) -> list[ModelSpec]:
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            rule = "give one of them another, as NAME=MODEL"
            raise SettingRejected(f"two models have the name {name!r}: {rule}")
    if len(specs) > 1 and settings.served_model_name:
        rule = f"there are {len(specs)} models: name each, as NAME=MODEL"
        raise SettingRejected(f"served_model_name={settings.served_model_name!r}: {rule}")
    if settings.ray is not None and settings.worker_python is not None:
        rule = "with ray the environment of its nodes runs the workers: leave it out"
        raise SettingRejected(f"worker_python={settings.worker_python!r}: {rule}")
    for field in fields(settings):
        value, needed = getattr(settings, field.name), _NEEDED.get(field.name)
        if needed and getattr(settings, needed) is None and value != field.default:
            raise SettingRejected(f"{field.name}={value!r}: does nothing without {needed}")
    if settings.served_model_name:
        specs = [replace(spec, name=settings.served_model_name) for spec in specs]
    at_start = sum(not spec.is_on_demand for spec in specs)
    places = at_start + (at_start < len(specs))  # at least one place for on-demand models
    if settings.max_loaded is not None and settings.max_loaded < places:
        raise SettingRejected(
            f"max_loaded={settings.max_loaded}: {at_start} of the {len(specs)} models are loaded "
            f"at the start, so it is {places} at least, or more of them say load: on_demand"
        )
    return list(specs)


def _id(model: str) -> str:
    """The default name of a model."""
    if (name := name_of(model)) is not None:
        return name
    source, card = find(model)
    return str(card.get("id") or source)


def devices_of(
    device: str, workers: int | None, devices: str | None, ranks: int = 1
) -> tuple[str, ...]:
    """The device of each worker; the devices of a group are joined by `+`.

    Args:
        device: for all workers, if `devices` is None; `auto` and `cuda` use all devices in turn.
        devices: comma-separated.
        ranks: processes per worker, each with its own device; on a CPU they share it.

    Raises:
        SettingRejected: the arguments do not match.
    """
    if devices is not None:
        named = tuple(name.strip() for name in devices.split(","))
        if not all(re.fullmatch(r"cpu(:0)?|(cuda|xpu)(:[0-9]{1,3})?", name) for name in named):
            rule = "write devices by commas, as cuda:0,cuda:1, xpu:0,xpu:1 or cpu,cpu"
            raise SettingRejected(f"devices={devices!r}: {rule}")
        if ranks > 1 and not all(name.startswith("cpu") for name in named):
            if len(named) % ranks or len(set(named)) < len(named):
                raise SettingRejected(
                    f"devices={devices!r}: context_parallel={ranks} takes {ranks} different "
                    f"devices a worker, and here are {len(set(named))}"
                )
            named = _joined(named, ranks)
        if workers is not None and workers % len(named):
            problem = f"cannot be divided among {len(named)} devices ({devices})"
            raise SettingRejected(f"workers={workers} {problem}")
        return named * ((workers or len(named)) // len(named))
    count = workers or 1
    if ranks > 1:
        return _groups(device, count, ranks)
    if count == 1 or device not in ("auto", "cuda"):
        return (device,) * count
    there = cuda_devices(os.environ)
    if not there:
        return (device,) * count
    return tuple(f"cuda:{number % there}" for number in range(count))


def _groups(device: str, count: int, ranks: int) -> tuple[str, ...]:
    """The devices of workers that are groups, if `devices` is not set."""
    if re.fullmatch(r"(cuda|xpu):[0-9]+", device):
        rule = f"context_parallel={ranks} takes {ranks} devices a worker"
        raise SettingRejected(f"device={device!r}: {rule}: say them, as --devices cuda:0,cuda:1")
    there = cuda_devices(os.environ) if device in ("auto", "cuda") else 0
    if not there:
        if "+" in device and count > 1:
            raise SettingRejected(f"device={device!r}: is of one worker, and there are {count}")
        return (device,) * count
    if there < count * ranks:
        raise SettingRejected(
            f"context_parallel={ranks}: {count} {'workers take' if count > 1 else 'worker takes'} "
            f"{count * ranks} devices, and this machine has {there}"
        )
    return _joined([f"cuda:{number}" for number in range(count * ranks)], ranks)


def _joined(devices: Sequence[str], ranks: int) -> tuple[str, ...]:
    groups = range(0, len(devices), ranks)
    return tuple("+".join(devices[first : first + ranks]) for first in groups)


def cuda_devices(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Count the CUDA or ROCm devices that workers can see, without importing torch.

    AMD devices are the nodes of the kernel driver's topology with a GPU id.

    Args:
        root: root of the file system.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if (visible := environ.get(name)) is not None:
            return sum(device.strip() not in ("", "-1") for device in visible.split(","))
    nvidia = len(list((root / "dev").glob("nvidia[0-9]*")))
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return nvidia or sum(_is_gpu(node) for node in nodes)


def _is_gpu(node: Path) -> bool:
    try:
        return node.read_text().strip() not in ("", "0")
    except OSError:  # a device that this container lacks
        return False


def settings_on(spec: ModelSpec, device: str) -> EngineSettings:
    """The settings of one of the model's workers."""
    return replace(spec.settings, device=device)
