"""Check Carpool's own parameters: number of outputs, seeds, timeouts, priorities."""

import math
from typing import Any

from carpool.errors import InvalidValue
from carpool.request.values import as_plain, is_int, is_number
from carpool.types import MAX_SEED, new_seed

MOST_PRIORITY = 10


def check_n(n: Any, max_n: int, name: str = "n") -> int:
    """Check the number of outputs of one prompt."""
    n = as_plain(n, also_arrays=False)
    if not is_int(n) or not 1 <= n <= max_n:
        raise InvalidValue.of(name, n, f"must be a whole number from 1 to {max_n}")
    return int(n)


def check_seed(seed: Any) -> int:
    if seed is None:
        return new_seed()
    seed = as_plain(seed, also_arrays=False)
    if not is_int(seed) or not 0 <= seed <= MAX_SEED:
        raise InvalidValue.of("seed", seed, "must be a whole number from 0 to 2**63 - 1")
    return int(seed)


def seeds(seed: Any, n: int) -> list[int]:
    """Seeds of n outputs of one prompt: s, s+1, ..., from 0 again after the largest.

    A list has the seeds themselves.
    """
    if isinstance(seed, list):
        if len(seed) != n or None in seed:
            rule = f"must have {n}, one for each of the {n} outputs"
            raise InvalidValue(f"seed is a list of {len(seed)}: {rule}", param="seed")
        return [check_seed(entry) for entry in seed]
    first = check_seed(seed)
    return [(first + i) % (MAX_SEED + 1) for i in range(n)]


def check_timeout(timeout_s: Any, name: str = "timeout_s") -> float:
    if not is_number(timeout_s) or not 0 < timeout_s < math.inf:
        rule = "must be a number of seconds above 0, at most 3.4e38"
        raise InvalidValue.of(name, timeout_s, rule)
    return float(timeout_s)


def check_step_cache(threshold: Any) -> float:
    if not is_number(threshold) or not 0 <= threshold <= 1:
        rule = "must be a number from 0 (every step runs) to 1; 0.1 is a careful one"
        raise InvalidValue.of("step_cache", threshold, rule)
    return float(threshold)


def check_priority(priority: Any) -> int:
    if not is_int(priority) or not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
        rule = f"must be a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}"
        raise InvalidValue.of("priority", priority, rule)
    return int(priority)
