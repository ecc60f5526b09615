"""The pages of `docs/`: links lead somewhere, commands are understood, Python runs, and the built
site loads nothing from other hosts."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import make_drawing
import make_python
import pytest
from check_site import outside
from PIL import Image

from carpool.cli.main import cli
from support.browser import browsing
from support.server_process import serving
from training.shapes.judge import shows

ROOT = Path(__file__).parents[1]
PAGES = {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))}
ROOTS = {
    name: (ROOT / name).read_text()
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ARCHITECTURE.md")
}
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")
SERVER = "http://127.0.0.1:8000"
MKDOCS = ROOT / "build" / "site" / "bin" / "mkdocs"


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def anchors(text: str) -> set[str]:
    """Of a page's headings, as MkDocs and GitHub make them."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    heads = re.findall(r"^#+ (.*)$", plain, re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def broken(page: str, text: str, root: Path = ROOT) -> Iterator[str]:
    for target, anchor in LINK.findall(without_code(text)):
        file = (root / page).parent / target if target else root / page
        if not file.exists():
            yield f"{page}: {target} does not exist"
        elif anchor and anchor not in anchors(file.read_text()):
            yield f"{page}: {target}#{anchor} is no heading"


def blocks(language: str) -> list[Any]:
    found = []
    for page, text in PAGES.items():
        codes = re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)
        found += [pytest.param(c, id=f"{page[5:-3]}-{i}") for i, c in enumerate(codes)]
    return found


def commands() -> list[str]:
    """Lines that begin with `carpool`, without what a shell would do with them."""
    codes = re.findall(r"^```bash\n(.*?)^```", ROOTS["README.md"], re.S | re.M)
    codes += [param.values[0] for param in blocks("bash")]
    code = "\n".join(codes).replace("\\\n", " ")
    lines = [line for line in code.splitlines() if line.startswith("carpool ")]
    return list(dict.fromkeys(re.split(r" [|>&]", line)[0] for line in lines))


@pytest.mark.parametrize("page", [*PAGES, *ROOTS])
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: str) -> None:
    assert list(broken(page, {**PAGES, **ROOTS}[page])) == []


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A head: one\n")
    page = "[a](there.md#a-head-one) [b](there.md#two) [c](gone.md) `[d](code.md)`"

    assert list(broken("page.md", page, tmp_path)) == [
        "page.md: there.md#two is no heading", "page.md: gone.md does not exist",
    ]  # fmt: skip


