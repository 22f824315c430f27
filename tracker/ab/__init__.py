"""Measure two versions of a kernel alternately on one device until it is clear whether they differ."""
