"""`carpool tune`: measures the duration of forwards by their number of rows."""
