"""Settings of an engine and of a server: their declarations, parsers and checks."""
