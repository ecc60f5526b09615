"""Convert the weights of a file to the names of a diffusers model; find those that do not fit.

Diffusers has a converter for each class. Converters use the names they know and drop the rest, so
each is run on tensors without memory that track the names of their sources: a name in the file that
reaches no weight of the model is left over.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from torch import Tensor, nn
from transformers import PreTrainedModel

from carpool.engine.model.renames import CONNECTORS, renaming_of
from carpool.engine.nested import leaves_in

PARTS = (
    *("model.diffusion_model.", "first_stage_model.", "vae.", "audio_vae.", "vocoder."),
    *("cond_stage_model.", "conditioner.embedders.", "text_encoders.", "control_model."),
    "connectors.",
)
"""Prefixes of the parts of a combined file; `model.diffusion_model.` is the denoiser."""
PREFIXES = ("", "model.diffusion_model.", "vae.", "audio_vae.", "net.")
"""Prefixes that some converters look for, tried in turn."""
HARMLESS = re.compile(
    r"(.*\.)?(position_ids|inv_freq)"  # computed from the configuration
    r"|(.*\.)?num_batches_tracked"  # counted in training
    r"|loss\..*"  # an autoencoder's training: its discriminator
    r"|model_ema\..*"  # running means of weights: diffusers reads the weights
    r"|(.*\.)?logit_scale"  # compares texts with images, and encodes neither
    r"|norm_final\.weight|pos_embed"  # unused in the original Lumina 2 and Z-Image; in Sana
    r"|(.*\.)?per_channel_statistics\.(channel|mean-of-stds).*"  # LTX's training
    r"|(alphas|betas|sqrt|posterior|log_one_minus)_?\w*|logvar|lvlb_weights|denoiser\.sigmas"
    r"|scale_factor|global_step"  # training; a scheduler computes its own
    r"|spiece_model|tekken_model|tokenizer_json"  # tokenizers, which pipelines have
)
"""Names that affect no image, and why."""
OTHER_HALVES = re.compile(
    r"(^|\.)(decoder|lm_head|vision_model|visual|visual_projection|text_projection|vision_tower"
    r"|multi_modal_projector)(?=\.)"
)
"""Other modules of whole models' files: an encoder's answer does not need them."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The fit of a file's weights to a model."""

    weights: dict[str, Tensor]  # keyed by the model's names
    missing: list[str] = field(default_factory=list)  # names of the model
    left_over: list[str] = field(default_factory=list)  # names of the file
    other_shapes: list[str] = field(default_factory=list)

    @property
    def distance(self) -> tuple[int, int, int]:
        """The numbers of names that do not fit, worst kind first."""
        return len(self.missing), len(self.other_shapes), len(self.left_over)

    @property
    def is_exact(self) -> bool:
        """Whether no weight is missing, left over, or of another shape."""
        return not any(self.distance)


class Misfit(ValueError):
    """Weights are missing, left over, or of another shape."""


class _Traced(Tensor):
    """A tensor without memory that tracks the names of its source tensors."""

    names: frozenset[str] = frozenset()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        names = frozenset[str]().union(*(part.names for part in leaves_in((args, kwargs), _Traced)))
        for part in leaves_in(result, _Traced):
            part.names = part.names | names
        return result


def _trace(name: str, weight: Tensor) -> _Traced:
    empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    traced: _Traced = empty.as_subclass(_Traced)
    traced.names = frozenset({name})
    return traced


def empty_model(cls: Any, config: Mapping[str, Any]) -> nn.Module:
    """A model of a diffusers class without memory for its weights."""
    with init_empty_weights():
        model: nn.Module = cls.from_config(dict(config))
    return model


def fit(weights: Mapping[str, Tensor], cls: Any, config: Mapping[str, Any]) -> Fit:
    """Fit weights of a file to a diffusers class, through its converter if needed.

    Args:
        weights: weights of the component, or of a file that holds it among others.
        config: the model's configuration.

    Raises:
        ValueError: they belong to a completely different model.
    """
    model = empty_model(cls, config)
    expected = model.state_dict()
    convert, views = converter_of(cls), [unwrapped(v, expected) for v in views_of(weights).values()]
    fits: list[tuple[Fit, Mapping[str, Tensor] | None]] = [
        (_checked(view, view, {name: frozenset({name}) for name in view}, expected), None)
        for view in views
        if len(expected.keys() & view.keys()) * 2 > len(expected)
    ]
    if convert is not None and not any(conversion.is_exact for conversion, _ in fits):
        fits += [trial for view in views for trial in _trials(view, convert, config, expected)]
    if not fits:
        raise ValueError(f"its weights are not those of a {cls.__name__}: it has {some(weights)}")
    match, source = min(fits, key=lambda trial: trial[0].distance)
    match = replace(match, left_over=left_over_of(match.left_over, model))
    if convert is None or source is None:
        return match
    converted = convert(config=dict(config), checkpoint=dict(source))
    return replace(match, weights=_usable(converted, expected))


