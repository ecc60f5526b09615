"""Protection from web pages: every page that a user opens can make the browser send requests here.

Two attacks, and what of a request tells them (no page can set these headers):

* DNS rebinding: the page's own name is made to point to this machine, so it may read the answers.
  `Host` has that name: a server without keys answers to addresses, which cannot be rebound, to
  localhost, and to names that its settings say.
* Cross-site requests: the page names this machine, and cannot read the answers, but starts work.
  `Origin` or `Sec-Fetch-Site` are foreign: a server without keys refuses them. With keys no page
  can do more than its user's key allows, as browsers add none by themselves.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from carpool.config import ServeSettings
from carpool.errors import HostNotAllowed, OriginNotAllowed, SettingRejected, show

PAGES = ("/docs", "/openapi.json", "/health", "/livez", "/version")
"""What links of other pages may lead to."""

SIGNED = "/v1/files/"
"""Below it any page may show pictures: their links are secret."""

_HOST = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^\[\]:]*))(?::[0-9]*)?")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def is_keyless(settings: ServeSettings) -> bool:
    """Does the server trust whoever reaches it?"""
    return not settings.api_key and settings.api_key_file is None


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The names that a server answers to, beside addresses and localhost."""

    names: frozenset[str] = frozenset()
    is_any: bool = False

    @classmethod
    def of(cls, settings: ServeSettings) -> "AllowedHosts":
        """Those of the settings. Without names any will do where keys or a socket guard the way.

        Raises:
            SettingRejected: an allowed host is not a name.
        """
        names = frozenset(_checked(settings.allowed_host))
        is_guarded = not is_keyless(settings) or settings.uds is not None
        is_any = "*" in names or (is_guarded and not names)
        return cls((names | {settings.host.lower()}) - {""}, is_any)

    def __contains__(self, host: str) -> bool:
        """Is `Host` one of ours? Its port does not matter."""
        if self.is_any:
            return True
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = (match["name"] or "").removesuffix(".")
        if match["ipv6"] or name.replace(".", "").isdecimal():
            return _is_address(match["ipv6"] or name)
        return name == "localhost" or name.endswith(".localhost") or name in self.names


class CrossOriginProtection:
    """Middleware that refuses what foreign pages send, before anything else is looked at."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, *, allows_origins: bool) -> None:
        """Wrap an application.

        Args:
            allows_origins: pages of other origins may send requests, which need a key.
        """
        self._app, self._hosts, self._allows_origins = app, hosts, allows_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        for host in headers.getlist("host"):  # none in HTTP/1.0, which browsers do not speak
            if host not in self._hosts:
                raise HostNotAllowed(
                    f"this server does not go by the name of {show(host)}, only by its address, "
                    "localhost and --host: --allowed-host NAME adds a name"
                )
        if not self._allows_origins and _is_foreign(scope, headers):
            raise OriginNotAllowed(
                "pages of other origins may not use a server without API keys; set some with "
                "--api-key, and send one"
            )


def _is_foreign(scope: Scope, headers: Headers) -> bool:
    """Does a page of another origin send this? But for links to open pages, and shown pictures."""
    origins, sites = headers.getlist("origin"), headers.getlist("sec-fetch-site")
    if scope["method"] in ("GET", "HEAD") and not origins:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == (
            "navigate",
            "document",
        )
        if (is_link and path in PAGES) or path.startswith(SIGNED):
            return False
    if any(site not in ("same-origin", "none") for site in sites):
        return True
    if sites:  # the browser knows its own origin better than a server behind a proxy
        return "null" in origins
    own = _origin(f"{scope['scheme']}://{headers.get('host', '')}")
    return any(_origin(origin) != own for origin in origins)


def _origin(text: str) -> str:
    """An origin without the port that its scheme has anyway."""
    scheme, colon, rest = text.lower().partition("://")
    return scheme + colon + rest.removesuffix(_DEFAULT_PORTS.get(scheme, "/"))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.replace("%25", "%"))
    except ValueError:
        return False
    return True


def _checked(hosts: Iterable[str]) -> Iterable[str]:
    for host in hosts:
        name = host.lower().removesuffix(".")
        if name != "*" and not _NAME.fullmatch(name):
            rule = "must be a name without scheme, port and path, or * for any"
            raise SettingRejected(f"allowed_host={host!r}: {rule}")
        yield name
