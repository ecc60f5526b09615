"""Other ways to serve a diffusers pipeline, behind the same endpoint."""
