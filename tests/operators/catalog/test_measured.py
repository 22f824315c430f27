"""Every operator of the catalog, measured as a user does: every output can be judged, and no backend is accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from busy import BUSY

from groupbench.operators.registry import get_operator, operator_names
from groupbench.tracker.facts import record

pytestmark = pytest.mark.usefixtures("unaudited")
FAST = ("--host", "builtin", "--device", "cpu", "--bursts", "2", "--samples", "2")
CASES = [
    pytest.param(name, mode, marks=() if mode == "fwd" else pytest.mark.exhaustive, id=f"{name}-{mode}")
    for name in operator_names()
    for mode in get_operator(name).modes
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_backend_is_right_where_it_is_timed(
    name: str, mode: str, tritonbench: Callable[..., Any], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    file = tmp_path / "records.jsonl"
    texts = [str(shape) for shape in get_operator(name).suites["smoke"]]
    measured = texts if pytestconfig.getoption("--exhaustive") else texts[-1:]
    tritonbench("--op", name, "--mode", mode, "--shapes", *measured, *FAST, "--records", str(file))
    with file.open("rb") as lines:
        cells = [cell for _, cell in record.read(lines)]
    checked = [cell for cell in cells if BUSY not in (cell.message or "")]
    assert any(cell.status == "ok" for cell in checked) or len(checked) < len(cells)
    for cell in checked:
        assert cell.status in ("ok", "unavailable"), (cell.cell.backend, cell.cell.shape, cell.message)
