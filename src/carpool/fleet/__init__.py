"""Several workers and several models behind one front: pools, routing, scaling, Ray."""
