"""Pipelines, modules and callbacks of people's own, each of which keeps state in its own place."""
