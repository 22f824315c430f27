"""Products with four-bit weights."""
