"""The load client behind `carpool bench`: asks an OpenAI-compatible server, says how it did."""
