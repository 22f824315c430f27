"""Recognise errors from libraries that do not load, which building the checkout may repair."""

from __future__ import annotations

import re

_NOT_LOADED = re.compile(
    r"(ImportError|ModuleNotFoundError|OSError): .*(\.so\b|No module named|shared object file|load this library"
    # `from . import _extension`, in a package whose extension was not built
    r"|cannot import name '(_|.* from partially initialized module))"
)

BUILD = (
    "if it needs a build, set `setup` in groupbench.toml to the command that builds it; "
    "for a module in a subfolder, add the folder to `pythonpath`"
)
"""Advice for a plan without `setup`."""


def does_not_load(message: str) -> bool:
    """Return whether a message, from a record or a plugin, is about a module or library not loading."""
    return _NOT_LOADED.search(message) is not None
