"""With whom requests ride is noted within bounds, for those who want to know."""

from carpool.engine.observe.co_riders import MOST_FORWARDS, MOST_OTHERS, Company
from support.engine_driver import Drive, driving
from support.tiny import ARGUMENTS


def submit(drive: Drive, name: str, steps: int) -> None:
    small = ARGUMENTS["flux"] | {"width": 32, "height": 32, "num_inference_steps": steps}
    drive.submit(request_id=name, **small)


def test_an_engine_tells_who_shared_a_denoising_forward_and_how_many_rows_it_had() -> None:
    company = Company()
    with driving("flux") as drive:
        drive.engine._on_ride = company.rode
        for name, steps in (("short", 2), ("long", 4)):
            company.came(name, f"trace of {name}")
            submit(drive, name, steps)
        drive.finish()
        rows = [f.rows for f in drive.forwards if f.component == "transformer" and f.requests == 2]

    short, long = company.left("short"), company.left("long")
    assert (short["others"], long["others"]) == (["trace of long"], ["trace of short"])
    assert [one["rows"] for one in short["forwards"]] == rows
    assert [one["requests"] for one in long["forwards"]] == [2, 2]
    assert company.left("short") == {"others": [], "forwards": []}


def test_neither_encoding_together_nor_denoising_alone_is_company() -> None:
    company = Company()
    for name in ("a", "b"):
        company.came(name, name)

    company.rode("encode", 2, {"a": 0.0, "b": 0.0})
    company.rode("denoise", 1, {"a": 1.0})

    assert company.left("a") == {"others": [], "forwards": []}


def test_outputs_of_one_request_are_no_company_to_each_other_nor_is_one_without_a_trace() -> None:
    company = Company()
    for name, trace in (("first", "t"), ("second", "t"), ("untold", "")):
        company.came(name, trace)

    company.rode("denoise", 3, {"first": 1.0, "second": 1.0, "untold": 0.5, "unknown": 0.0})

    told = company.left("first")
    assert told["others"] == []
    assert told["forwards"] == [{"at_s": 1.0, "rows": 3, "requests": 4}]
    assert company.left("untold")["others"] == ["t"]


def test_of_a_long_ride_the_first_others_and_the_ends_are_kept() -> None:
    company = Company()
    company.came("mine", "mine")
    for number in range(3 * MOST_FORWARDS):
        company.came(f"other{number}", f"trace{number}")
        company.rode("denoise", 2, {"mine": float(number), f"other{number}": 0.0})
        company.left(f"other{number}")

    told = company.left("mine")

    assert told["others"] == [f"trace{number}" for number in range(MOST_OTHERS)]
    half = MOST_FORWARDS // 2
    kept = [*range(half), *range(3 * MOST_FORWARDS - half, 3 * MOST_FORWARDS)]
    assert [one["at_s"] for one in told["forwards"]] == kept
