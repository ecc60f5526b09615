"""Fields, reports and adapters for clients of SGLang and vLLM-Omni."""
