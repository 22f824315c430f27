"""The commit of a range that changed a kernel, found by A/B comparisons."""
