"""Import the programs of the folder ci/, which is not a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def script(name: str) -> ModuleType:
    """Return ci/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
