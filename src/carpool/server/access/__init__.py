"""Access control: API keys, limits, idempotency keys, web pages of other origins."""
