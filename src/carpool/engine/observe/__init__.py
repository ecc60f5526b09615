"""Observers of requests and forwards: statistics, timelines, progress of the loop, co-riders."""
