"""`carpool plan`: whether a model fits a device, and what it will give there, by its configs alone."""
