"""Searches for the fastest configuration of each tunable kernel on this GPU."""
