"""The runs behind docs/reliability.md, in short; the page; and that the checkers see harm."""

import asyncio
import io
import os
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from carpool_lab.load.generator import RequestResult
from proof import chaos, chaos_report, fuzz, hostile, overload, soak
from proof.attacks import ATTACKS, BROWSER, bombs
from proof.diary import Diary, Ending, findings
from proof.disk import Disk
from proof.history import Seen
from proof.page import PAGE, table, with_section
from proof.tickets import Ticket
from training.shapes.draw import draw, parse

ROOT = Path(__file__).parents[1]


def ticket(prompt: str, seed: int = 0) -> Ticket:
    return Ticket({"prompt": prompt}, draw(parse(prompt), random.Random(seed)))


def file(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    return buffer.getvalue()


RED, BLUE = (
    ticket("a red circle on a white background"),
    ticket("a blue star on a white background"),
)
BOTH = [RED, BLUE]


def ended(files: list[bytes], failure: str = "") -> Diary:
    return Diary([Ending("waits", RED, files, failure)])


# The diary


def test_who_got_its_own_picture_once_has_no_complaint() -> None:
    assert findings(ended([file(RED.picture)]), BOTH).are_none


@pytest.mark.parametrize(
    ("diary", "what", "seen"),
    [
        (ended([]), "lost", ["waits: no picture"]),
        (ended([], "internal_error"), "lost", ["waits: internal_error"]),
        (ended([file(RED.picture)] * 2), "duplicated", ["waits: 2"]),
        (ended([file(BLUE.picture)]), "foreign", 1),
        (ended([file(Image.new("RGB", RED.picture.size))]), "spoiled", 1),
        (ended([file(ticket(RED.prompt, seed=1).picture)]), "spoiled", 1),
        (Diary(jobs=[Seen("submit", request="a"), Seen("ack", "1", request="a")]), "lost",
         ["1 is lost: still queued in the end"]),
        (Diary(jobs=[Seen("poll", "1", state="completed")]), "duplicated",
         ["more jobs than requests: 1"]),
    ],
)  # fmt: skip
def test_harm_is_seen_and_named(diary: Diary, what: str, seen: object) -> None:
    found = findings(diary, BOTH)

    assert getattr(found, what) == seen
    assert not found.are_none


def test_a_failure_that_a_fault_on_purpose_makes_is_no_loss() -> None:
    assert findings(ended([], "out_of_memory"), BOTH).are_none


# The runs in short


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_broken_server_loses_nothing_and_comes_back() -> None:
    done = asyncio.run(chaos.run(minutes=9, seed=5, limit=9))

    assert chaos_report.problems(done) == []
    assert len({one.what for one in done.struck}) == 9
    assert {one.kind for one in done.diary.endings} == {"waits", "streams", "polls"}
    assert "Lost: **0**" in chaos_report.page(done)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_broken_fleet_loses_nothing_and_comes_back() -> None:
    done = asyncio.run(chaos.run(minutes=12, seed=5, limit=11, workers=3))

    assert chaos_report.problems(done) == []
    assert len({one.what for one in done.struck}) == 11
    assert "connection held for 2 s" in {one.what for one in done.struck}
    assert "--workers 3" in chaos_report.page(done)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_times_too_much_is_refused_quickly_and_the_rest_is_done() -> None:
    done = asyncio.run(overload.measure(seconds=10))

    assert [one.failure for one in done.accepted if one.failure] == []
    assert len(done.refused_s) > len(done.outcomes) / 2
    assert statistics.median(done.refused_s) < 4 * overload.REFUSED_S  # others may use the machine
    assert "| a refusal takes, median |" in overload.page(done)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_is_used_is_measured() -> None:
    done = asyncio.run(soak.run(minutes=0.5, seed=1))

    assert done.findings.are_none
    assert {(one.process, one.measure) for one in done.growths} >= {
        ("front", "open files"), ("worker", "threads"), ("worker", "resident memory (MiB)")
    }  # fmt: skip
    assert all(one.early > 0 and one.late > 0 for one in done.growths)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hostile_tenant_harms_nobody() -> None:
    attacks = "requests_in_bodies", "pages_of_other_origins"
    done = asyncio.run(hostile.measure(attacks, ("two models", "no keys")))

    assert [one for one in hostile.problems(done) if "times as long" not in one] == []  # busy cores
    assert [len(one.answers) > 10 for one in done] == [True] * 3
    assert "| requests in bodies, two models |" in hostile.page(done)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not fuzz.PROGRAM.exists(), reason="`make fuzz` installs schemathesis")