@pytest.mark.parametrize("line", commands())
def test_the_command_lines_of_the_pages_are_understood(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no {words[0]}"
        command, words = found, words[1:]

    command.make_context(command.name, list(words))  # raises a usage error otherwise


def test_the_make_targets_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {(page, target) for page, text in {**PAGES, **ROOTS}.items()
             for target in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", text, re.M)}  # fmt: skip

    assert named
    assert [one for one in named if not re.search(rf"^{''.join(one[1])}:", makefile, re.M)] == []


@pytest.mark.parametrize("code", [b for b in blocks("python") if SERVER not in b.values[0]])
def test_the_python_of_the_pages_runs(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    exec(compile(code, "page", "exec"), {"__name__": "page"})

    assert list(tmp_path.rglob("*.png")) or "@app.post" in code  # of a receiver of events


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("model", "kind", "files"),
    [
        ("shapes", "images", {"star.png", "outlined.png"}),
        pytest.param("shapes-video", "videos", {"clip.mp4"}, marks=pytest.mark.slow),
    ],
)
def test_the_clients_of_the_pages_run_against_a_server(
    model: str, kind: str, files: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = [b.values[0] for b in blocks("python") if SERVER in b.values[0]]
    codes = [code for code in codes if ("client.videos." in code) is (kind == "videos")]

    assert codes
    with serving(model=model) as server:
        for code in codes:
            exec(compile(code.replace(SERVER, server.url), "page", "exec"), {})

    assert {file.name for file in tmp_path.iterdir()} >= files
    if kind == "images":
        assert shows(Image.open("star.png"), "a yellow star on a black background")


def test_the_page_of_the_python_api_is_what_the_code_makes() -> None:
    assert make_python.PAGE.read_text() == make_python.page(), "run `make docs`"


def test_the_drawing_is_what_its_schedule_makes_and_says_how_many_forwards() -> None:
    page = PAGES["docs/how-it-works.md"]

    assert make_drawing.PAGE.read_text() == make_drawing.page(), "run `make docs`"
    shared, alone = len(make_drawing.FORWARDS), make_drawing.alone()
    assert f"share {shared} forwards; alone they would take {alone}" in page


@pytest.mark.parametrize(
    "page",
    [
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<script src="//cdn.example/a.js"></script>',
        '<img srcset="a.png 1x, https://cdn.example/b.png 2x">',
        "<style>@import 'https://cdn.example/a.css';</style>",
        '<p style="background: url(https://cdn.example/a.png)">',
        '<script>fetch("https://cdn.example/data")</script>',
    ],
)
def test_an_asset_from_another_host_is_found(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f'<a href="https://elsewhere.example">a link</a>{page}')

    assert len(list(outside(tmp_path))) == 1


def test_links_that_a_reader_may_follow_are_no_assets(tmp_path: Path) -> None:
    head = '<link rel="canonical" href="https://here.example/"><img src="a.png">'
    (tmp_path / "page.html").write_text(f'{head}<a href="https://elsewhere.example">a link</a>')

    assert list(outside(tmp_path)) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    if not MKDOCS.exists():
        pytest.skip("`make site` installs MkDocs; CI runs it first")
    folder = tmp_path_factory.mktemp("site") / "html"
    done = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(150)
def test_the_site_loads_nothing_from_other_hosts_and_each_page_leads_to_others(site: Path) -> None:
    pages = {file.stem: file.read_text() for file in site.glob("*.html") if file.stem != "404"}

    assert pages.keys() >= {Path(page).stem for page in PAGES}
    assert list(outside(site)) == []
    for mark, lacking in (("md-footer__link--", []), ("the words of these pages", ["glossary"])):
        assert [name for name, text in pages.items() if mark not in text] == lacking


@pytest.mark.timeout(150)
def test_the_site_is_searched_from_a_folder_without_a_server(site: Path) -> None:
    with browsing() as browser, closing(browser.new_context(offline=True)) as context:
        page = context.new_page()
        page.goto((site / "faq.html").as_uri())
        page.locator("input[data-md-component=search-query]").press_sequentially("sampler")
        page.locator(".md-search-result__item").first.wait_for(timeout=90_000)


SHAPES = "(?s)## Side by side: shapes.*?"
FIGURES = {  # what each bold figure of the README's table is on the page that its row names
    "docs/benchmarks.md": [
        r"16 requests: engine, `continuous` \| [^|]+\| ([\d.]+)x plain diffusers",
        rf"{SHAPES}\| Carpool `continuous`, 8 \|[^\n]* s, ([\d.]+) of plain \|",
        rf"{SHAPES}guidance at ([\d.]+) times what plain diffusers can do",
    ],
    "docs/scheduling.md": [
        rf"\| {costs} \| mean latency, {limit} \| [\d.]+ \| ([\d.]+) \|"
        for costs in ("known", "learned")
        for limit in ("mean of ratios", "worst point")
    ],
    "docs/numerics.md": [r"in `exact` it was ([\d.]+),", r"each of the (\d+) rows"],
    "docs/reliability.md": [r"\n(\d+) cases; server errors", r"bodies: \*\*(\d+)\*\*"],
}


def test_the_figures_of_the_readme_are_those_of_the_pages_that_it_names() -> None:
    said: dict[str, list[str]] = {}
    for row in ROOTS["README.md"].splitlines():
        if figures := re.findall(r"\*\*([\d.]+)\*\*", row):
            [page] = re.findall(r"\]\((docs/[a-z-]+\.md)\)", row)
            said.setdefault(page, []).extend(figures)

    found = {
        page: [re.findall(pattern, PAGES[page])[0] for pattern in patterns]
        for page, patterns in FIGURES.items()
    }

    assert said == found


def test_what_other_pages_say_of_the_scheduler_is_on_its_own_page() -> None:
    own = PAGES["docs/scheduling.md"]
    worst, worst_p99 = re.findall(r"\| learned \| [^|]*worst point \| [\d.]+ \| ([\d.]+)", own)
    means = re.findall(r"\| mean latency, mean of ratios \| [\d.]+ \| ([\d.]+)", own)
    floored = re.findall(r"the mean is ([\d.]+) with known costs\sand ([\d.]+) with", own)[0]
    again = re.findall(r"(\d+) of these 264 were simulated with 10 seeds", own)[0]

    for text in (ROOTS["README.md"], PAGES["docs/limits.md"]):
        assert f"{again} of 132" in text
        assert means[1] in text
        assert f"worst {worst}, p99 {worst_p99}" in text
    assert f"{floored[0]} with known costs and {floored[1]}" in PAGES["docs/limits.md"]
    assert "limits hold at 264 of 264." in own


TIMES_PLAIN, LONE = r"([\d.]+)x plain diffusers, ", r"([\d.]+)x the speed of plain diffusers"


@pytest.mark.parametrize(
    ("page", "sentence", "measured"),
    [
        ("how-it-works", r"take ([\d.]+) times less CPU time", TIMES_PLAIN),
        ("how-it-works", r"run bare ([\d.]+) times less", r"the ceiling is ([\d.]+)x"),
        ("how-it-works", r"runs at ([\d.]+) times", LONE),
        (
            "how-it-works",
            r"the mean latency is ([\d.]+) of that server's",
            FIGURES["docs/benchmarks.md"][1],
        ),
        ("coming-from", r"take ([\d.]+) times less CPU time", TIMES_PLAIN),
        ("coming-from", r"\(([\d.]+) times there\)", LONE),
    ],
)
def test_a_benchmark_that_another_page_quotes_is_that_of_its_own_page(
    page: str, sentence: str, measured: str
) -> None:
    quoted = re.findall(sentence, PAGES[f"docs/{page}.md"])

    assert quoted == re.findall(measured, PAGES["docs/benchmarks.md"])[:1]
