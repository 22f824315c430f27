"""Mark the further cases of a test."""

from __future__ import annotations

from typing import Any

import pytest


def rarely(*cases: Any) -> list[Any]:
    """Return cases for `parametrize` that only run with --exhaustive. A tuple is a case of several arguments."""
    marked = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in marked]
