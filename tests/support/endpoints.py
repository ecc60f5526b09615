"""Paths of the HTTP API that several test files ask."""

ENDPOINT = "/v1/images/generations"
EDITS, VARIATIONS = "/v1/images/edits", "/v1/images/variations"
VIDEOS = "/v1/videos"
