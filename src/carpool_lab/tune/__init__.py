"""What forwards take by rows, measured."""
