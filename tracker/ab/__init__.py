"""Measure two versions of a kernel in turns on one device until it is clear whether they differ."""
