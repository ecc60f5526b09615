"""The models that Carpool is proven with, and those that come with it."""