def test_what_the_document_allows_and_forbids_is_answered_as_it_says() -> None:
    done = asyncio.run(fuzz.fuzz("shapes", examples=2, seed=3))

    assert done.failures == []
    assert done.cases > 200
    assert not done.statuses.keys() & {500, 502, 503}


# What they make of it


def attacked(picture_s: float, memory_mib: float, wrong: list[str]) -> hostile.Attacked:
    quiet, felt = (
        hostile.Felt([1.0], [0.1], [100.0]),
        hostile.Felt([picture_s], [0.1], [memory_mib]),
    )
    return hostile.Attacked("an attack", {"200": 1}, wrong, felt, quiet)


@pytest.mark.parametrize(
    ("picture_s", "memory_mib", "wrong", "told"),
    [
        (2.0, 400.0, [], []),
        (2.1, 100.0, [], ["an attack: the neighbour waits 2.1 times as long"]),
        (1.0, 401.0, [], ["an attack: the front grows by 301 MiB"]),
        (1.0, 100.0, ["it was let in"], ["an attack, one worker: it was let in"]),
    ],
)
def test_what_a_tenant_feels_of_another_is_held_against_the_promise(
    picture_s: float, memory_mib: float, wrong: list[str], told: list[str]
) -> None:
    assert hostile.problems([attacked(picture_s, memory_mib, wrong)]) == told


def test_every_attack_is_what_its_name_says_and_fits_its_bounds() -> None:
    assert ATTACKS.keys().isdisjoint(BROWSER)
    assert max(map(len, bombs().values())) < 40 << 20
    for name, content in bombs().items():
        assert content[:4] in (b"\x89PNG", b"\xff\xd8\xff\xff", b"\xff\xd8\xff\xe0"), name


def test_faults_come_equally_often_and_as_the_seed_says() -> None:
    kinds = ["a", "b", "c"]

    first, again = (list(islice(chaos.order(kinds, random.Random(7)), 9)) for _ in range(2))

    assert first == again
    assert Counter(first) == dict.fromkeys(kinds, 3)


def test_a_server_that_comes_back_late_breaks_the_promise() -> None:
    struck = [
        chaos_report.Struck("worker killed", away_s=14.0, loading_s=9.1),
        chaos_report.Struck("worker stopped", away_s=19.0, loading_s=9.1),
        chaos_report.Struck("front killed", away_s=15.0, loading_s=9.1),
    ]
    done = chaos_report.Run(1, 1, struck, ended([file(RED.picture)]), BOTH, [], "a disk")

    assert chaos_report.problems(done) == ["front killed: ready after 5.9 s beyond loading"]
    assert "| front killed | 1 | 15.0 | 15.0 | 9.1 | 5.9 |" in chaos_report.page(done)


def test_what_grows_is_told_and_the_warm_up_does_not_count() -> None:
    samples = [
        soak.Sample("front", at_s, {"open files": 30.0, "threads": 9 + at_s / 100})
        for at_s in range(10, 100)
    ]
    samples += [
        soak.Sample("front", at_s, {"open files": 5.0, "threads": 1.0}) for at_s in range(9)
    ]

    growths = soak.growths(samples, seconds=100)
    done = soak.Run(1, growths, Diary(), BOTH)

    assert [(one.measure, round(one.share, 3)) for one in growths] == [
        ("open files", 0.0), ("threads", 0.035)
    ]  # fmt: skip
    assert done.problems() == ["front: threads grew by 3.5%"]


