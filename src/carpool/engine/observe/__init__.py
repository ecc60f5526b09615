"""What is noted of requests and forwards."""
