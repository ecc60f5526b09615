"""Check the built site: its pages load nothing from other hosts.

usage: make site     (or: python docs/check_site.py FOLDER)

Links for readers are not assets. Scripts and styles are searched for addresses that they would
load; mere mentions, such as licences and XML namespaces, do not count.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

LOADS = {"src", "srcset", "data", "poster", "action", "formaction", "background"}
ELSEWHERE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)
IN_SCRIPT = re.compile(
    r"""(?:importScripts|import|fetch|\.src\s*=|loadScript|\bopen)\(?\s*["'`]((?:https?:)?//[^"'`]+)"""
)


class Assets(HTMLParser):
    """Collects the assets that a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.assets: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        attributes = {name: value or "" for name, value in attrs}
        for name, value in attributes.items():
            parts = value.split(",") if name == "srcset" else [value]
            loads = name in LOADS or (name == "href" and self._is_loaded(tag, attributes))
            self.assets += [asset for asset in parts if loads and ELSEWHERE.match(asset)]
            if name == "style":
                self.assets += IN_STYLE.findall(value)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.assets += IN_STYLE.findall(data)
        if self._inside == "script":
            self.assets += IN_SCRIPT.findall(data)

    @staticmethod
    def _is_loaded(tag: str, values: dict[str, str]) -> bool:
        named = {"canonical", "next", "prev", "alternate", "author", "license"}
        return tag in ("image", "use") or (tag == "link" and not {values.get("rel", "")} & named)


def outside(folder: Path) -> Iterator[str]:
    """Yield assets from other hosts, with the files that load them."""
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".html", ".svg"):
            page = Assets()
            page.feed(file.read_text())
            assets = page.assets
        elif file.suffix in (".css", ".js"):
            pattern = IN_STYLE if file.suffix == ".css" else IN_SCRIPT
            assets = pattern.findall(file.read_text())
        else:
            continue
        yield from (f"{file.relative_to(folder)} loads {asset}" for asset in assets)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    pages = list(root.rglob("*.html"))
    bad = list(outside(root))
    if bad or not pages:
        sys.exit("\n".join(bad) or f"{root} has no pages")
    print(f"{len(pages)} pages, nothing from other hosts")  # noqa: T201
