"""The scheduler under a virtual clock."""
