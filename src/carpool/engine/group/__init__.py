"""A group of processes that compute each forward of a denoiser together: context parallelism."""
