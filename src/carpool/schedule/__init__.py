"""Decisions: which parked calls run now. Pure Python without torch, clock or I/O."""
