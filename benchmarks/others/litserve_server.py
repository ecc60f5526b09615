"""LitServe with batching: `predict` gets lists of up to eight requests.

usage: python -m benchmarks.others.litserve_server PORT

A pipeline call has one number of steps and one guidance, so requests of a batch that agree in both
run as one call, and other requests in further calls. LitServe's user settings equal those of
Carpool's `dynamic`: eight requests, 5 ms. Its limit of 30 s a request is off.
"""

import sys
from collections import defaultdict
from typing import Any

import litserve  # type: ignore[import-untyped]
from PIL import Image

from benchmarks.others import plain

MAX_BATCH_SIZE = 8
BATCH_TIMEOUT_S = 0.005


class Pictures(litserve.LitAPI):  # type: ignore[misc]
    """The pipeline behind LitServe's own `batch` and `unbatch`."""

    def setup(self, device: str) -> None:
        self.pipe = plain.load()

    def decode_request(self, request: dict[str, Any]) -> plain.Body:
        return plain.Body.model_validate(request)

    def predict(self, x: list[plain.Body]) -> list[Image.Image]:
        """Draw pictures, in the order of the requests."""
        alike: dict[tuple[int, float], list[int]] = defaultdict(list)
        for place, body in enumerate(x):
            alike[body.settings].append(place)
        images: dict[int, Image.Image] = {}
        for places in alike.values():
            pictures = plain.draw(self.pipe, [x[place] for place in places])
            images.update(zip(places, pictures, strict=True))
        return [images[place] for place in range(len(x))]

    def encode_response(self, output: Image.Image) -> dict[str, Any]:
        return plain.answer(output)


def create() -> Pictures:
    """Make the served API."""
    return Pictures(
        max_batch_size=MAX_BATCH_SIZE,
        batch_timeout=BATCH_TIMEOUT_S,
        api_path="/v1/images/generations",
    )


if __name__ == "__main__":
    server = litserve.LitServer(create(), accelerator="cpu", timeout=False)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning"
    )
