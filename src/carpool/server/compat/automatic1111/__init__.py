"""The API of AUTOMATIC1111's web UI."""
