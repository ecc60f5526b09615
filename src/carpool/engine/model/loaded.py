"""A loaded pipeline: on its device, in evaluation mode, ready for interception."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from carpool.engine.model.device import Device
from carpool.engine.model.modular import Pipeline
from carpool.engine.weights.mapped_files import MappedFiles
from carpool.engine.weights.streaming import Streamer
from carpool.request.card import Card
from carpool.settings.peers.sglang_rules import Server

if TYPE_CHECKING:
    from carpool.engine.group.leader import Followers
    from carpool.engine.model.language_server import LanguageServer


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline on its device, ready for interception."""

    pipe: Pipeline
    card: Card
    device: Device
    originals: Mapping[str, Pipeline]  # pipelines by task
    undo: Callable[[], object]  # restores the modules' state before loading
    shared: Mapping[int, Any]  # objects shared by views, by id: modules with their submodules
    lora: Mapping[str, str | Path] = field(default_factory=dict)  # initial adapters, by name
    source: str = ""  # the model as requested
    is_spread: bool = False  # several devices
    classes: dict[int, type] = field(default_factory=dict)  # views' classes, by pipeline id
    streamer: Streamer | None = None  # streams weights that are not resident
    group: "Followers | None" = None  # processes that compute denoisers together
    files: MappedFiles | None = None  # files that hold weights in use
    language: "LanguageServer | None" = None  # writes prompts, or plans

    @property
    def vae_scale_px(self) -> int:
        """Pixels per latent position along a side."""
        names = ("vae_scale_factor_spatial", "vae_scale_factor")
        return int(next((n for n in (getattr(self.pipe, name, None) for name in names) if n), 8))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules by name, including those of nested pipelines."""
        return dict(modules_of(self.pipe))

    @property
    def server(self) -> Server:
        """Facts for the rules of batching configs."""
        parts = (part for module in self.modules.values() for part in module.modules())
        is_hooked = any(hasattr(part, "_diffusers_hook") for part in parts)
        is_offloaded = is_hooked and self.group is None  # a group's hooks split sequences
        return Server(self.source, self.device.memory_gib, is_offloaded)

    @property
    def parameters(self) -> int:
        """The number of weights in all modules."""
        modules = self.modules.values()
        return sum(weight.numel() for module in modules for weight in module.parameters())


def modules_of(pipe: Pipeline) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, including those of nested pipelines."""
    visited: set[int] = set()
    inner = {name: part for name, part in vars(pipe).items() if isinstance(part, Pipeline)}
    attributes = {**pipe.components, **vars(pipe)}
    deeper = ((f"{name}.{n}", m) for name, part in inner.items() for n, m in modules_of(part))
    for name, module in (*attributes.items(), *deeper):
        if isinstance(module, nn.Module) and id(module) not in visited:
            visited.add(id(module))
            yield name, module
