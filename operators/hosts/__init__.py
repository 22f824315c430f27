"""Hosts that measure: groupbench's own and TritonBench."""

import importlib.util


def has_tritonbench() -> bool:
    """Return whether TritonBench is installed. Does not import it."""
    return importlib.util.find_spec("tritonbench") is not None
