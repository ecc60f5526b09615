"""`/v1/set_lora` and its companions: default adapters at run time, as SGLang's clients set them.

Here each request names its adapters. A default applies to requests of the same API key that name no
adapters, so no client changes the pictures of another client. Defaults last until the server stops;
jobs keep the adapters of their submission.
"""

import asyncio
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from carpool import errors
from carpool.request.adapter_names import adapter_id, find_adapter
from carpool.request.lora import SUFFIX, check_header, check_lora
from carpool.server.bodies import schema
from carpool.server.dependencies import AuthenticatedRoute, Context, router_of
from carpool.server.state import AppState, AuthenticatedRequest, ServedModel

PATIENCE_S, LOOK_S = 60.0, 0.05  # timeout of a new file in all workers; poll interval
MERGE_MODES = (None, "auto", "dynamic")

router = router_of(AuthenticatedRoute, "/v1")


class SetLora(BaseModel):
    """`POST /v1/set_lora`. Lists have equal lengths; a single value applies to all adapters."""

    model_config = ConfigDict(extra="forbid")

    lora_nickname: Any = Field(description="an adapter of `GET /v1/models`; or a list")
    lora_path: Any = Field(
        None, description="a new file in --lora-dir, NICKNAME.safetensors; it is read first"
    )
    strength: Any = schema.ours("number", "scale of the adapter; or a list")
    target: Any = Field(
        "all", description="all: the file's own target; one of two experts; or a list"
    )
    merge_mode: str | None = Field(None, description="auto or dynamic; nothing is merged")
    lora_alpha: Any = schema.ours("null", "ignored: the file's value applies")
    model: str | None = Field(None, description="a served model; default: the first")


class Unmerge(BaseModel):
    """`POST /v1/unmerge_lora_weights`."""

    model_config = ConfigDict(extra="forbid")

    target: str = Field("all", description="all")
    model: str | None = Field(None, description="a served model; default: the first")


class Applied(BaseModel):
    status: str = "ok"
    message: str


class LoadedAdapter(BaseModel):
    nickname: str = Field(description="its id")
    path: None = Field(default=None, description="always null: paths are not public")
    names: list[str] = Field([], description="other names for requests")
    target: str | None = Field(None, description="the expert that it changes, if there are two")
    warnings: list[str] = Field([], description="parts that are not applied")


class RefusedAdapter(BaseModel):
    """An adapter file that cannot be used."""

    nickname: str
    names: list[str] = []
    problem: str = Field(description="why it cannot be used")


class ActiveAdapter(BaseModel):
    """The default adapters of one API key."""

    nickname: str = Field(description="all, joined by commas")
    nicknames: list[str]
    path: None = None
    merged: bool = False
    mode: str = "unmerged"
    strength: float = Field(description="scale of the first")
    strengths: list[float]


class AdapterList(BaseModel):
    loaded_adapters: list[LoadedAdapter]
    refused_adapters: list[RefusedAdapter] = []
    active: dict[str, list[ActiveAdapter]] = Field(
        description="this API key's defaults by `target`; `transformer` if it has no target"
    )


@router.post("/set_lora")
async def set_lora(body: SetLora, context: Context) -> Applied:
    """Set the default adapters of this API key."""
    _check_key(context)
    if body.merge_mode not in MERGE_MODES:
        rule = "adapters are added row by row and never merged: send auto or dynamic"
        raise errors.UnsupportedParameter.of("merge_mode", body.merge_mode, rule)
    if body.lora_alpha is not None:
        rule = "is not supported: the adapter's file has it, leave it out"
        raise errors.UnsupportedParameter(f"lora_alpha {rule}", param="lora_alpha")
    names = body.lora_nickname if isinstance(body.lora_nickname, list) else [body.lora_nickname]
    if not names or not all(isinstance(name, str) for name in names):
        raise errors.InvalidValue.of(
            "lora_nickname", body.lora_nickname, "must be the name of an adapter, or a list of some"
        )
    paths = _each(body.lora_path, len(names), "lora_path")
    if not all(isinstance(path, str | None) for path in paths):
        raise errors.InvalidValue.of("lora_path", body.lora_path, "must be a file's name, or null")
    strengths = _each(1.0 if body.strength is None else body.strength, len(names), "strength")
    model = await _model(context, body.model)
    for name, path in zip(names, paths, strict=True):
        if path is not None:
            await _read(context.state, body.model, name, path)
    model = await _model(context, body.model)
    targets = _each(body.target, len(names), "target")
    _check_target(targets, {place for adapter in model.card.adapters for place in adapter.targets})
    entries = [
        {"id": name, "scale": scale} | ({} if target in (None, "all") else {"target": target})
        for name, scale, target in zip(names, strengths, targets, strict=True)
    ]
    try:
        check_lora(entries, model.card.lora, model.card.adapters)
    except errors.InvalidValue as error:
        raise errors.InvalidValue(error.message, param="lora_nickname") from None
    context.state.default_lora[model.id, context.client.owner] = entries
    text = ", ".join(f"{entry['id']} at {entry['scale']:g}" for entry in entries) or "none"
    return Applied(message=f"requests of this API key that name no adapters get: {text}")


