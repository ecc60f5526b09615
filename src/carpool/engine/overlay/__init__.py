"""Copy-on-write for modules: what a request writes on shared modules is its own."""
