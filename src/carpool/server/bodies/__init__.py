"""Request and response bodies: their fields, and parsers of JSON, forms and pictures."""
