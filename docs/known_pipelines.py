"""The status of every pipeline class in diffusers, for `docs/models.md`.

Rows of the matrix (`models/proof.json`) and tests (`known_pipelines.json`) prove classes.
`sharing.json` has the measurements of `make sharing`, and `sharing_reasons.json` the reasons why
classes share fewer than two requests a forward. `tried_pipelines.json` has the results of
`make test-diffusers`, and `untried_pipelines.json` the reasons for missing results. The types of a
class's arguments show how its denoiser fuses.
"""

import inspect
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import diffusers
from diffusers.utils.import_utils import DummyObject
from torch import nn

from carpool.engine.specs import SPECS
from carpool.models.grid import proof, short

FROM_TESTS = Path(__file__).parent / "known_pipelines.json"
TRIED = Path(__file__).parent / "tried_pipelines.json"
UNTRIED = Path(__file__).parent / "untried_pipelines.json"
SHARING = Path(__file__).parent / "sharing.json"
REASONS = Path(__file__).parent / "sharing_reasons.json"
MEANING = {
    "proven": "requests that run together equal plain diffusers, in the named rows of the matrix "
    "or the named test",
    "proven by inference": "the same; a denoiser without a table fuses after its proof at run time",
    "proven, alone": "the same; its denoiser runs alone",
    "exclusive": "the same; a request that changes a shared component has it to itself",
    "tried": "with tiny models of diffusers' own tests (`make test-diffusers`), five requests "
    "beside cancelled and failing ones equal plain diffusers, bit for bit in `exact`, and the "
    "pipeline is restored; listed: difference in `fast` (of values up to one), most requests in a "
    "forward",
    "refused": "it cannot be loaded",
    "untested": "no test runs it, for the listed reason; it is not refused, and "
    "`carpool check MODEL` tests it",
}
BASES = ("DiffusionPipeline", "ModularPipeline")
DENOISERS = ("transformer", "unet", "image_unet", "prior", "decoder", "denoiser", "dit")


@dataclass(frozen=True, slots=True)
class Status:
    """One pipeline class."""

    pipeline: str
    known: str  # a key of `MEANING`
    how: str  # the rows or the test that prove it, or the reason
    denoisers: str  # "transformer: table"

    @property
    def shares(self) -> str:
        """Requests per forward of each denoiser with six requests, and why they are below two."""
        entry = sharing().get(self.pipeline, {"requests_per_forward": {}})
        widths = ", ".join(f"{n} {width}" for n, width in entry["requests_per_forward"].items())
        reason = reasons().get(self.pipeline)
        return f"{widths}: {reason}" if reason else widths


def names() -> list[str]:
    """All pipeline classes that diffusers exports, even if their libraries are missing."""
    exported = {name: getattr(diffusers, name) for name in dir(diffusers) if name not in BASES}
    return [name for name, value in exported.items() if _is_pipeline(name, value)]


def _is_pipeline(name: str, value: Any) -> bool:
    if isinstance(value, DummyObject):  # its library is missing
        return "Pipeline" in name
    bases = tuple(getattr(diffusers, base) for base in BASES)
    return isinstance(value, type) and issubclass(value, bases)


def everything() -> list[Status]:
    """The status of each class, sorted by name."""
    return [_status(name) for name in sorted(names())]


def from_tests() -> dict[str, dict[str, str]]:
    """Read `known_pipelines.json`, by class: `known`, `test`, `why`."""
    return {entry["pipeline"]: entry for entry in json.loads(FROM_TESTS.read_text())}


def tried() -> dict[str, dict[str, Any]]:
    """Results of `make test-diffusers`, by class; all were equal in exact numerics."""
    known: dict[str, dict[str, Any]] = json.loads(TRIED.read_text())
    return known


def sharing() -> dict[str, Any]:
    """Measurements of `make sharing`, by class."""
    measured: dict[str, Any] = json.loads(SHARING.read_text())
    return measured


def reasons() -> dict[str, str]:
    """Reasons why classes share fewer than two requests a forward, by class."""
    by_class: dict[str, str] = json.loads(REASONS.read_text())
    return by_class


def untried() -> dict[str, str]:
    """Reasons why no test runs a class, by class."""
    reasons: dict[str, str] = json.loads(UNTRIED.read_text())
    return reasons


def _status(name: str) -> Status:
    cls = getattr(diffusers, name)
    if missing := sorted({*getattr(cls, "_backends", ())} - {"torch", "transformers"}):
        return Status(name, "refused", f"needs {', '.join(missing)}, not installed here", "")
    if not isinstance(cls.__call__, FunctionType):
        return Status(name, "refused", "it has no `__call__`, but a method for each task", "")
    denoisers = ", ".join(_denoisers(cls))
    tested = from_tests().get(name)
    rows = sorted(row for row, entry in proof().items() if entry["pipeline"] == name)
    if rows:
        return Status(name, "proven", ", ".join(rows), denoisers)
    if tested is None and (result := tried().get(name)) is not None:
        widths = ", ".join(f"{short(method)} {n}" for method, n in result["widths"].items())
        vague = "" if result["is_told_apart"] else "; its answers hardly depend on what is asked"
        return Status(name, "tried", f"{result['fast']:.0e}; {widths}{vague}", denoisers)
    if tested is not None:
        file, _, test = tested["test"].partition("::")
        how = f"{tested['why']}{'; ' * bool(tested['why'])}`{Path(file).name}`: {test}"
        return Status(name, tested["known"], how, denoisers)
    return Status(name, "untested", untried().get(name, ""), denoisers)


def _denoisers(cls: type) -> Iterator[str]:
    for name, annotation in _components(cls).items():
        if not name.startswith(DENOISERS) or "encoder" in name:
            continue
        classes = [kind for kind in _classes(annotation) if issubclass(kind, nn.Module)]
        if classes:
            by_table = any((kind.__name__, "forward") in SPECS for kind in classes)
            yield f"{name}: {'table' if by_table else 'inferred'}"


def _components(cls: Any) -> dict[str, Any]:
    """The types of a pipeline's components by name."""
    if issubclass(cls, diffusers.ModularPipeline):
        return {part.name: part.type_hint for part in cls().blocks.expected_components}
    try:
        return typing.get_type_hints(cls.__init__)
    except NameError:  # its library is missing
        parameters = inspect.signature(cls.__init__).parameters
        return {name: parameter.annotation for name, parameter in parameters.items()}


def _classes(annotation: Any) -> list[type]:
    """The classes of an annotation; a union has several."""
    arguments = typing.get_args(annotation) or (annotation,)
    return [argument for argument in arguments if isinstance(argument, type)]
