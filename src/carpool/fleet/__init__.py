"""Several workers behind one front: which of them runs what, and several models."""
