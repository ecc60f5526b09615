"""Training of the embedded models; not in the wheel."""
