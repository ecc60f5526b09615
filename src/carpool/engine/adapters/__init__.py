"""LoRA adapters: read, kept, applied row by row."""
