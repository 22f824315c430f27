"""A measurement on a busy machine decides nothing, so it tests nothing."""

from __future__ import annotations

import pytest

BUSY = "shared with other work"
"""Part of the message of a cell with unchecked times."""


def skip_if_busy(output: str) -> None:
    """Skip a test on a machine too busy to measure."""
    if BUSY in output:
        pytest.skip("NOT TESTED: measurements, on a busy machine")
