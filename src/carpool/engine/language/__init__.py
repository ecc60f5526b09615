"""Text that pipelines write before they draw: each token is a call, beside denoising steps."""
