"""Tables that were guessed, proven at run time: first forwards are also run apart, and compared."""
