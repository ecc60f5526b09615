"""Durable jobs: `store.py` keeps them and their files, `runner.py` runs them."""
