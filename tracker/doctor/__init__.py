"""Check a machine for measuring, and suggest improvements."""