@pytest.mark.parametrize("leaked", [0, 1])
def test_connections_come_and_go_and_a_file_that_is_never_closed_stays(leaked: int) -> None:
    rng = random.Random(leaked)
    samples = [
        soak.Sample("front", at_s, {"open files": 20.0 + rng.randrange(4) + (at_s > 80) * leaked})
        for at_s in range(100)
    ]

    (growth,) = soak.growths(samples, seconds=100)

    assert growth.late - growth.early == leaked


def test_a_look_at_a_process_sees_what_it_holds(tmp_path: Path) -> None:
    before = soak.look("me", os.getpid(), 0.0).values
    with (tmp_path / "file").open("w"):
        values = soak.look("me", os.getpid(), 0.0).values

    assert values["open files"] == before["open files"] + 1
    assert values["resident memory (MiB)"] > 10
    assert values["threads"] >= 1


def outcome(latency_s: float, failure: str | None = None) -> RequestResult:
    return RequestResult({}, 0.0, 0.0, latency_s, latency_s, failure)


def test_overload_is_held_against_its_promises() -> None:
    refused = [outcome(0.02, "429 queue_full")] * 90
    good = overload.Run(0.3, 1.0, 1.0, 10.0, [*refused, *[outcome(2.9)] * 9], 1.9)
    bad = overload.Run(
        0.3, 1.0, 1.0, 10.0, [*[outcome(0.06, "429 queue_full")] * 8, *[outcome(3.1)] * 8,
                              outcome(1.0, "500 internal_error")], 2.1
    )  # fmt: skip

    assert good.problems() == []
    assert bad.problems() == [
        "1 accepted ones failed: ['500 internal_error']", "too few were refused",
        "refusals are slow", "goodput falls", "latency stays",
    ]  # fmt: skip
    assert "| goodput | 0.90/s, 90% of the capacity | at least 90% |" in overload.page(good)


def test_a_report_of_failures_is_told_and_one_that_did_not_end_is_none() -> None:
    report = {
        "complete": True, "stop_reason": "completed", "operations": {"tested": 23, "selected": 23},
        "failures": [{"title": "Server error"}], "errors": [], "test_cases": {"generated": 2100},
    }  # fmt: skip

    done = fuzz.run_of("shapes", report, {200: 2099, 500: 1})

    assert "**1**" in fuzz.page([done], 60, 1)
    assert "| shapes | 23 | 2100 | 1 | 2099 | 1 |" in fuzz.page([done], 60, 1)
    with pytest.raises(RuntimeError, match="did not come to an end: interrupted"):
        fuzz.run_of("shapes", report | {"complete": False, "stop_reason": "interrupted"}, {})


def test_without_a_mount_the_kernel_refuses_a_process_its_writes_until_there_is_room(
    tmp_path: Path,
) -> None:
    code = (
        "import sys\n"
        "for _ in sys.stdin:\n"
        "    try:\n"
        f"        open({str(tmp_path / 'file')!r}, 'wb').write(bytes(9999))\n"
        "        print('written', flush=True)\n"
        "    except OSError as error:\n"
        "        print(error.strerror, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def write() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        volume, said = Disk(tmp_path, False, lambda: process.pid), [write()]
        volume.fill()
        said.append(write())
        volume.free()
        said.append(write())
        assert process.stdin is not None
        process.stdin.close()

    assert said == ["written", "File too large", "written"]


# The page


def test_a_section_is_replaced_and_a_page_without_it_is_refused() -> None:
    text = "top\n<!-- a -->\nold\n<!-- /a -->\nend\n"

    once = with_section(text, "a", "new \\1")

    assert once == with_section(once, "a", "new \\1")
    assert once == "top\n<!-- a -->\n\nnew \\1\n\n<!-- /a -->\nend\n"
    with pytest.raises(ValueError, match="0 sections 'b'"):
        with_section(text, "b", "new")


def test_tables_have_as_many_columns_as_heads() -> None:
    assert table(["a", "b"], [["x", 1]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


@pytest.mark.parametrize(
    "name",
    ["fuzz", "chaos", "chaos-fleet", "chaos-ray", "long-jobs", "soak", "soak-fleet", "overload"],
)
def test_every_run_has_its_target_and_its_section(name: str) -> None:
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert with_section(PAGE.read_text(), name, "x")
