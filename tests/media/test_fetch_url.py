"""A URL in a request reaches public servers only, once resolved, and takes no longer than allowed.

Servers are real ones on loopback. 127.0.0.1 plays the internet, any other address what must not
be reached.
"""

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from carpool.errors import BodyTooLarge, CarpoolError, InvalidValue
from carpool.media.fetch_url import IpAddress, fetch, is_public
from carpool.media.reader import ImageIntake, PictureReader

PUBLIC = ipaddress.ip_address("127.0.0.1")
PICTURE = b"\x89PNG not really"
CERTIFIED = Path(__file__).with_name("pictures_example.pem")  # a certificate, and its key

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def ok(
    body: bytes = PICTURE, *headers: str, status: str = "200 OK", kind: str = "image/png"
) -> bytes:
    head = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def moved(to: str, status: int = 302) -> bytes:
    return ok(b"", f"location: {to}", status=f"{status} Moved")


class Site:
    """A server that answers every path as told, and remembers who asked."""

    def __init__(self, pages: dict[str, bytes | Answer]) -> None:
        self.pages, self.port, self.heads = pages, 0, list[str]()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            page = self.pages[head.split()[1]]
            if isinstance(page, bytes):
                writer.write(page)
                await writer.drain()
            else:
                await page(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    pages: dict[str, bytes | Answer], host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[Site]:
    site = Site(pages)
    server = await asyncio.start_server(site.talk, host, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()


class Names:
    """A name server. Each name has lists of addresses; the next question gets the next one."""

    def __init__(self, **names: Sequence[str]) -> None:
        self.names, self.asked = {n.replace("_", "."): list(a) for n, a in names.items()}, 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        if host not in self.names:
            raise OSError("no such name")
        answers = self.names[host]
        return (answers.pop(0) if len(answers) > 1 else answers[0]).split()


def is_allowed(address: IpAddress) -> bool:
    return address == PUBLIC


def get(url: str, pages: dict[str, bytes | Answer] | None = None, **options: Any) -> bytes:
    """What `fetch` gives for a URL in which PORT stands for that of the site."""

    async def talk() -> bytes:
        async with serving(pages or {}) as site:
            names = Names(pictures_example=["127.0.0.1"])
            asked = {"max_bytes": 1000, "resolve": names, "is_allowed": is_allowed, **options}
            return await fetch(url.replace("PORT", str(site.port)), **asked)

    return asyncio.run(talk())


async def test_a_picture_is_fetched_from_the_address_that_was_checked() -> None:
    names = Names(pictures_example=["127.0.0.1", "10.0.0.1"])  # later: somewhere private
    async with serving({"/a.png?b=c": ok()}) as site:
        url = f"http://pictures.example:{site.port}/a.png?b=c#d"
        data = await fetch(url, max_bytes=1000, resolve=names, is_allowed=is_allowed)
        [head], asked = site.heads, names.asked

    assert (data, asked) == (PICTURE, 1)
    lines = head.lower().split("\r\n")
    assert lines[0] == "get /a.png?b=c http/1.1"
    assert [line.split(":")[1] for line in lines if line.startswith("host:")] == [
        " pictures.example"
    ]
    assert "accept-encoding: identity" in lines
    assert not [line for line in lines if line.startswith(("cookie", "authorization", "referer"))]


@pytest.mark.parametrize(
    "kind", ["image/png", "IMAGE/JPEG", "image/webp; x=y", "application/octet-stream"]
)
def test_types_of_pictures_are_taken(kind: str) -> None:
    assert get("http://pictures.example:PORT/a", {"/a": ok(kind=kind)}) == PICTURE


# Addresses


# IANA's special-purpose address registries, line by line, multicast, what lies outside of global
# unicast, and the addresses at which clouds tell secrets
NOT_PUBLIC = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32", "192.0.0.9/32", "192.0.0.10/32",
    "192.0.0.170/31", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24",
    "192.88.99.2/32", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24",
    "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32", "168.63.129.16/32",
    "169.254.169.254/32", "169.254.170.2/32", "100.100.100.200/32", "192.0.0.192/32", "::1/128",
    "::/128", "::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64",
    "2001::/23", "2001::/32", "2001:1::1/128", "2001:1::2/128", "2001:1::3/128", "2001:2::/48",
    "2001:3::/32", "2001:4:112::/48", "2001:10::/28", "2001:20::/28", "2001:30::/28",
    "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7",
    "fe80::/10", "fec0::/10", "ff00::/8", "fd00:ec2::254/128", "fd20:ce::254/128", "4000::/2",
    "8000::/1", "200::/7", "::ffff:10.0.0.0/104", "::ffff:168.63.129.16/128",
    "64:ff9b::10.0.0.0/104", "64:ff9b::a83f:8110/128", "64:ff9b::a9fe:a9fe/128",
    "64:ff9b::127.0.0.0/104",
]  # fmt: skip


def test_no_address_of_a_special_purpose_is_public() -> None:
    for network in map(ipaddress.ip_network, NOT_PUBLIC):
        for address in (network[0], network[network.num_addresses // 2], network[-1]):
            assert not is_public(address), address
    assert not is_public(ipaddress.ip_address("fe80::1%eth0"))


def test_what_is_public_does_not_depend_on_the_tables_of_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version in (ipaddress.IPv4Address, ipaddress.IPv6Address):
        for name in ("is_global", "is_private", "is_reserved", "is_link_local"):
            monkeypatch.delattr(version, name)

    test_no_address_of_a_special_purpose_is_public()
    assert is_public(ipaddress.ip_address("1.1.1.1"))


def test_public_addresses_are_public() -> None:
    public = [
        "1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101",
        "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "168.63.129.15",
        "168.63.129.17", "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.88.98.255",
        "192.88.100.0", "198.17.255.255", "198.20.0.0", "223.255.255.255", "2001:200::",
        "2001:db7:ffff::", "2001:db9::", "2003::", "3fff:1000::", "3ffe:ffff::",
    ]  # fmt: skip
    assert [text for text in public if not is_public(ipaddress.ip_address(text))] == []


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "127.1", "0",
     "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:0001]",
     "169.254.169.254", "10.1.2.3", "192.168.0.1", "[fe80::1]", "[fd00:ec2::254]", "0.0.0.0"],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_this_machine_is_not_reached_however_its_address_is_written(
    scheme: str, host: str
) -> None:
    """With the system's own resolver and the rule of production."""

    async with serving({"/": ok()}, "0.0.0.0") as site:
        intake = ImageIntake(PictureReader(allow_remote=True))
        with pytest.raises(InvalidValue, match=r"not public|has no address"):
            await intake.open(f"{scheme}://{host}:{site.port}/")
        assert site.heads == []


@pytest.mark.parametrize(
    "url",
    ["http://0177.0.0.1/", "http://a@127.0.0.1/", "http://pictures.example@127.0.0.1/",
     "http://a:b@pictures.example/", "http://pictures.example\\@127.0.0.1/", "http:///x", "http://",
     "http:x", "http://pictures.example:99999/", "http://pictures.example:x/", "http://[::1/",
     "http://①②⑦.0.0.1/", "http://pictures.example\r\nx: y/", "http://exa mple/", "http://\ud800/",
     "file:///etc/passwd", "ftp://pictures.example/", "//pictures.example/", "pictures.example",
     "http://unknown.example/", "http://pictures.example%00.x/", "http://" + "a" * 70_000],
)  # fmt: skip
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match="image: the URL ") as refused:
        get(url)

    assert refused.value.param == "image"
    assert len(refused.value.message) < 160


def test_a_url_with_a_user_is_refused_although_its_host_is_public() -> None:
    with pytest.raises(InvalidValue, match="names a user: leave out what is before the @"):
        get("http://a:b@pictures.example:PORT/", {"/": ok()})


def test_a_host_with_one_private_address_among_its_own_is_refused() -> None:
    for addresses in ("127.0.0.1 10.0.0.1", "10.0.0.1 127.0.0.1", "127.0.0.1 ::1", ""):
        with pytest.raises(InvalidValue, match="an address that is not public"):
            get("http://pictures.example:PORT/", resolve=Names(pictures_example=[addresses]))


# Redirects


async def test_redirects_are_followed_to_other_paths_and_hosts() -> None:
    names = Names(pictures_example=["127.0.0.1"], other_example=["127.0.0.1"])
    pages: dict[str, bytes | Answer] = {
        "/a": moved("/b", 301), "/b": moved("c", 307), "/c": moved("//pictures.example:PORT/d"),
    }  # fmt: skip

    async with serving(pages) as site:
        pages["/c"] = moved(f"//other.example:{site.port}/d", 308)
        pages["/d"] = ok()
        url = f"http://pictures.example:{site.port}/a"
        data = await fetch(url, max_bytes=1000, resolve=names, is_allowed=is_allowed)
        assert data == PICTURE
    assert names.asked == 4


@pytest.mark.parametrize(
    "to",
    ["http://private.example:PORT/", "http://127.0.0.2:PORT/", "//127.0.0.2:PORT/",
     "https://127.0.0.2:PORT/", "http://a@private.example:PORT/"],
)  # fmt: skip
async def test_a_redirect_to_a_private_address_is_not_followed(to: str) -> None:
    names = Names(**{"pictures_example": ["127.0.0.1"], "private_example": ["127.0.0.2"],
                     "127_0_0_2": ["127.0.0.2"]})  # fmt: skip
    async with serving({"/": ok()}, "127.0.0.2") as private:
        pages = {"/": moved(to.replace("PORT", str(private.port)))}
        async with serving(dict(pages)) as site:
            url = f"http://pictures.example:{site.port}/"
            with pytest.raises(InvalidValue, match=r"not public|names a user"):
                await fetch(url, max_bytes=1000, resolve=names, is_allowed=is_allowed)
            assert len(site.heads) == 1
        assert private.heads == []


def test_a_name_that_becomes_private_between_redirects_is_not_followed() -> None:
    names = Names(pictures_example=["127.0.0.1", "10.0.0.1"])

    with pytest.raises(InvalidValue, match="not public"):
        get("http://pictures.example:PORT/a", {"/a": moved("/b"), "/b": ok()}, resolve=names)


@pytest.mark.parametrize(
    "to", ["file:///etc/passwd", "ftp://pictures.example/", "data:image/png,x"]
)
def test_a_redirect_to_another_scheme_is_not_followed(to: str) -> None:
    with pytest.raises(InvalidValue, match="not http: or https:"):
        get("http://pictures.example:PORT/a", {"/a": moved(to)})


def test_redirects_end() -> None:
    with pytest.raises(InvalidValue, match="leads on more than 3 times"):
        get("http://pictures.example:PORT/a", {"/a": moved("/a")})


# Size, time and type


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    while True:
        writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
        await writer.drain()


async def until_closed(writer: asyncio.StreamWriter) -> None:
    writer.write(ok(PICTURE)[:-3])
    await writer.drain()
    await asyncio.Event().wait()


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    "page", [endless, ok(b"x" * 1001), ok(b"x", "content-length: 9" + "9" * 40)[:-1]]
)
def test_more_bytes_than_allowed_are_not_read(page: bytes | Answer) -> None:
    with pytest.raises((BodyTooLarge, InvalidValue), match=r"larger than 1000|could not be"):
        get("http://pictures.example:PORT/a", {"/a": page})


