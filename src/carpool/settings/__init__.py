"""Settings of an engine and of a server: how each is declared, read from text, and checked."""
