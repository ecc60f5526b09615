"""`carpool.load`: the engine in the caller's process."""
