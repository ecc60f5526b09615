"""The laboratory: measure, check, simulate and plan the server."""
