"""What the reliability page says, measured on real servers: `make chaos soak overload fuzz`."""
