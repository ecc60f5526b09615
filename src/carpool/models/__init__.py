"""The models that Carpool is proven with, and the embedded models."""
