"""Fetch pictures and send webhooks, to public addresses only (no server-side request forgery).

A host name is resolved once, all its addresses are checked, and the connection goes to a checked
address, so a later DNS answer has no effect. Each redirect is checked like a URL.
"""

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache

import httpx2

from carpool.errors import BodyTooLarge, InvalidValue

TYPES = ("image/png", "image/jpeg", "image/webp", "application/octet-stream")
REDIRECTS = 3
TIMEOUT_S = 15.0  # limit for the whole fetch
COUNTED_BYTES = 64 << 10  # bytes counted at once
MOST_SMALL, SMALL_BYTES = 1000, 256
"""Limit for the pieces of a file, and bytes that allow one more: parsing one takes 20 µs."""
_ASK = {"accept": "image/png, image/jpeg, image/webp", "accept-encoding": "identity"}
_REDIRECTED = (301, 302, 303, 307, 308)

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs full URLs, with keys

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# IANA's special-purpose address registries, and addresses reserved by clouds
_NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for texts in (
        "0.0.0.0/8 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16",  # this network, private
        "100.64.0.0/10",  # carrier-grade NAT; metadata at Alibaba
        "127.0.0.0/8 169.254.0.0/16",  # loopback, link-local; metadata of most clouds
        "168.63.129.16/32",  # Azure's metadata and DNS
        "192.0.0.0/24",  # protocol assignments; metadata at Oracle
        "192.31.196.0/24 192.175.48.0/24 2620:4f:8000::/48",  # AS112, anycast
        "192.52.193.0/24 192.88.99.0/24",  # the same: multicast tunnels (AMT), 6to4 relays
        "192.0.2.0/24 198.51.100.0/24 203.0.113.0/24 2001:db8::/32 3fff::/20",  # documentation
        "198.18.0.0/15 224.0.0.0/4 240.0.0.0/4",  # benchmarks, multicast, reserved and broadcast
        "2001::/23",  # protocol assignments: Teredo, benchmarks, AMT, AS112, ORCHID, drones
        "2002::/16",  # 6to4: routes to the embedded IPv4 address
    )
    for text in texts.split()
]
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # other ranges are local or reserved
_EMBEDDING_IPV4 = (  # IPv4-mapped, NAT64: the last 32 bits are the target
    ipaddress.IPv6Network("::ffff:0:0/96"),
    ipaddress.IPv6Network("64:ff9b::/96"),
)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and port to addresses as text; raises OSError if there are none."""


def is_public(address: IpAddress) -> bool:
    """Return whether an address is public, that is, reachable from the internet.

    It has its own tables, because those of `ipaddress` differ between Python versions.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in network for network in _EMBEDDING_IPV4):
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_UNICAST:
            return False
    return not any(address in network for network in _NOT_PUBLIC)


async def fetch(
    url: str,
    *,
    max_bytes: int,
    resolve: Resolve,
    timeout_s: float = TIMEOUT_S,
    name: str = "image",
    is_allowed: Callable[[IpAddress], bool] = is_public,
    trusted: ssl.SSLContext | None = None,
    took: Callable[[int], Awaitable[None]] | None = None,
    headers: Mapping[str, str] = _ASK,
    content: bytes | None = None,
) -> bytes:
    """Download a picture, or send a body.

    Args:
        url: `http:` or `https:`, without a user name.
        max_bytes: limit for the answer.
        timeout_s: limit from the first DNS lookup to the last byte.
        name: name of the parameter, for messages.
        is_allowed: returns whether connections to an address are allowed.
        trusted: certificate authorities; None: the defaults.
        took: called with the number of newly received bytes; may raise.
        content: body to POST; the answer must be 2xx, without redirects, and is not read.

    Raises:
        InvalidValue: private address, wrong type, no answer, or timeout.
        BodyTooLarge: more than `max_bytes`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(REDIRECTS + 1):
                target = check_url(url, name)
                address = await _address(target, name, resolve, is_allowed)
                # one client per URL: a connection never serves two names
                async with httpx2.AsyncClient(
                    verify=trusted or authorities(), trust_env=False, timeout=None
                ) as client:
                    request = client.build_request(
                        "GET" if content is None else "POST",
                        target.copy_with(host=address, fragment=None),
                        headers={**headers, "host": target.netloc.decode("ascii")},
                        content=content,
                        extensions={"sni_hostname": target.raw_host.decode("ascii").strip("[]")},
                    )
                    answer = await client.send(request, stream=True)
                    try:
                        if content is not None and answer.is_success:
                            return b""
                        if content is not None or answer.status_code not in _REDIRECTED:
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
    """The default certificate authorities. The first call takes 100 ms."""
    return httpx2.create_ssl_context()


def check_url(url: str, name: str) -> httpx2.URL:
    """Parse an http or https URL without a user name; InvalidValue for any other URL."""
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
    target: httpx2.URL, name: str, resolve: Resolve, is_allowed: Callable[[IpAddress], bool]
) -> str:
    """The address to connect to; refuses a host if any of its addresses is not allowed."""
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        texts = await resolve(target.raw_host.decode("ascii").strip("[]"), port)
        addresses = [ipaddress.ip_address(text) for text in texts]
    except (OSError, ValueError) as error:
        raise _wrong(name, "leads to a host that has no address") from error
    if not addresses or not all(map(is_allowed, addresses)):
        raise _wrong(name, "leads to an address that is not public")
    return str(min(addresses, key=lambda address: address.version))


async def _read(
    answer: httpx2.Response,
    max_bytes: int,
    name: str,
    took: Callable[[int], Awaitable[None]] | None,
) -> bytes:
    if answer.status_code != 200:
        raise _wrong(name, f"answers with status {answer.status_code}")
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in TYPES:
        raise _wrong(name, f"has the type {kind[:40]!r}: must be one of {', '.join(TYPES)}")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise _wrong(name, "answers with a compressed file: a picture is one already")
    data = bytearray()
    too_large = BodyTooLarge(f"{name} is larger than {max_bytes} bytes", param=name)
    stated = answer.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_bytes:
        raise too_large
    counted = pieces = 0
    async for piece in answer.aiter_raw():
        data += piece
        pieces += 1
        if pieces > MOST_SMALL + len(data) // SMALL_BYTES:
            raise _wrong(name, f"answers in pieces of fewer than {SMALL_BYTES} bytes")
        if len(data) > max_bytes:
            raise too_large
        if took is not None and len(data) - counted >= COUNTED_BYTES:
            await took(len(data) - counted)
            counted = len(data)
    if took is not None:
        await took(len(data) - counted)
    return bytes(data)


def _wrong(name: str, problem: str) -> InvalidValue:
    return InvalidValue(f"{name}: the URL {problem}", param=name)
