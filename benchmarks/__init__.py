"""Measurements of Carpool's gains and costs. Each file with a usage line is a program."""
