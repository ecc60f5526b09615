"""`carpool check`: whether requests that share forwards get the answers that they get alone."""
