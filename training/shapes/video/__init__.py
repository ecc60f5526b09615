"""The embedded text-to-video model: 9 frames of 48x48 pixels of one coloured shape that moves.

Built like the picture model in the parent folder, with the same brush, palette and judge: `draw`
makes the data, `train` trains the weights, `judge` recognises the content of a video.
"""
