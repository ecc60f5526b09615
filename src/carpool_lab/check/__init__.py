"""`carpool check`: prove that batched requests get the same answers as single requests."""
