"""The work of a job: requests as they are stored in its record, and read again for each run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from carpool.errors import DeadlineExceeded, ModelNotFound, StoreFailed
from carpool.jobs.database import Record
from carpool.types import CheckedRequest, new_request_id

Stored = Callable[[str], bytes | None]
"""The content of a job's stored file by its name; None if there is none."""

Reader = Callable[[bytes, Any], Any]
"""Decodes a stored picture, given its file and mode, as `media.inputs.unpacked` does. Slow."""


def work_of(
    model: str,
    requests: Sequence[CheckedRequest],
    inputs: Mapping[str, Any] | None = None,
    **output: Any,
) -> dict[str, Any]:
    """The work of a record: what the engine runs, and how its outputs are written.

    Args:
        inputs: by argument of the pipeline the file names and modes of stored pictures; all
            requests have the same.
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
    """The requests of a record for this run: with new ids and the time that is left. Slow.

    Args:
        model: what the workers run: a name, or several.
        read: decodes stored pictures; None: there should be none.
        uptime_s: the store's, just now.

    Raises:
        StoreFailed: the record or a picture cannot be read any more.
        ModelNotFound: it was accepted for another model.
        DeadlineExceeded: its time is over.
    """
    try:
        name = record.work["model"]
        parts = [CheckedRequest(**part) for part in record.work["jobs"]]
    except (KeyError, TypeError):
        raise StoreFailed("the job was stored, but cannot be read any more") from None
    served = [model] if isinstance(model, str) else list(model)
    if name not in served:
        names = ", ".join(map(repr, served))
        problem = f"the job wants model {name!r}, and the server runs {names} by now"
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
    """The pictures of an argument, as `media.inputs.packed` was given them."""
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
