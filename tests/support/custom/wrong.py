"""The kinds that are wrong today, and why: whoever mends one takes its line out.

A kind that is not here is tried by `make test`, too.
"""

WRONG: dict[str, str] = {}
