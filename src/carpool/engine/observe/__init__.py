"""Observers of requests and forwards: statistics, timelines, loop progress, co-riders."""