def test_as_many_bytes_as_allowed_are_read() -> None:
    assert len(get("http://pictures.example:PORT/a", {"/a": ok(b"x" * 1000)})) == 1000


@pytest.mark.parametrize("page", [until_closed, silent])
def test_a_server_that_drips_or_says_nothing_is_given_up(page: Answer) -> None:
    with pytest.raises(InvalidValue, match=r"took longer than 0\.2 s"):
        get("http://pictures.example:PORT/a", {"/a": page}, timeout_s=0.2)


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (ok(kind="text/html"), "has the type 'text/html': must be one of image/png"),
        (ok(kind="image/svg+xml"), "has the type"),
        (ok(kind=""), "has the type ''"),
        (ok(kind="x" * 5000), "has the type"),
        (ok(PICTURE, "content-encoding: gzip"), "answers with a compressed file"),
        (ok(PICTURE, "content-encoding: br"), "answers with a compressed file"),
        (ok(status="404 Not Found"), "answers with status 404"),
        (ok(status="206 Partial Content"), "answers with status 206"),
        (ok(status="304 Not Modified"), "answers with status 304"),
        (ok(PICTURE)[:-3], "could not be fetched"),
        (b"nonsense\r\n\r\n", "could not be fetched"),
        (b"", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000 + b"\r\n", "could not be fetched|the type"),
    ],
)
def test_what_is_no_answer_with_a_picture_is_refused(page: bytes, says: str) -> None:
    with pytest.raises(InvalidValue, match=says) as refused:
        get("http://pictures.example:PORT/a", {"/a": page})

    assert len(refused.value.message) < 200


