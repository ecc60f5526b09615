"""What bodies may hold, and how they are read."""
