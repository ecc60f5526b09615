"""Protection against web pages: any page that a user opens can make the browser send requests.

Two attacks, recognised by headers that no page can set:

* DNS rebinding: the page's own name resolves to this machine, so the page may read the answers.
  `Host` holds that name. So a server without keys accepts only addresses (they cannot be rebound),
  localhost and the names in its settings.
* Cross-site requests: the page sends requests to this machine. It cannot read the answers, but the
  work starts. A server without keys refuses a foreign `Origin` or `Sec-Fetch-Site`. With keys such
  requests fail: browsers add no key by themselves.
"""

import ipaddress
import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from carpool.config import ServeSettings
from carpool.errors import HostNotAllowed, OriginNotAllowed, SettingRejected, show
from carpool.server.transport.middleware import HTTPMiddleware

PAGES = ("/", "/docs", "/openapi.json", "/health", "/livez", "/version")
"""Other pages may link to these."""

SIGNED = "/v1/files/"
"""Any page may show pictures below this path: their links are secret."""

_HOST = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^\[\]:]*))(?::[0-9]*)?")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Host names that the server accepts, in addition to addresses and localhost."""

    names: frozenset[str] = frozenset()
    is_any: bool = False

    @classmethod
    def of(cls, settings: ServeSettings) -> "AllowedHosts":
        """Read the names from the settings. None given, with keys or a socket: any host.

        Raises:
            SettingRejected: an allowed host is not a name.
        """
        names = {host.lower().removesuffix("."): host for host in settings.allowed_host}
        for name, host in names.items():
            if name != "*" and not _NAME.fullmatch(name):
                rule = "must be a name without scheme, port and path, or * for any"
                raise SettingRejected(f"allowed_host={host!r}: {rule}")
        is_guarded = settings.has_keys or settings.uds is not None
        is_any = "*" in names or (is_guarded and not names)
        return cls(frozenset({*names, settings.host.lower()} - {""}), is_any)

    def __contains__(self, host: str) -> bool:
        """Return whether a `Host` is allowed; its port is ignored."""
        if self.is_any:
            return True
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = (match["name"] or "").removesuffix(".")
        if match["ipv6"] or name.replace(".", "").isdecimal():
            return _is_address(match["ipv6"] or name)
        return name == "localhost" or name.endswith(".localhost") or name in self.names


class CrossOriginProtection(HTTPMiddleware):
    """Middleware that refuses requests of foreign pages, before anything else is read."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, *, is_keyless: bool) -> None:
        super().__init__(app)
        self._hosts, self._is_keyless = hosts, is_keyless

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        for host in headers.getlist("host"):  # none in HTTP/1.0, which browsers do not speak
            if host not in self._hosts:
                raise HostNotAllowed(
                    f"{show(host)} is not a name of this server: use its address, localhost or "
                    "--host, or start it with --allowed-host NAME"
                )
        if self._is_keyless and _is_foreign(scope, headers):
            raise OriginNotAllowed(
                "pages of other origins may not use a server without API keys: start it with "
                "--api-key, and send a key"
            )
        await self.app(scope, receive, send)


def _is_foreign(scope: Scope, headers: Headers) -> bool:
    """Return whether a page of another origin sent this, except for links and pictures."""
    origins, sites = headers.getlist("origin"), headers.getlist("sec-fetch-site")
    if scope["method"] in ("GET", "HEAD") and not origins:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        purpose = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
        if (purpose == ("navigate", "document") and path in PAGES) or path.startswith(SIGNED):
            return False
    if any(site not in ("same-origin", "none") for site in sites):
        return True
    if sites:  # the browser knows its own origin better than a server behind a proxy
        return "null" in origins
    server_origin = _origin(f"{scope['scheme']}://{headers.get('host', '')}")
    return any(_origin(origin) != server_origin for origin in origins)


def _origin(text: str) -> str:
    """An origin without its scheme's default port."""
    scheme, colon, rest = text.lower().partition("://")
    return scheme + colon + rest.removesuffix(_DEFAULT_PORTS.get(scheme, "/"))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.replace("%25", "%"))
    except ValueError:
        return False
    return True
