"""`carpool plan`: predict whether a model fits a device, and its speed, from configs alone."""
