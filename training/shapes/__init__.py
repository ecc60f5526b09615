"""The embedded text-to-image model: 64x64 pictures of one or two coloured shapes.

`draw` makes the data, `train` trains the weights, `judge` recognises the content of a picture.
"""
