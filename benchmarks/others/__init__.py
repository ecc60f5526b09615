"""Other servers of a diffusers pipeline, with the same endpoint."""
