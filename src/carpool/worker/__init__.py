"""Worker processes: start, protocol, watchdog, supervision."""
