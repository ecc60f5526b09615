"""What Carpool gains and costs, measured. Every file here that has a usage line is a program."""
