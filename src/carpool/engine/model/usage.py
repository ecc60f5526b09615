"""Usage: the input and output of a request, counted in tokens of its model."""

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.tokenizers import LONG_TEXT
from carpool.types import CheckedRequest


class Meter:
    """Counts input and output of a request in tokens of its model; n outputs share a prompt."""

    def __init__(self, loaded: LoadedPipeline) -> None:
        # copies: fast tokenizers cannot be used by two threads at once
        tokenizer: Any = getattr(loaded.pipe, "tokenizer", None)
        self._here, self._there = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "carpool-usage")
        self._count_there = lru_cache(64)(lambda text: len(self._there(text).input_ids))
        self._card = loaded.card

    def usage(self, request: CheckedRequest) -> "Future[tuple[int, int]]":
        """Text tokens of the prompt (not truncated), and latent patches of the image.

        Ready at once for a short prompt; another thread counts a long one.
        """
        prompt = request.arguments.get("prompt")
        text = prompt if isinstance(prompt, str) and self._here is not None else ""
        if len(text) > LONG_TEXT:
            return self._thread.submit(lambda: (self._count_there(text), self._patches(request)))
        counts: Future[tuple[int, int]] = Future()
        counts.set_result((len(self._here(text).input_ids) if text else 0, self._patches(request)))
        return counts

    def _patches(self, request: CheckedRequest) -> int:
        sizes = zip(("width", "height"), self._card.usual_size_px or (0, 0), strict=True)
        width, height = (request.arguments.get(name) or default for name, default in sizes)
        side_px = self._card.size_multiple_px
        return int((width // side_px) * (height // side_px))
