"""A pipeline as loading leaves it: on its device, in evaluation mode, ready to be intercepted."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from carpool.engine.model.device import Device
from carpool.engine.model.modular import Pipeline
from carpool.engine.weights.streaming import Streamer
from carpool.request.card import Card
from carpool.settings.peers.sglang_rules import Server

if TYPE_CHECKING:
    from carpool.engine.model.language_server import LanguageServer


class GroupOfRanks(Protocol):
    """Processes that compute denoisers together: `engine.group.leader.Group`."""

    at_loss: Callable[[], object]

    def attach(self, adapters: Any) -> None: ...
    def statistics(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline on its device, ready to be intercepted."""

    pipe: Pipeline
    card: Card
    device: Device
    originals: Mapping[str, Pipeline]  # by task
    undo: Callable[[], object]  # makes modules what they were before they were loaded
    shared: Mapping[int, Any]  # what views share, by id: modules, and those inside of them
    lora: Mapping[str, str | Path] = field(default_factory=dict)  # adapters to begin with, by name
    source: str = ""  # the model as it was asked for
    is_spread: bool = False  # over several devices
    classes: dict[int, type] = field(default_factory=dict)  # of views, by id of their pipeline
    streamer: Streamer | None = None  # of weights that are not on the device all the time
    group: GroupOfRanks | None = None  # of processes that compute denoisers together
    language: "LanguageServer | None" = None  # writes prompts, or plans

    @property
    def vae_scale_px(self) -> int:
        """Pixels along a side that one latent place stands for."""
        names = ("vae_scale_factor_spatial", "vae_scale_factor")
        return int(next((n for n in (getattr(self.pipe, name, None) for name in names) if n), 8))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules by name, those of pipelines inside of the pipeline, too."""
        return dict(modules_of(self.pipe))

    @property
    def server(self) -> Server:
        """Facts that the rules of batching configs may ask for."""
        parts = (part for module in self.modules.values() for part in module.modules())
        is_hooked = any(hasattr(part, "_diffusers_hook") for part in parts)
        is_offloaded = is_hooked and self.group is None  # whose hooks split sequences
        return Server(self.source, self.device.memory_gib, is_offloaded)

    @property
    def parameters(self) -> int:
        """Weights in all modules."""
        modules = self.modules.values()
        return sum(weight.numel() for module in modules for weight in module.parameters())


def modules_of(pipe: Pipeline) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, those of pipelines inside of the pipeline, too."""
    visited: set[int] = set()
    inner = {name: part for name, part in vars(pipe).items() if isinstance(part, Pipeline)}
    attributes = {**pipe.components, **vars(pipe)}
    deeper = ((f"{name}.{n}", m) for name, part in inner.items() for n, m in modules_of(part))
    for name, module in (*attributes.items(), *deeper):
        if isinstance(module, nn.Module) and id(module) not in visited:
            visited.add(id(module))
            yield name, module
