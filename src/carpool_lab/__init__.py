"""The laboratory: it measures, simulates and tunes what the server does."""
