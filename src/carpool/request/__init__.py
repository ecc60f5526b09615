"""Checks of requests: parameters, images, adapters, sizes."""
