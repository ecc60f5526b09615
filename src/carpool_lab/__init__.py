"""The laboratory: measure, check, simulate, plan and tune the server."""
