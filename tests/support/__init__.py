"""What several test files need."""
