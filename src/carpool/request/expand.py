"""What callers of the Python API say, as requests."""

from collections.abc import Iterator, Mapping
from typing import Any

from carpool.errors import InvalidValue
from carpool.request.parameters import seeds
from carpool.types import Request, new_request_id

MAX_N = 1000  # outputs of one request


def merged(request: Any, parameters: Mapping[str, Any]) -> Request:
    """A request with what it does not say itself taken from `parameters`."""
    if not isinstance(request, (Request, str)):
        kind = type(request).__name__
        raise InvalidValue(f"a request is a prompt or a carpool.Request, not a {kind}")
    if "prompt" in parameters:
        raise InvalidValue("the prompt is given twice: once is enough", param="prompt")
    if isinstance(request, str):
        return Request(request, **parameters)
    common = {"seed": None, "timeout_s": None, **parameters}
    seed, timeout_s = common.pop("seed"), common.pop("timeout_s")
    return Request(
        request.prompt,
        seed=seed if request.seed is None else request.seed,
        timeout_s=timeout_s if request.timeout_s is None else request.timeout_s,
        request_id=request.request_id,
        tenant=request.tenant,
        user=request.user,
        **{**common, **request.parameters},
    )


def repeated(request: Request, n: int) -> Iterator[Request]:
    """A request n times, with seeds s, s+1, ...; the first keeps the id."""
    for i, seed in enumerate(seeds(request.seed, n)):
        yield Request(
            request.prompt,
            seed=seed,
            timeout_s=request.timeout_s,
            request_id=request.request_id if i == 0 else new_request_id(),
            tenant=request.tenant,
            user=request.user,
            **request.parameters,
        )


def check_previews(count: Any) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        rule = "must be a whole number, 0 or above"
        raise InvalidValue(f"partial_images={count!r}: {rule}", param="partial_images")
    return count
