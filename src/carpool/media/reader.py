"""Pictures of many clients: fetched, unpacked and decoded on threads, one tenant after the other.

What waits for its turn costs no more than its bytes, and whose client is gone is never begun.
"""

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from PIL import Image

from carpool.errors import InvalidValue, UnsupportedParameter, show
from carpool.media import remote, uploads
from carpool.media.container import Container
from carpool.media.executors import FairExecutor, FairSemaphore
from carpool.media.uploads import DATA_URL, MOST_BYTES, Mode, Size

T = TypeVar("T")
Sent = bytes | str | memoryview
"""A file, or the URL of one; a long `data:` URL is a memoryview."""

MOST_PIXELS = 32_000_000  # of an upload; a model takes less, and gets it made smaller
LOOKUPS, FETCHES = 8, 16  # at once; one tenant may have a quarter


class Held(Protocol):
    """Counts the bytes that a request holds; may refuse more."""

    def replace(self, old: int, new: int) -> None: ...


class Uncounted:
    """Counts nothing."""

    def replace(self, old: int, new: int) -> None:
        """Any number will do."""


class PictureReader:
    """Reads pictures for several tenants. On one event loop."""

    def __init__(self, *, allow_remote: bool = False) -> None:
        """No thread yet.

        Args:
            allow_remote: fetch pictures that are named by http(s) URLs.
        """
        workers = max(2, (os.cpu_count() or 2) // 2)
        self._decoding = FairExecutor(
            "carpool-decode",
            workers,
            per_tenant=max(1, workers // 2),
            budget=uploads.MOST_DECODED_BYTES,
        )
        self._lookups = FairExecutor("carpool-dns", LOOKUPS, per_tenant=LOOKUPS // 4)
        self._fetches = FairSemaphore(FETCHES, per_tenant=FETCHES // 4)
        self._allow_remote = allow_remote
        if allow_remote:
            remote.authorities()  # not while requests wait

    async def run(self, tenant: str, work: Callable[[], T], *, cost: int = 0) -> T:
        """Run other work with pictures on the same threads; see `FairExecutor.run`."""
        return await self._decoding.run(tenant, work, cost=cost)

    async def open(
        self,
        sent: Sent,
        tenant: str,
        held: Held,
        *,
        max_pixels: int = MOST_PIXELS,
        max_bytes: int = MOST_BYTES,
        name: str = "image",
    ) -> Container:
        """Have a picture here, as a file that has been walked through.

        Args:
            held: counts the file in place of what was sent.

        Raises:
            Rejected, BodyTooLarge: it cannot be had, or read.
        """
        data = await self._data(sent, tenant, held, max_bytes, name)
        walk = partial(uploads.walked, data, max_pixels=max_pixels, name=name)
        return await self._decoding.run(tenant, walk, cost=len(data))

    async def decode(
        self,
        container: Container,
        tenant: str,
        held: Held,
        *,
        mode: Mode = "RGB",
        name: str = "image",
        fitted: Size | None = None,
        then: Callable[[Image.Image], Image.Image] | None = None,
        copies: int = 1,
    ) -> Image.Image:
        """Decode a picture.

        Args:
            held: counts the picture in place of the file, as often as there are `copies`.
            fitted: see `uploads.decoded`.
            then: what else is to be done with it, on the same thread.

        Raises:
            ImageTooLarge: that would take too much memory.
            UnsupportedImage: it is damaged.
        """
        cost = uploads.cost_of(container, mode, fitted)
        uploads.check_cost(container, cost, name)

        def work() -> Image.Image:
            image = uploads.decoded(container, mode=mode, name=name, fitted=fitted)
            return image if then is None else then(image)

        image = await self._decoding.run(tenant, work, cost=cost)
        held.replace(len(container.data), bytes_of(image, copies))
        return image

    async def _data(self, sent: Sent, tenant: str, held: Held, max_bytes: int, name: str) -> bytes:
        if isinstance(sent, bytes):
            return sent
        start = sent[:8] if isinstance(sent, str) else bytes(sent[:8]).decode("latin-1")
        scheme = start.partition(":")[0].lower()
        if scheme == "data":
            unpack = partial(uploads.read_data_url, sent, max_bytes=max_bytes, name=name)
            data = await self._decoding.run(tenant, unpack, cost=len(sent))
            held.replace(len(sent), len(data))
            return data
        if scheme not in ("http", "https") or not isinstance(sent, str):
            rule = f"{DATA_URL} or http(s)://..." if self._allow_remote else DATA_URL
            raise InvalidValue(f"{name}={show(uploads.cut(sent))}: must be {rule}", param=name)
        if not self._allow_remote:
            raise UnsupportedParameter(
                f"{name} is a URL, which this server does not fetch (--allow-remote-media): send "
                f"the picture itself, as {DATA_URL}",
                param=name,
            )
        async with self._fetches.hold(tenant):
            return await remote.fetch(
                sent,
                max_bytes=max_bytes,
                name=name,
                resolve=partial(self._resolve, tenant),
                took=partial(held.replace, 0),
            )

    async def _resolve(self, tenant: str, host: str, port: int) -> Sequence[str]:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        return [str(found[4][0]) for found in await self._lookups.run(tenant, ask)]


@dataclass(frozen=True, slots=True)
class Intake:
    """Reads the pictures of one request."""

    reader: PictureReader
    tenant: str = ""
    held: Held = Uncounted()
    copies: int = 1  # outputs of the request: each takes the pictures to the worker

    async def run(self, work: Callable[[], T], *, cost: int = 0) -> T:
        """See `PictureReader.run`."""
        return await self.reader.run(self.tenant, work, cost=cost)

    async def open(self, sent: Sent, name: str) -> Container:
        """See `PictureReader.open`."""
        return await self.reader.open(sent, self.tenant, self.held, name=name)

    async def decode(self, picture: Container, name: str, **options: Any) -> Image.Image:
        """See `PictureReader.decode`."""
        return await self.reader.decode(
            picture, self.tenant, self.held, name=name, copies=self.copies, **options
        )


def bytes_of(image: Image.Image, copies: int = 1) -> int:
    """What a picture takes in memory, with copies of its pixels that go to the worker."""
    bands = len(image.getbands())
    return math.prod(image.size) * ((1 if bands == 1 else 4) + copies * bands)
