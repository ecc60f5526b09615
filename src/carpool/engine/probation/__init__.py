"""Proof of guessed tables at run time: the first forwards also run apart, and are compared."""
