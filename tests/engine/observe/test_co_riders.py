"""Which requests shared denoising forwards is recorded within bounds, for traces."""

from carpool.engine.observe.co_riders import MOST_FORWARDS, MOST_OTHERS, CoRiders
from carpool.engine.observe.timeline import Forward, Timeline
from carpool.types import Phase
from support.engine_driver import Drive, driving
from support.tiny import ARGUMENTS


def submit(drive: Drive, name: str, steps: int) -> None:
    small = ARGUMENTS["flux"] | {"width": 32, "height": 32, "num_inference_steps": steps}
    drive.submit(request_id=name, **small)


def forward(phase: Phase, at_s: dict[str, float]) -> Forward:
    """A forward of requests, by id, so many seconds after the submission of each."""
    states = [Timeline(name, 100.0 - seconds) for name, seconds in at_s.items()]
    return Forward("transformer", "forward", phase, tuple(states), (1,) * len(states), 100.0, 1.0)


def test_an_engine_tells_who_shared_a_denoising_forward_and_how_many_rows_it_had() -> None:
    co_riders = CoRiders()
    with driving("flux") as drive:
        drive.engine._observers.append(co_riders.forward)
        for name, steps in (("short", 2), ("long", 4)):
            co_riders.start(name, f"trace of {name}")
            submit(drive, name, steps)
        drive.finish()
        rows = [f.rows for f in drive.forwards if f.component == "transformer" and f.requests == 2]

    short, long = co_riders.end("short"), co_riders.end("long")
    assert (short["others"], long["others"]) == (["trace of long"], ["trace of short"])
    assert [one["rows"] for one in short["forwards"]] == rows
    assert [one["requests"] for one in long["forwards"]] == [2, 2]
    assert co_riders.end("short") == {"others": [], "forwards": []}


def test_neither_encoding_together_nor_denoising_alone_is_recorded() -> None:
    co_riders = CoRiders()
    for name in ("a", "b"):
        co_riders.start(name, name)

    co_riders.forward(forward("encode", {"a": 0.0, "b": 0.0}))
    co_riders.forward(forward("denoise", {"a": 1.0}))

    assert co_riders.end("a") == {"others": [], "forwards": []}


def test_outputs_of_one_request_do_not_link_each_other_nor_to_one_without_a_trace() -> None:
    co_riders = CoRiders()
    for name, trace in (("first", "t"), ("second", "t"), ("untold", "")):
        co_riders.start(name, trace)

    together = {"first": 1.0, "second": 1.0, "untold": 0.5, "unknown": 0.0}
    co_riders.forward(forward("denoise", together))

    told = co_riders.end("first")
    assert told["others"] == []
    assert told["forwards"] == [{"at_s": 1.0, "rows": 4, "requests": 4}]
    assert co_riders.end("untold")["others"] == ["t"]


def test_of_a_long_request_the_first_others_and_the_first_and_last_forwards_are_kept() -> None:
    co_riders = CoRiders()
    co_riders.start("mine", "mine")
    for number in range(3 * MOST_FORWARDS):
        co_riders.start(f"other{number}", f"trace{number}")
        co_riders.forward(forward("denoise", {"mine": float(number), f"other{number}": 0.0}))
        co_riders.end(f"other{number}")

    told = co_riders.end("mine")

    assert told["others"] == [f"trace{number}" for number in range(MOST_OTHERS)]
    half = MOST_FORWARDS // 2
    kept = [*range(half), *range(3 * MOST_FORWARDS - half, 3 * MOST_FORWARDS)]
    assert [one["at_s"] for one in told["forwards"]] == kept
