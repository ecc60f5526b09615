"""Measurements on real servers for the reliability page: `make chaos soak overload fuzz`."""
