"""What people would serve a diffusers pipeline with, were there no Carpool: the same endpoint."""
