"""Responses of endpoints: JSON, files, event streams."""
