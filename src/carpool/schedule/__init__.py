"""Decisions: which parked calls run now. No torch, and no clock: callers pass the time."""
