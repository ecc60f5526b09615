"""What a caller may ask: parameters, images and adapters of a request."""
