"""Files and options of SGLang-Diffusion and vLLM-Omni, parsed with their rules."""
