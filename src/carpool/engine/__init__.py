"""The engine: pipelines in fibers, their module calls fused. The only folder that imports torch."""
