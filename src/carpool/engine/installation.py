"""Install and remove all that an engine changes in modules and libraries while it runs.

The order counts: isolation notes how modules are before anything of them is patched, so it is made
first, and taken out last.
"""

from collections.abc import Callable

from carpool.engine.adapters.hooks import Adapters
from carpool.engine.flattened_encoders import FlattenedEncoders
from carpool.engine.intercept import Interception, tell_of_compilations
from carpool.engine.isolation import Isolation
from carpool.engine.language.tokens import reader_of
from carpool.engine.model.load import LoadedPipeline
from carpool.engine.observe import truncation
from carpool.engine.observe.loop_progress import LoopProgress
from carpool.engine.tokenizers import Tokenizers


class Installation:
    """Of one engine; `install` and `remove` are for its thread."""

    def __init__(self, loaded: LoadedPipeline, heartbeat: LoopProgress, *, is_exact: bool) -> None:
        self._loaded, self._heartbeat = loaded, heartbeat
        pipelines = loaded.originals.values()
        self.isolation = Isolation(loaded.modules, loaded.device.torch, pipelines)
        self.interception = Interception(loaded.modules, reader_of)
        truncation.install()
        self._tokenizers = Tokenizers(loaded.pipe.components)
        self._encoders = FlattenedEncoders(loaded.modules.values())
        self.adapters = Adapters(loaded.pipe, loaded.device.torch, is_exact=is_exact)
        self._compilations: Callable[[], None] = lambda: None

    def install(self) -> None:
        self.interception.install()
        modules = self._loaded.modules.values()
        self._compilations = tell_of_compilations(modules, self._heartbeat)
        self.isolation.install()
        self._tokenizers.install()
        self._encoders.install()

    def remove(self) -> None:
        self.interception.remove()
        self._compilations()
        self._tokenizers.remove()
        self._encoders.remove()
        self.adapters.remove()
        self.isolation.remove()
        if not self._loaded.device.is_lost:
            self._loaded.undo()
