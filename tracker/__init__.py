"""The regression tracker: records, store, history, gate and reports. Imports neither torch nor kernels.

    from groupbench.tracker import open_tracker

Importing this package loads no modules, so that a machine that only writes records needs no database libraries.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for true; `typing` takes longer than the rest of the command's first step
if TYPE_CHECKING:
    from groupbench.tracker.api import Tracker as Tracker
    from groupbench.tracker.api import open_tracker as open_tracker

__all__ = ["Tracker", "open_tracker"]


def __getattr__(name: str) -> object:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
