"""The kinds that are wrong today, and why: whoever mends one takes its line out.

A kind that is not here is tried by `make test`, too.
"""

WRONG: dict[str, str] = {
    "a cached function's answer": "what `lru_cache` keeps is reached and not seen",
    "batch statistics in train mode": "buffers that a forward writes stay changed after close()",
    "all arguments by *args and **kwargs": "the parameters behind *args and **kwargs are unknown",
}
