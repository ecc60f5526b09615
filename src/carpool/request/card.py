"""The public description of a model: its tasks, their parameters, its sizes and its limits.

The parameters are read from the pipeline's `__call__` once, when the model is loaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from carpool.request.adapter_names import AdapterInfo
from carpool.request.images import NAMES as PICTURE_NAMES
from carpool.request.values import ParameterKind

OWN_KEYS = (
    *("n", "seed", "timeout_s", "lora", "deadline_s", "priority", "step_cache", "scheduler"),
    *("enhance_prompt", "prompt_weights"),
)
PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
INSTEAD = {
    "generator": "pass seed, every request gets a generator of its own",
    **dict.fromkeys(PER_PROMPT, "pass n"),
    "n": "one request has one output; generate(..., n=...) makes several",
}
TEXT = "text-generation"
"""Task of a language model; inside a pipeline: `text-generation:COMPONENT`."""
INTERNAL = (*INSTEAD, "return_dict")  # ignored: outputs are always objects


Makes = Literal["pictures", "videos", "sound", "meshes", "text"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a pipeline's `__call__`."""

    name: str
    kind: ParameterKind  # "other": tensors, pictures, callables: Python API only
    required: bool = False
    default: int | float | bool | str | None = None  # the pipeline's own, if it is a plain value
    also: tuple[ParameterKind, ...] = ()  # further accepted kinds
    default_is_none: bool = True  # if `default` is None: the pipeline's own is None
    is_tuple: bool = False  # lists become tuples: pipelines join sizes as tuples


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a model, and the pipeline class that does it."""

    name: str  # "text-to-image", "inpaint", ...
    pipeline: str  # class name
    parameters: tuple[Parameter, ...]
    max_images: int = 1  # most reference images of a request
    image_mode: str = "RGB"  # mode of PIL images
    strength_rounds: Literal["up", "down"] | None = None  # steps * strength; None: not known
    output_types: tuple[str, ...] = ("pil", "np", "pt", "latent")
    only_converts: bool = False  # output types differ only by a conversion
    needs_prompt: bool = True  # a prompt, or its embeddings

    @property
    def makes(self) -> Makes:
        kinds: dict[str, Makes] = {"video": "videos", "audio": "sound", "mesh": "meshes"}
        if self.name.startswith(TEXT):
            return "text"
        return kinds.get(self.name.rpartition("-")[2], "pictures")

    @property
    def file_type(self) -> str | None:
        """The output type that files need; None: the pipeline's own default."""
        file_types = {"sound": "pt", "meshes": "mesh" if "mesh" in self.output_types else None}
        file_types["text"] = None
        return file_types.get(self.makes, "pil")

    def takes(self, name: str) -> bool:
        return name in [parameter.name for parameter in self.parameters]


@dataclass(frozen=True, slots=True)
class Card:
    """The public description of a loaded model."""

    id: str
    tasks: tuple[Task, ...]  # the loaded pipeline's own task first
    defaults: dict[str, Any]  # values of missing parameters
    size_multiple_px: int
    default_size_px: tuple[int, int] | None  # width, height
    max_pixels: int
    max_steps: int
    lora: tuple[str, ...] = ()  # adapters that a request may name
    embeddings: Mapping[str, int] = field(default_factory=dict)  # vectors of words
    adapters: tuple[AdapterInfo, ...] = ()  # with aliases, and with refused adapters
    frame_step: int = 1  # videos have k * frame_step + 1 frames
    rounds_sizes: bool = False  # other sides are rounded down, not refused
    scheduler: str = ""  # class of the model's own scheduler
    schedulers: tuple[str, ...] = ()  # samplers that a request may name; see `request.samplers`
    enhancer: str = ""  # rewriter of prompts, see `request.enhancement`; "": none
    weights_reader: str = ""  # reader of prompt weights, see `request.prompt_weights`
    enhances: bool = False  # default of `enhance_prompt`
    has_fixed_text_layer: bool = False  # AUTOMATIC1111 ignores clip_skip for it
    writers: tuple[Task, ...] = ()  # tasks of language models in the pipeline

    @property
    def pipeline(self) -> str:
        return self.tasks[0].pipeline

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.tasks[0].parameters

    @property
    def usual_size_px(self) -> tuple[int, int] | None:
        """Default width and height, if the model or its pipeline has any."""
        defaults = {p.name: p.default for p in self.parameters} | self.defaults
        width, height = defaults.get("width"), defaults.get("height")
        if isinstance(width, int) and isinstance(height, int):
            return width, height
        return self.default_size_px

    @property
    def usable_adapters(self) -> list[AdapterInfo]:
        """The adapters that a request may name."""
        by_id = {info.id: info for info in self.adapters if not info.problem}
        return [by_id.get(name, AdapterInfo(name)) for name in self.lora]

    def task(self, name: str) -> Task:
        return next(task for task in (*self.tasks, *self.writers) if task.name == name)

    def writer(self, component: str = "") -> "Card | None":
        """The card of a language model: the model itself, or a component; None: no such model."""
        name = f"{TEXT}:{component}" if component else TEXT
        task = next((task for task in (*self.tasks, *self.writers) if task.name == name), None)
        if task is None:
            return None
        return replace(self, tasks=(task,), writers=(), lora=(), schedulers=())

    def task_for(self, names: Iterable[str]) -> Task:
        """The task that takes these pictures; otherwise the model's own task."""
        pictures = [name for name in names if name in PICTURE_NAMES]
        fitting = (task for task in self.tasks if all(map(task.takes, pictures)))
        return next(fitting, self.tasks[0])

    def steps(self, arguments: Mapping[str, Any]) -> int:
        """Denoising steps for these arguments; 0 if the pipeline does not define them."""
        default = {p.name: p.default for p in self.parameters}.get("num_inference_steps")
        return int(arguments.get("num_inference_steps", default) or 0)

    def names(self) -> list[str]:
        """Names of all parameters of a request, with Carpool's own."""
        names = dict.fromkeys(p.name for task in self.tasks for p in task.parameters)
        return [*OWN_KEYS, *(name for name in names if name not in INTERNAL)]