def test_nobody_listening_is_said_without_details() -> None:
    with pytest.raises(InvalidValue, match=r"could not be fetched \(ConnectError\)"):
        get("http://pictures.example:1/")


# Certificates


async def test_a_certificate_is_held_against_the_name_not_the_address() -> None:
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(CERTIFIED)
    ours = ssl.create_default_context(cafile=str(CERTIFIED))
    names = Names(pictures_example=["127.0.0.1"], other_example=["127.0.0.1"])

    async with serving({"/": ok()}, tls=theirs) as site:
        options: Any = {"resolve": names, "is_allowed": is_allowed, "trusted": ours}
        with pytest.raises(InvalidValue, match="could not be fetched"):
            await fetch(f"https://other.example:{site.port}/", max_bytes=1000, **options)
        url = f"https://pictures.example:{site.port}/"
        with pytest.raises(InvalidValue, match="could not be fetched"):
            await fetch(url, max_bytes=1000, **{**options, "trusted": None})
        assert await fetch(url, max_bytes=1000, **options) == PICTURE


# All together


def test_a_url_in_a_request_goes_by_the_same_rules(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def ask() -> None:
        await ImageIntake(PictureReader(allow_remote=True)).open("http://127.0.0.1/key", "mask")

    with pytest.raises(CarpoolError, match="mask: the URL leads to an address that is not public"):
        asyncio.run(ask())

    assert "key" not in caplog.text


def test_urls_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    get("http://pictures.example:PORT/a?key=secret", {"/a?key=secret": ok()})

    assert "secret" not in caplog.text
