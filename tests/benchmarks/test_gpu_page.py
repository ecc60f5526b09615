"""What `make gpu-page` runs where there is a GPU: the parts of it that need none."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_everything import Part, Ran, page, parts, run
from support.pretended.process import on_pretended_device


def test_the_page_has_what_was_found_and_what_failed_and_what_took_too_long() -> None:
    table = "print('| a |'); print('| --- |'); print('| 1 |')"
    wanted = [
        Part("good", ("-c", table), 60),
        Part("bad", ("-c", "import sys; print('no driver'); sys.exit(3)"), 60),
        Part("late", ("-c", "import time; print('began', flush=True); time.sleep(60)"), 1.5),
    ]

    ran = [run(part) for part in wanted]

    assert [one.status for one in ran] == [0, 3, None]
    text = page(["- a machine"], ran)
    assert "\n| --- |\n| 1 |\n" in text
    assert "it failed, with status 3.\n\n```\nno driver\n```" in text
    assert "it was ended after 2 s.\n\n```\nbegan\n```" in text


def test_a_page_that_a_command_writes_stands_there_without_what_it_says_beside() -> None:
    writes = (
        "import pathlib, sys; print('a record'); print('a warning', file=sys.stderr); "
        "pathlib.Path(sys.argv[2]).write_text('# Title\\n\\n| a |\\n| --- |\\n| 1 |\\n')"
    )

    ran = run(Part("models", ("-c", writes), 60, writes_page=True))

    assert ran.status == 0
    assert "\n### Title\n\n| a |\n| --- |\n| 1 |\n" in page([], [ran])
    assert "a record" not in ran.output
    assert "a warning" not in ran.output


@pytest.mark.parametrize("last", ["|---|", "done"])
def test_nothing_of_what_a_command_found_is_cut_off(last: str) -> None:
    ran = Ran(Part("good", ("-c", ""), 1), 0, "\n".join([*map(str, range(100)), last]), 1.0)

    assert "\n0\n1\n" in page([], [ran])


@pytest.mark.parametrize(
    "part",
    [*parts("cuda", "shapes"), *parts("cpu", "shapes")],
    ids=lambda part: f"{part.title[:8]}-{'tiny' if '--tiny' in part.command else 'device'}",
)
def test_each_command_of_the_page_exists_and_takes_its_flags(
    part: Part, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: to import torch once more for each of them takes seconds."""
    how, what, *flags = part.command
    monkeypatch.setattr(sys, "argv", [what, *flags, "--help"])

    status: object = 0
    try:
        if how == "-c":
            exec(what, {"__name__": "__main__"})
        else:
            assert how == "-m"
            found = importlib.util.find_spec(what)
            assert found is not None
            runpy.run_path(str(found.origin), run_name="__main__")
    except SystemExit as ended:
        status = ended.code

    assert not status
    told = capsys.readouterr().out
    for flag in (one for one in flags if one.startswith("--")):
        assert flag in told


@pytest.mark.timeout(180)  # the first one waits for the process to start
@on_pretended_device
def test_the_benchmark_of_streaming_is_right_on_an_accelerator() -> None:
    import torch

    from benchmarks.stream_device import measure, tiny

    torch.set_grad_enabled(False)

    lines = list(measure(tiny(torch.device("pretended")), rounds=2))

    rows = [line.split("|") for line in lines if line.startswith("| ") and "---" not in line][1:]
    assert [row[1].strip() for row in rows] == [
        "one sweep for all", "one sweep for each size", "one by one", "diffusers, one by one",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_the_page_runs_on_a_cpu_with_tiny_models(tmp_path: Path) -> None:
    command = "-m", "benchmarks.gpu_everything", "--device", "cpu", "--output"
    ended = subprocess.run([sys.executable, *command, tmp_path / "page.md"], check=False)

    text = (tmp_path / "page.md").read_text()
    assert not ended.returncode, text
    assert "its figures mean nothing" in text
    assert "| one sweep for all |" in text
    assert '{"kind"' not in text
