"""Changes of shared modules by a request: detected, and undone when it pauses."""
