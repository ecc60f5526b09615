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

# IANA's special-purpose address registries, and what clouds keep for themselves
_NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # behind carrier-grade NAT; metadata at Alibaba
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's metadata and DNS
        "169.254.0.0/16",  # link-local; metadata of most clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; metadata at Oracle
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112, served by whoever is near
        "192.52.193.0/24",  # multicast tunnels (AMT), likewise
        "192.88.99.0/24",  # 6to4 relays, likewise
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
        # within `_GLOBAL_UNICAST`; the rest of IPv6 is local, reserved or multicast
        "2001::/23",  # protocol assignments: Teredo, benchmarks, AMT, AS112, ORCHID, drones
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: leads to the IPv4 address inside
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
]
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_EMBEDDING_IPV4 = (  # what the last 32 bits name is where a connection goes
    ipaddress.IPv6Network("::ffff:0:0/96"),
    ipaddress.IPv6Network("64:ff9b::/96"),  # NAT64
)

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
    """Whether anybody in the internet could reach this address just as well.

    By tables of our own: those of `ipaddress` differ between versions of Python.
    """
    if isinstance(address, ipaddress.IPv6Address):
        for network in _EMBEDDING_IPV4:
            if address in network:
                return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_UNICAST:
            return False
    return not any(address in network for network in _NOT_PUBLIC)


async def fetch(
    url: str,
    *,
    max_bytes: int,
    timeout_s: float = TIMEOUT_S,
    name: str = "image",
    resolve: Resolve = resolve,
    is_allowed: Callable[[Address], bool] = is_public,
    trusted: ssl.SSLContext | None = None,
    took: Callable[[int], None] = lambda size: None,
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
        took: hears of bytes as they arrive; may raise.

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
                    verify=trusted or authorities(),
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
                            return await _read(answer, max_bytes, name, took)
                        url = str(target.join(answer.headers.get("location", "")))
                    finally:
                        await answer.aclose()
    except TimeoutError as error:
        raise _wrong(name, f"took longer than {timeout_s:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise _wrong(name, f"could not be fetched ({type(error).__name__})") from error
    raise _wrong(name, f"leads on more than {REDIRECTS} times")


@cache
def authorities() -> ssl.SSLContext:
    """Who may certify a server. The first time it takes 100 ms."""
    return httpx2.create_ssl_context()


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


async def _read(
    answer: httpx2.Response, max_bytes: int, name: str, took: Callable[[int], None]
) -> bytes:
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
            took(len(piece))
            if is_large := len(data) > max_bytes:
                break
    if is_large:
        raise BodyTooLarge(f"{name} is larger than {max_bytes} bytes", param=name)
    return bytes(data)


def _wrong(name: str, what: str) -> InvalidValue:
    return InvalidValue(f"{name}: the URL {what}", param=name)
