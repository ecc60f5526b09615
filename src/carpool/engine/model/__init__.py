"""A pipeline: loaded, viewed, described."""