@router.post("/unmerge_lora_weights")
async def unmerge_lora_weights(body: Unmerge, context: Context) -> Applied:
    """Remove the default adapters of this API key."""
    _check_key(context)
    _check_target(body.target)
    model = await _model(context, body.model)
    context.state.default_lora.pop((model.id, context.client.owner), None)
    return Applied(message="requests of this API key that name no adapters get none")


@router.get("/list_loras")
async def list_loras(context: Context, model: str | None = None) -> AdapterList:
    """List the adapters and this API key's defaults."""
    served = await _model(context, model)
    defaults = context.state.default_lora.get((served.id, context.client.owner), [])
    active = dict[str, list[ActiveAdapter]]()
    for target in dict.fromkeys(entry.get("target", "transformer") for entry in defaults):
        entries = [entry for entry in defaults if entry.get("target", "transformer") == target]
        names, scales = [entry["id"] for entry in entries], [entry["scale"] for entry in entries]
        adapter = ActiveAdapter(
            nickname=",".join(names), nicknames=names, strength=scales[0], strengths=scales
        )
        active[target] = [adapter]
    return AdapterList(
        loaded_adapters=[
            LoadedAdapter(
                nickname=name.id,
                names=list(name.names),
                target=name.target or None,
                warnings=list(name.warnings),
            )
            for name in served.card.usable_adapters
        ],
        refused_adapters=[
            RefusedAdapter(nickname=info.id, names=list(info.names), problem=info.problem)
            for info in served.card.adapters
            if info.problem
        ],
        active=active,
    )


async def _model(context: AuthenticatedRequest, name: str | None) -> ServedModel:
    model = await context.load(name, "loaded")
    model.check_name(name)
    return model


def _check_key(context: AuthenticatedRequest) -> None:
    if not context.client.key:
        rule = "set defaults only where the server has API keys (--api-key); name adapters in each "
        raise errors.KeyRequired(f"clients {rule}request: lora=[{{'id': NAME, 'scale': 1.0}}]")


def _check_target(targets: Any, experts: Collection[str] = ()) -> None:
    for target in targets if isinstance(targets, list) else [targets]:
        if target not in (None, "all", *experts):
            targets_text = " or ".join(("all", *sorted(experts)))
            rule = f"send {targets_text}, or leave it out"
            raise errors.UnsupportedParameter(
                f"target={errors.show(target)} is not supported: {rule}", param="target"
            )


def _each(value: Any, count: int, name: str) -> list[Any]:
    """Expand a value to one for each adapter."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        rule = f"must be {count}, as many as lora_nickname has"
        raise errors.InvalidValue(f"{name} has {len(value)} entries: {rule}", param=name)
    return value


async def _read(state: AppState, model: str | None, name: str, path: str) -> None:
    """Let all workers read the adapter folder; wait until each has the adapter.

    Raises:
        InvalidValue: the file is not in the folder, has another name, or cannot be read.
    """
    pool, ready = await state.fleet.loaded(model)
    if find_adapter(name, ready.card.usable_adapters) is not None:
        return  # a loaded name keeps its weights
    file = Path(path)
    if name not in (file.stem, adapter_id(file.stem)) or file.suffix.lower() != SUFFIX:
        raise errors.InvalidValue.of(
            "lora_path", path, f"the file must be named as the adapter, {name[:64]}{SUFFIX}"
        )
    place = await asyncio.to_thread(_in_folder, pool.lora_dir, file)
    if place is None:
        rule = "adapters are read from --lora and --lora-dir only"
        where = "put the file there" if pool.lora_dir else "start the server with --lora-dir"
        raise errors.InvalidValue.of("lora_path", path, f"{rule}: {where}")
    try:
        await asyncio.to_thread(check_header, place)
    except errors.LoraRejected as error:
        raise errors.InvalidValue(error.message, param="lora_path") from None
    except OSError as error:  # unreadable, or just removed
        why = f"{name}{SUFFIX} cannot be read: {errors.reason(error)}"
        raise errors.InvalidValue(why, param="lora_path") from None
    workers = {worker: worker.ready for worker in pool.handles}
    pool.reload()
    for _ in range(round(PATIENCE_S / LOOK_S)):
        if all(before is None or worker.ready is not before for worker, before in workers.items()):
            break  # each worker has answered
        await asyncio.sleep(LOOK_S)
    for worker in workers:
        if worker.ready is None:
            continue
        card = worker.ready.card
        if find_adapter(name, card.usable_adapters) is None:
            adapter = find_adapter(name, card.adapters)
            why = adapter.problem if adapter else "is no adapter of this model that can be read"
            raise errors.InvalidValue(f"{name}{SUFFIX}: {why}", param="lora_path")


def _in_folder(folder: str | None, file: Path) -> Path | None:
    """Find a file of the adapter folder, by its absolute path or its path in the folder."""
    if folder is None:
        return None
    place = Path(folder).expanduser().resolve()
    try:
        file = file.expanduser()
        target = file.resolve() if file.is_absolute() else Path(os.path.normpath(place / file))
        return target if target.is_relative_to(place) and target.is_file() else None
    except (OSError, ValueError, RuntimeError):  # too long, NUL, no such user, a loop of links
        return None
