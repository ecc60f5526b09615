"""Fields, reports and adapters as clients of SGLang and vLLM-Omni know them."""
