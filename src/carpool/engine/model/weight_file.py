"""Move weights to a file while a model is read: those that diffusers casts or quantizes.

A weight that is used as stored stays mapped from its checkpoint. Any other goes to an unnamed file
as soon as it exists, and is mapped from there. So a model larger than the host's memory can be
quantized, and streaming reads its weights from that file.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from diffusers.loaders import single_file_model
from diffusers.models import model_loading_utils
from torch import Tensor

from carpool.engine.patches import Patches
from carpool.engine.weights.backing_store import DiskStore
from carpool.engine.weights.groups import plain_parts
from carpool.engine.weights.mapped_files import MappedFiles


@contextmanager
def moving_weights(folder: Path) -> Iterator[None]:
    """While diffusers reads models, move the weights that it changes to a file in a folder.

    Raises:
        LoadFailed: the folder is not writable, or full.
    """
    file = DiskStore(folder, 0)

    def replacement(load: Callable[..., Any]) -> Callable[..., Any]:
        return lambda model, weights, **options: load(
            model, _MovingWeights(weights, model, file), **options
        )

    with ExitStack() as undo:
        undo.callback(file.close)  # mappings keep the file
        for module in (model_loading_utils, single_file_model):
            patch = Patches(module, {"load_model_dict_into_meta": replacement})
            patch.add()
            undo.callback(patch.drop)
        yield


class _MovingWeights(dict[str, Tensor]):
    """The weights of a file; each is moved when the loop that sets them continues."""

    def __init__(self, weights: dict[str, Tensor], model: Any, file: DiskStore) -> None:
        super().__init__(weights)
        self._model, self._file, self._pages = model, file, MappedFiles()
        self._names = {name for name, _ in model.named_parameters()}

    def items(self) -> Any:
        for name, source in super().items():
            yield name, source
            weight = self._model.get_parameter(name) if name in self._names else source
            for owner, attribute, value in list(plain_parts(weight, "data", weight)):
                if value.data_ptr() != source.data_ptr() and value.device.type == "cpu":
                    setattr(owner, attribute, self._file.move(value))
                    self._pages.forget_pages(source)
            with suppress(AttributeError, OSError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)  # glibc would keep what quantizing has freed
