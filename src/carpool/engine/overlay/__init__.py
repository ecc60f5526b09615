"""Changes of shared modules by a request: noticed, and taken back when it pauses."""
