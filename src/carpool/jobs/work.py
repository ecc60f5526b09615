"""What a job's record says of its work: written as it is accepted, read whenever it is run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from carpool.errors import DeadlineExceeded, ModelNotFound, StoreFailed
from carpool.jobs.database import Record
from carpool.types import CheckedRequest, new_request_id

Stored = Callable[[str], bytes | None]
"""The content of a job's stored file by its name; None if there is none."""

Reader = Callable[[bytes, Any], Any]
"""Makes a picture of a stored file and its mode, as `media.inputs.unpacked` does. On a thread."""


def work_of(
    model: str,
    jobs: Sequence[CheckedRequest],
    inputs: Mapping[str, Any] | None = None,
    **output: Any,
) -> dict[str, Any]:
    """The work of a record: what the engine runs, and what is made of its outputs.

    Args:
        inputs: by argument of the pipeline the names and modes of stored pictures; all jobs
            have the same.
    """
    given = inputs or {}
    plain = [
        replace(job, arguments={n: v for n, v in job.arguments.items() if n not in given})
        for job in jobs
    ]
    work = {"model": model, "jobs": [asdict(job) for job in plain], "output": output}
    return work | ({"inputs": given} if given else {})


def parts_of(
    record: Record, model: str, stored: Stored, read: Reader | None, uptime_s: float
) -> list[CheckedRequest]:
    """The jobs of a record as they are run this time. May wait for the disk.

    Args:
        model: what the worker runs.
        read: reads stored pictures; None: there should be none.
        uptime_s: the store's, just now.

    Raises:
        StoreFailed: the record or a picture cannot be read any more.
        ModelNotFound: it was accepted for another model.
        DeadlineExceeded: its time is over.
    """
    try:
        wanted, jobs = record.work["model"], [CheckedRequest(**job) for job in record.work["jobs"]]
    except (KeyError, TypeError):
        raise StoreFailed("the job was stored, but cannot be read any more") from None
    if wanted != model:
        told = f"the job wants model {wanted!r}, and the server runs {model!r} by now"
        raise ModelNotFound(told, param="model")
    pictures: dict[str, Any] = {}
    for argument, files in record.work.get("inputs", {}).items():
        contents = [(stored(name), mode) for name, mode in files]
        if read is None or any(content is None for content, _ in contents):
            raise StoreFailed("the job was stored, but its pictures cannot be read any more")
        found = [read(content, mode) for content, mode in contents if content is not None]
        pictures[argument] = found if len(found) > 1 else found[0]
    waited_s = uptime_s - record.created_up_s
    return [_now(job, waited_s, pictures) for job in jobs]


def _now(job: CheckedRequest, waited_s: float, pictures: Mapping[str, Any]) -> CheckedRequest:
    """A job under a name of its own, with the time that is left."""
    timeout_s = None if job.timeout_s is None else job.timeout_s - waited_s
    if timeout_s is not None and timeout_s <= 0:
        raise DeadlineExceeded(f"timeout_s={job.timeout_s} ran out before the job was run")
    return replace(
        job,
        request_id=new_request_id(),
        arguments={**job.arguments, **pictures},
        timeout_s=timeout_s,
        lora=tuple((str(name), float(scale)) for name, scale in job.lora),
    )