def views_of(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The parts of a file by prefix, with the prefix removed; other weights under ""."""
    views: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        part = part_of(name)
        views.setdefault(part, {})[name.removeprefix(part)] = weight
    return views


def part_of(name: str) -> str:
    """The prefix of a name's part of a file; "" if it has none."""
    if CONNECTORS.match(name):  # under the prefix of the denoiser
        return "connectors."
    for prefix in PARTS:
        if name.startswith(prefix):
            extra_depth = {"conditioner.embedders.": 1, "text_encoders.": 1}.get(prefix, 0)
            depth = prefix.count(".") + extra_depth
            return ".".join(name.split(".")[:depth]) + "."
    return ""


def unwrapped(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove a prefix that all names of weights share and the model's names lack."""
    names = {name: name for name in weights if not is_harmless(name)}
    while len(heads := {new.partition(".")[:2] for new in names.values()}) == 1:
        prefix = "".join(*heads)
        if not prefix.endswith(".") or any(name.startswith(prefix) for name in expected):
            break
        names = {old: new.removeprefix(prefix) for old, new in names.items()}
    return {names.get(old, old): weight for old, weight in weights.items()}


def converter_of(cls: Any) -> Callable[..., Mapping[str, Tensor]] | None:
    """A class's converter of original names; None if there is none."""
    entries = SINGLE_FILE_LOADABLE_CLASSES.items()
    matches = (entry for name, entry in entries if issubclass(cls, getattr(diffusers, name)))
    return next((entry["checkpoint_mapping_fn"] for entry in matches), renaming_of(cls))


def _trials(
    weights: Mapping[str, Tensor],
    convert: Callable[..., Mapping[str, Tensor]],
    config: Mapping[str, Any],
    expected: Mapping[str, Tensor],
) -> Iterator[tuple[Fit, Mapping[str, Tensor]]]:
    """The fit of weights converted with each prefix, and the input of that conversion."""
    for prefix in PREFIXES:
        traced = {f"{prefix}{name}": _trace(name, weight) for name, weight in weights.items()}
        try:
            outputs = convert(config=dict(config), checkpoint=traced)
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError):
            continue  # names that the converter does not know
        origins = {name: part.names for name, part in outputs.items() if isinstance(part, _Traced)}
        if origins.keys() & expected.keys():
            real = {f"{prefix}{name}": weight for name, weight in weights.items()}
            yield _checked(weights, outputs, origins, expected), real


def _checked(
    weights: Mapping[str, Tensor],
    converted: Mapping[str, Tensor],
    origins: Mapping[str, frozenset[str]],
    expected: Mapping[str, Tensor],
) -> Fit:
    """Compare converted weights with the weights of a model."""
    usable = _usable(converted, expected)
    inputs = frozenset[str]().union(*(origins.get(name, ()) for name in usable))
    has_blocks = any(hasattr(weight, "quant_type") for weight in weights.values())
    return Fit(
        usable,
        sorted(expected.keys() - usable.keys()),
        [name for name in weights if name not in inputs and not is_harmless(name)],
        [
            f"{name} is {tuple(usable[name].shape)} and must be {tuple(weight.shape)}"
            for name, weight in expected.items()
            if name in usable and usable[name].shape != weight.shape and not has_blocks
        ],  # diffusers checks the shapes of GGUF blocks
    )


def _usable(converted: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that a model uses; missing training counters are added as zeros."""
    usable = {name: tensor for name in expected if (tensor := converted.get(name)) is not None}
    counters = [name for name in expected if name.endswith("num_batches_tracked")]
    return {name: torch.zeros((), dtype=torch.int64) for name in counters} | usable


def is_harmless(name: str) -> bool:
    """Whether a weight affects no image, whether or not the model has it."""
    return HARMLESS.fullmatch(name) is not None


def left_over_of(names: Iterable[str], model: nn.Module) -> list[str]:
    """The names that do not belong to a model, without harmless ones."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    left_over = sorted(
        name
        for name in names
        if not is_harmless(name)
        and not any(re.search(pattern, name) for pattern in patterns)
        and not (_is_shared(model) and getattr(model, name.partition(".")[0], "") is None)
    )
    if not isinstance(model, PreTrainedModel):
        return left_over
    expected = {match[2] for name in model.state_dict() for match in OTHER_HALVES.finditer(name)}
    halves = {name: OTHER_HALVES.search(name) for name in left_over}
    return [name for name, match in halves.items() if match is None or match[2] in expected]


def _is_shared(model: nn.Module) -> bool:
    """Whether a ControlNet gets modules from its pipeline's denoiser; until then they are None."""
    share = getattr(type(model), "from_transformer", None)
    return share is not None and "controlnet" in signature(share).parameters


def refuse_misfit(
    kind: str, missing: Sequence[str], left_over: Sequence[str], other_shapes: Sequence[str] = ()
) -> None:
    """Refuse weights that do not fit a model exactly.

    Args:
        kind: the model's class.

    Raises:
        Misfit: a weight is missing, left over, or of another shape; the text names it.
    """
    if other_shapes:
        raise Misfit(f"it holds a {kind} of another size: {some(other_shapes)}")
    if missing:
        raise Misfit(f"it lacks {some(missing)}, which a {kind} needs")
    if left_over:
        rule = f"which this model's {kind} has no place for: is it of another model?"
        raise Misfit(f"it has {some(left_over)}, {rule}")


def some(names: Iterable[str]) -> str:
    """One of several names, and how many others there are."""
    first, *rest = names
    return f"{first} and {len(rest)} more" if rest else str(first)
