"""`carpool check`: prove that requests that share forwards get the same answers as alone."""
