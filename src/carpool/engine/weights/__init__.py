"""Where weights are: on the device, or streamed to it in groups of blocks."""
