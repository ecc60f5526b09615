"""Files and options of the peers (SGLang-Diffusion, vLLM-Omni), read as they read them."""
