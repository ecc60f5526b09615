"""Text generation in pipelines: each token is a call, scheduled among denoising steps."""
