"""Denoisers of video models."""

from carpool.engine.specs.rules import Spec

SPECS: dict[tuple[str, str], Spec] = {}
