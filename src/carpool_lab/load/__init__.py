"""`carpool bench`: sends load to an OpenAI-compatible server and reports latency and throughput."""
