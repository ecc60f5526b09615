"""Servers of diffusers pipelines side by side, under the same loads, over HTTP."""
