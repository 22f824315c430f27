"""Two versions of a kernel, measured in turns on one device until it is clear whether they differ."""
