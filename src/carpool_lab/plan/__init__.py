"""`carpool plan`: does a model fit a device, and what will it give, by its configs alone."""
