"""An engine in its own process, and who starts, watches and replaces it."""
