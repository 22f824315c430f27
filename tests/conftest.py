"""Shared by all tests. Without a GPU, Triton's kernels run in its interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from typing import Any

from hypothesis import settings

# A machine that is busy with something else makes no test red, nor does an example that nobody has seen before: what is
# tried is the same in every run. `--hypothesis-profile=search` looks for new ones.
settings.register_profile("groupbench", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("groupbench")

if importlib.util.find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        # Read when triton is imported: before any test module imports a kernel.
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say aloud what was not tested: a skip alone is a letter in a line of dots."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    for reason, number in reasons.items():
        if "NOT TESTED" in reason:
            terminalreporter.write_line(f"{number} skipped: {reason.removeprefix('Skipped: ')}", yellow=True, bold=True)
