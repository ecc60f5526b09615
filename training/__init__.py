"""How the embedded models were made; not in the wheel."""
