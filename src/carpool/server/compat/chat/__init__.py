"""Chat completions, whose answers are pictures."""
