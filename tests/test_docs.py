"""The pages say what is true: README's code runs, and reference.md is what the code makes."""

import re
from pathlib import Path

import make_files
import make_http
import make_scheduling
import make_weight
import pytest
from make_reference import PAGE, page
from PIL import Image

from support import rooms
from support.server_process import serving
from training.shapes.judge import shows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SERVER = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", [b for b in blocks("python") if SERVER not in b])
def test_the_python_of_the_readme_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})

    assert list(tmp_path.glob("*.png"))


@pytest.mark.timeout(150)
def test_the_openai_example_of_the_readme_runs_against_a_server_as_make_serve_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [block] = [block for block in blocks("python") if SERVER in block]
    monkeypatch.chdir(tmp_path)

    with serving(model="shapes") as server:
        exec(compile(block.replace(SERVER, server.url), "README.md", "exec"), {})

    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["7.png", "8.png"]
    for name in ("7.png", "8.png"):
        assert shows(Image.open(tmp_path / name), "a red circle on a blue background")


def test_reference_is_what_the_code_makes() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_the_page_of_http_fields_is_what_the_code_makes() -> None:
    assert make_http.PAGE.read_text() == make_http.page(), "run `make docs`"


def test_contributing_names_what_there_is() -> None:
    """Make targets, files and folders, as far as they are written as one."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = {word for line in re.findall(r"^make ([a-z -]+?)(?:  |$)", text, re.M)
               for word in line.split()}  # fmt: skip
    missing = [
        t for t in targets if not re.search(rf"^{t}:", (ROOT / "Makefile").read_text(), re.M)
    ]
    paths = re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.[a-z]+)?)`", text)
    roots = (ROOT, ROOT / "src" / "carpool", ROOT / "src" / "carpool" / "engine")
    missing += [one for one in paths if not any((root / one).exists() for root in roots)]

    assert targets
    assert paths
    assert missing == []


def test_the_tests_that_pages_name_exist() -> None:
    pages = [path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
    named = {
        m.groups() for page in pages for m in re.finditer(r"`(?:tests/)?([\w/]+\.py)::(\w+)", page)
    }
    missing = [
        (file, name)
        for file, name in sorted(named)
        if not re.search(rf"^(.*def )?{name}\b", (ROOT / "tests" / file).read_text(), re.M)
    ]

    assert named
    assert missing == []


def test_each_file_says_in_a_sentence_what_it_is() -> None:
    listed = [line for line in make_files.lines() if line.startswith("- ")]

    assert all(re.search(r"`: .*[.!?]$", line) for line in listed)
    assert "- `fiber.py`: " in "\n".join(listed)


def test_the_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= 18_000


def test_the_page_about_scheduling_is_made_of_its_data_file() -> None:
    points, text = make_scheduling.read(), make_scheduling.PAGE.read_text()

    assert text == make_scheduling.page(points), "run `make simulate`"
    assert len(points) == len(list(make_scheduling.studies())) * len(make_scheduling.LOADS)
    assert len(re.findall(r"\w[\w.-]*", text)) <= 1500


@pytest.mark.parametrize("room", rooms.ROOMS)
def test_each_file_of_a_room_is_in_one_mechanism_of_the_page_of_weight(room: str) -> None:
    about = make_weight.ROOMS[room]
    listed = [file for entry in about["mechanisms"] for file in make_weight.files_of(room, entry)]

    assert sorted(listed) == rooms.files_of(room), "docs/weight.toml"
    assert about["budget"] == rooms.LINES[room][0], "docs/weight.toml"


def test_a_version_takes_at_most_fifteen_lines_of_the_changelog() -> None:
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert len([line for line in version.splitlines()[1:] if line]) <= 15, version[:20]
