"""What one more step of a lone request costs the engine, counted in calls of its own functions."""

from benchmarks.scheduler import OFTEN, calls_of_a_step

CALLS, FILES = 102, 25


def test_one_more_step_of_a_lone_request_makes_few_calls_of_our_own_functions() -> None:
    calls = calls_of_a_step()

    assert sum(calls.values()) / 1000 <= CALLS, "\n".join(map(str, calls.most_common()))
    assert len({name.partition(":")[0] for name, n in calls.items() if n >= OFTEN}) <= FILES
