"""Analyse what foreign code can reach, to decide about sharing a ride: `private_reasons`."""

from carpool.engine.reach.reasons import private_reasons

__all__ = ["private_reasons"]
