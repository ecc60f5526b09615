"""A pretended accelerator: real values under another device's label, for processes of their own."""
