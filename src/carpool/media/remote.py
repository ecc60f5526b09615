"""Fetch a picture that a client names by its URL, and nothing that only this machine can reach.

A name is resolved once, every address of it is checked, and the connection goes to that very
address: what the name server says later changes nothing. Redirects are followed one by one, each
as if the client had named it.
"""

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import cache

import httpx2

from carpool.errors import BodyTooLarge, InvalidValue

TYPES = ("image/png", "image/jpeg", "image/webp", "application/octet-stream")
REDIRECTS = 3
TIMEOUT_S = 15.0  # for all of it
_ASK = {"accept": "image/png, image/jpeg, image/webp", "accept-encoding": "identity"}
_REDIRECTED = (301, 302, 303, 307, 308)

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs URLs whole, keys and all

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host, as text."""


async def resolve(host: str, port: int) -> list[str]:
    """Ask the system, which also reads the odd ways to write an address (0177.0.0.1, 2130706433).

    Raises:
        OSError: the name has no address.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: Address) -> bool:
    """Whether anybody in the internet could reach this address just as well."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour or address.teredo or address.is_site_local:
            return False  # tunnels lead to the IPv4 address inside
    return address.is_global and not (address.is_multicast or address.is_reserved)


async def fetch(
    url: str,
    *,
    max_bytes: int,
    timeout_s: float = TIMEOUT_S,
    name: str = "image",
    resolve: Resolve = resolve,
    is_allowed: Callable[[Address], bool] = is_public,
    trusted: ssl.SSLContext | None = None,
) -> bytes:
    """The bytes at a URL.

    Args:
        url: `http:` or `https:`, without a user name.
        max_bytes: of the answer.
        timeout_s: from the first question for its address to the last byte.
        name: of the parameter, for messages.
        resolve: finds a host's addresses.
        is_allowed: may this address be talked to?
        trusted: who may certify a server; None: the usual authorities.

    Raises:
        InvalidValue: an address that is not public, another type, no answer, not in time.
        BodyTooLarge: more than `max_bytes`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(REDIRECTS + 1):
                target = _parse(url, name)
                address = await _address(target, name, resolve, is_allowed)
                # a client each: a connection never serves two names
                async with httpx2.AsyncClient(
                    verify=trusted or _authorities(),
                    trust_env=False,
                    timeout=None,
                    follow_redirects=False,
                ) as client:
                    request = client.build_request(
                        "GET",
                        target.copy_with(host=address, fragment=None),
                        headers={**_ASK, "host": target.netloc.decode("ascii")},
                        extensions={"sni_hostname": target.raw_host.decode("ascii").strip("[]")},
                    )
                    answer = await client.send(request, stream=True)
                    try:
                        if answer.status_code not in _REDIRECTED:
                            return await _read(answer, max_bytes, name)
                        url = str(target.join(answer.headers.get("location", "")))
                    finally:
                        await answer.aclose()
    except TimeoutError as error:
        raise _wrong(name, f"took longer than {timeout_s:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise _wrong(name, f"could not be fetched ({type(error).__name__})") from error
    raise _wrong(name, f"leads on more than {REDIRECTS} times")


@cache
def _authorities() -> ssl.SSLContext:
    return httpx2.create_ssl_context()  # 100 ms


def _parse(url: str, name: str) -> httpx2.URL:
    try:
        target = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise _wrong(name, f"is no URL: {str(error)[:60]}") from error
    if target.scheme not in ("http", "https") or not target.host:
        raise _wrong(name, "leads to something that is not http: or https:")
    if (target.port or 0) > 65_535:
        raise _wrong(name, "has a port above 65535")
    if target.userinfo:
        raise _wrong(name, "names a user: leave out what is before the @")
    return target


async def _address(
    target: httpx2.URL,
    name: str,
    resolve: Resolve,
    is_allowed: Callable[[Address], bool],
) -> str:
    """Where to connect to; refuses a host of which any address is not allowed."""
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        found = await resolve(target.raw_host.decode("ascii").strip("[]"), port)
        addresses = [ipaddress.ip_address(text) for text in found]
    except (OSError, ValueError) as error:
        raise _wrong(name, "leads to a host that has no address") from error
    if not addresses or not all(map(is_allowed, addresses)):
        raise _wrong(name, "leads to an address that is not public")
    return str(min(addresses, key=lambda address: address.version))


async def _read(answer: httpx2.Response, max_bytes: int, name: str) -> bytes:
    if answer.status_code != 200:
        raise _wrong(name, f"answers with status {answer.status_code}")
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in TYPES:
        raise _wrong(name, f"has the type {kind[:40]!r}: must be one of {', '.join(TYPES)}")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise _wrong(name, "answers with a compressed file: a picture is one already")
    data = bytearray()
    stated = answer.headers.get("content-length", "")
    is_large = stated.isdecimal() and int(stated[:20]) > max_bytes
    if not is_large:
        async for piece in answer.aiter_raw():
            data += piece
            if is_large := len(data) > max_bytes:
                break
    if is_large:
        raise BodyTooLarge(f"{name} is larger than {max_bytes} bytes", param=name)
    return bytes(data)


def _wrong(name: str, what: str) -> InvalidValue:
    return InvalidValue(f"{name}: the URL {what}", param=name)
