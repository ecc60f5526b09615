"""Chat completions, answered with texts or pictures."""
