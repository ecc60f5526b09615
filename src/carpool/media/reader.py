"""Read the pictures of requests on threads: fetch, decode base64, parse, decode.

Tenants share the threads in turn (`executors.py`). A waiting picture takes only the memory of its
file; after a client disconnect it is never decoded.
"""

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from PIL import Image

from carpool.errors import InvalidValue, UnsupportedParameter
from carpool.media import fetch_url, uploads
from carpool.media.container import Container
from carpool.media.executors import FairExecutor, on_this_loop, run_apart
from carpool.media.uploads import DATA_URL, MOST_BYTES, Mode
from carpool.request.images import Size

T = TypeVar("T")
ImageData = bytes | str | memoryview
"""A file, or its URL; a long `data:` URL is a memoryview."""

MOST_PIXELS = 32_000_000  # limit for an upload; models resize it to their lower limit
LOOKUPS, FETCHES = 8, 16  # concurrent; one tenant may use a quarter


class ByteCounter(Protocol):
    """Counts the bytes that a request holds in memory; may raise to refuse more."""

    def replace(self, old: int, new: int) -> None: ...


class Uncounted:
    """Counts nothing."""

    def replace(self, old: int, new: int) -> None: ...


class PictureReader:
    """The threads and connections shared by all requests. Not thread-safe: one event loop."""

    def __init__(self, *, allow_remote: bool = False) -> None:
        """Make a reader; threads start with the first picture.

        Args:
            allow_remote: fetch pictures from http(s) URLs.
        """
        workers = max(2, (os.cpu_count() or 2) // 2)
        self.decoding = FairExecutor(
            "carpool-decode",
            workers,
            per_tenant=max(1, workers // 2),
            budget=uploads.MOST_DECODED_BYTES,
        )
        self.lookups = FairExecutor("carpool-dns", LOOKUPS, per_tenant=LOOKUPS // 4)
        # a thread for each fetch: answers may be slow to parse
        self.fetches = FairExecutor("carpool-fetch", FETCHES, per_tenant=FETCHES // 4)
        self.allow_remote = allow_remote
        if allow_remote:
            fetch_url.authorities()  # loaded now, before requests wait


@dataclass(frozen=True, slots=True)
class ImageIntake:
    """Reads the pictures of one request."""

    reader: PictureReader
    tenant: str = ""
    held: ByteCounter = Uncounted()
    copies: int = 1  # outputs of the request; each sends the pictures to the worker

    async def run(self, work: Callable[[], T], *, cost: int = 0) -> T:
        """Run other picture work on the same threads; see `FairExecutor.run`."""
        return await self.reader.decoding.run(self.tenant, work, cost=cost)

    async def open(self, picture: ImageData, name: str = "image") -> Container:
        """Load and parse a picture; its file is counted in place of the sent bytes.

        Raises:
            Rejected, BodyTooLarge: the picture cannot be fetched or read.
        """
        data = await self._data(picture, name)
        parse = partial(uploads.parse, data, max_pixels=MOST_PIXELS, name=name)
        return await self.run(parse, cost=len(data))

    async def decode(
        self,
        parsed: Container,
        name: str = "image",
        *,
        mode: Mode = "RGB",
        fitted: Size | None = None,
        then: Callable[[Image.Image], Image.Image] | None = None,
    ) -> Image.Image:
        """Decode a picture; all copies of its pixels are counted in place of the file.

        Args:
            fitted: see `uploads.decode`.
            then: further work on the picture, on the same thread.

        Raises:
            ImageTooLarge: decoding would take too much memory.
            UnsupportedImage: the picture is damaged.
        """
        cost = uploads.decode_cost(parsed, mode, name, fitted)

        def work() -> Image.Image:
            image = uploads.decode(parsed, mode=mode, name=name, fitted=fitted)
            return then(image) if then else image

        image = await self.run(work, cost=cost)
        bands = len(image.getbands())
        pixel_bytes = (1 if bands == 1 else 4) + self.copies * bands  # Pillow's copy, the workers'
        self.held.replace(len(parsed.data), math.prod(image.size) * pixel_bytes)
        return image

    async def _data(self, picture: ImageData, name: str) -> bytes:
        if isinstance(picture, bytes):
            return picture
        start = picture[:8] if isinstance(picture, str) else bytes(picture[:8]).decode("latin-1")
        scheme = start.partition(":")[0].lower()
        if scheme == "data":
            unpack = partial(uploads.read_data_url, picture, name=name)
            data = await self.run(unpack, cost=len(picture))
            self.held.replace(len(picture), len(data))
            return data
        allow_remote = self.reader.allow_remote
        if scheme not in ("http", "https") or not isinstance(picture, str):
            rule = f"{DATA_URL} or http(s)://..." if allow_remote else DATA_URL
            raise InvalidValue.of(name, uploads.cut(picture), f"must be {rule}")
        if not allow_remote:
            raise UnsupportedParameter(
                f"{name} is a URL, which this server does not fetch (--allow-remote-media): send "
                f"the picture itself, as {DATA_URL}",
                param=name,
            )
        fetch = partial(
            fetch_url.fetch,
            picture,
            max_bytes=MOST_BYTES,
            name=name,
            resolve=on_this_loop(self._resolve),
            took=on_this_loop(self._took),
        )
        return await run_apart(self.reader.fetches, self.tenant, fetch)

    async def _took(self, size: int) -> None:
        self.held.replace(0, size)

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        return [str(address[4][0]) for address in await self.reader.lookups.run(self.tenant, ask)]
