"""LitServe with its batching on: several requests come to `predict` as one list.

usage: python -m benchmarks.peers.litserve_server FOLDER MOST_REQUESTS PORT

A pipeline call has one number of steps and one guidance, so those of a batch that agree in both
run as one call, the others one call after another. A batch waits 5 ms, as for Carpool's `dynamic`.
LitServe's limit of 30 s a request is off.
"""

import sys
from collections import defaultdict
from typing import Any

import litserve  # type: ignore[import-untyped]
from PIL import Image

from benchmarks.peers import plain

BATCH_TIMEOUT_S = 0.005


class Pictures(litserve.LitAPI):  # type: ignore[misc]
    """The pipeline behind LitServe's own `batch` and `unbatch`."""

    folder: str

    def setup(self, device: str) -> None:
        self.pipe = plain.load(self.folder)

    def predict(self, x: list[plain.Body]) -> list[Image.Image]:
        """Pictures in the order of the requests."""
        alike: dict[Any, list[int]] = defaultdict(list)
        for place, body in enumerate(x):
            alike[plain.settings(body)].append(place)
        images: dict[int, Image.Image] = {}
        for places in alike.values():
            pictures = plain.draw(self.pipe, [x[place] for place in places])
            images.update(zip(places, pictures, strict=True))
        return [images[place] for place in range(len(x))]

    def decode_request(self, request: dict[str, Any]) -> plain.Body:
        return request

    def encode_response(self, output: Image.Image) -> dict[str, Any]:
        return plain.answer(output)


def create(folder: str, max_batch_size: int) -> Pictures:
    """The API as it is served."""
    api = Pictures(
        max_batch_size=max_batch_size,
        batch_timeout=BATCH_TIMEOUT_S,
        api_path="/v1/images/generations",
    )
    api.folder = folder
    return api


if __name__ == "__main__":
    folder, size, port = sys.argv[1:]
    server = litserve.LitServer(create(folder, int(size)), accelerator="cpu", timeout=False)
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False, log_level="warning")
