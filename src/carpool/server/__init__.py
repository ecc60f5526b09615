"""The HTTP front: OpenAI's image API over a supervised worker. No torch in this process."""
