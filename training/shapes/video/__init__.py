"""The embedded text-to-video model: 9 frames of 48x48 pixels of one coloured shape that moves.

Made like the picture model one folder up, whose brush, palette and judge it shares: `draw`
makes the data, `train` the weights, `judge` says what a video shows.
"""
