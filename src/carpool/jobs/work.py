"""The work of a job: its requests, stored in its record and restored for each run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from carpool.errors import DeadlineExceeded, ModelNotFound, StoreFailed
from carpool.jobs.database import Record
from carpool.types import CheckedRequest, new_request_id

Stored = Callable[[str], bytes | None]
"""Returns the content of a job's stored file by name; None if missing."""

Reader = Callable[[bytes, Any], Any]
"""Decodes a stored picture from its file and mode, as `media.inputs.unpacked`. Slow."""


def work_of(
    model: str,
    requests: Sequence[CheckedRequest],
    inputs: Mapping[str, Any] | None = None,
    **output: Any,
) -> dict[str, Any]:
    """The work of a record: its engine requests, and the options of its file writer.

    Args:
        inputs: file names and modes of stored pictures, by pipeline argument; all requests share
            them.
    """
    files = inputs or {}
    rest = [{n: v for n, v in r.arguments.items() if n not in files} for r in requests]
    plain = [asdict(replace(r, arguments=a)) for r, a in zip(requests, rest, strict=True)]
    work = {"model": model, "jobs": plain, "output": output}
    return work | ({"inputs": files} if files else {})


def requests_of(
    record: Record,
    model: str | Collection[str],
    stored: Stored,
    read: Reader | None,
    uptime_s: float,
) -> list[CheckedRequest]:
    """Restore the requests of a record for a run, with new ids and the remaining time. Slow.

    Args:
        model: the name or names of the served models.
        read: decodes stored pictures; None: the job has none.
        uptime_s: current uptime of the store.

    Raises:
        StoreFailed: the record or a picture is unreadable.
        ModelNotFound: the job was accepted for another model.
        DeadlineExceeded: its time has run out.
    """
    try:
        name = record.work["model"]
        parts = [CheckedRequest(**part) for part in record.work["jobs"]]
    except (KeyError, TypeError):
        raise StoreFailed("the job was stored, but cannot be read any more") from None
    served = [model] if isinstance(model, str) else list(model)
    if name not in served:
        names = ", ".join(map(repr, served))
        problem = f"the job needs model {name!r}, and the server now runs {names}"
        raise ModelNotFound(problem, param="model")
    pictures = {
        argument: _pictures(files, stored, read)
        for argument, files in record.work.get("inputs", {}).items()
    }
    waited_s = uptime_s - record.created_up_s
    return [
        replace(
            part,
            request_id=new_request_id(),
            model=name,
            arguments={**part.arguments, **pictures},
            timeout_s=_left(part.timeout_s, waited_s),
            lora=tuple((str(name), float(scale)) for name, scale in part.lora),
        )
        for part in parts
    ]


def _pictures(files: Any, stored: Stored, read: Reader | None) -> Any:
    """Restore the pictures of an argument, as passed to `media.inputs.packed`."""
    if isinstance(files, dict):
        return [
            _pictures(file if isinstance(file, dict) else [file], stored, read)
            for file in files["list"]
        ]
    contents = [(stored(name), mode) for name, mode in files]
    if read is None or any(content is None for content, _ in contents):
        raise StoreFailed("the job was stored, but its pictures cannot be read any more")
    pictures = [read(content, mode) for content, mode in contents if content is not None]
    return pictures if len(pictures) > 1 else pictures[0]


def _left(timeout_s: float | None, waited_s: float) -> float | None:
    if timeout_s is not None and timeout_s <= waited_s:
        raise DeadlineExceeded(f"timeout_s={timeout_s} ran out before the job was run")
    return None if timeout_s is None else timeout_s - waited_s
