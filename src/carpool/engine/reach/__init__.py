"""What foreign code can reach, and whether a request may share a ride: `private_reasons`.

Requests interleave on one pipeline only where nothing that their code reaches outlives them and
is changed by them. `bytecode` reads code objects into a `summary`; `walk` follows what they do with
`referents`; `held` knows the objects that no two requests may reach; `roots` is where code enters.
"""

from carpool.engine.reach.reasons import private_reasons

__all__ = ["private_reasons"]
