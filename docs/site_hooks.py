"""Hooks of MkDocs for `make site`: pages of the project's root, and links that leave `docs/`.

Pages link to files as on GitHub (`../examples/jobs.py`). In the site, such links lead to pages or
to copies under `files/`. Broken links stay unchanged, and strict MkDocs reports them. Pages that
`mkdocs.yml` does not list appear under "More".
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
}
SHIM = "https://unpkg.com/iframe-worker/shim"  # the script of Material's plug-in `offline`
GLOSSARY = '[Glossary](glossary.md){ title="the words of these pages" }'
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add pages of the project's root, and linked files outside of `docs/`."""
    for name, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            text = (ROOT / name).read_text()
            files.append(File.generated(config, page, content=text))
    targets = {
        target
        for file in files.documentation_pages()
        for link in LINK.finditer(file.content_string)
        if (target := _outside(link[1], file.src_uri))
    }
    for target in sorted(targets):
        files.append(File.generated(config, _copy(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links out of `docs/` to the files' places in the site."""
    uri = page.file.src_uri

    def led(link: re.Match[str]) -> str:
        target, anchor = _target(link[1], uri), link[2] or ""
        if target in PAGES:
            return PAGES[target] + anchor
        if target.startswith("docs/"):
            return target.removeprefix("docs/") + anchor
        return _copy(target) if _outside(link[1], uri) else link[0]

    words = "" if uri == "glossary.md" else f"\n\n{GLOSSARY}\n"
    return LINK.sub(led, markdown) + words


def on_post_build(config: Any) -> None:
    """Load the script for offline search from this site, not from another host."""
    for page in Path(config["site_dir"]).glob("*.html"):
        page.write_text(page.read_text().replace(SHIM, "assets/iframe-worker.js"))


def on_nav(nav: Any, config: Any, files: Files) -> Any:
    """Add unlisted pages at the end of the navigation."""
    listed = {page.file.src_uri for page in nav.pages}
    rest = [file for file in files.documentation_pages() if file.src_uri not in listed]
    if rest:
        pages = [Page(None, file, config) for file in rest]
        nav.items.append(Section("More", pages))
        nav.pages.extend(pages)
    return nav


def _target(link: str, page: str) -> str:
    """The target file of a link, relative to the project's root."""
    folder = "" if page in PAGES.values() and page != "index.md" else "docs"
    return posixpath.normpath(posixpath.join(folder, link))


def _outside(link: str, page: str) -> str:
    """The target file if it exists outside of `docs/` and is not a page; otherwise ""."""
    target = _target(link, page)
    inside = target in PAGES or target.startswith(("docs/", ".."))
    return "" if inside or not (ROOT / target).is_file() else target


def _copy(target: str) -> str:
    return f"files/{target}" + ("" if target.endswith(".png") else ".txt")
