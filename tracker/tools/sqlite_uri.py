"""Open SQLite files read-only. Needs only the standard library, for shell completion."""

from __future__ import annotations

import os
from pathlib import Path


def read_only_uri(path: Path) -> str:
    """Return the URI that opens a file read-only.

    A database in WAL mode needs files next to it. If they cannot be created, the file is opened as immutable.
    """
    quoted = str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    mode = "mode=ro" if writable or Path(f"{path}-wal").exists() else "immutable=1"
    return f"file:{quoted}?{mode}"
