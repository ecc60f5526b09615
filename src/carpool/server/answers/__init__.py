"""What endpoints answer with."""
