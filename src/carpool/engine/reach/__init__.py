"""What foreign code can reach, and whether a request may share a ride: `private_reasons`."""

from carpool.engine.reach.reasons import private_reasons

__all__ = ["private_reasons"]
