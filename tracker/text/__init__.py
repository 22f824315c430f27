"""Format values as text, draw small charts in text, and write files atomically."""
