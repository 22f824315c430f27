"""The dashboard's benchmark, `ci/benchmarks/serve_marks.py`: the pages that count as a miss."""

from __future__ import annotations

import importlib.util
import itertools
import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "ci/benchmarks/serve_marks.py"


@pytest.fixture(scope="module")
def marks() -> Any:
    spec = importlib.util.spec_from_file_location("serve_marks", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_marks"] = module
    sys.path.insert(0, str(PROGRAM.parent))
    spec.loader.exec_module(module)
    sys.path.remove(str(PROGRAM.parent))
    return module


def test_a_slow_first_answer_or_many_slow_ones_miss(marks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    times = {
        "fast": [3.0, *[2.0] * 19, 900.0],  # one of twenty is not the 95th percentile
        "slow at first": [500.0, *[2.0] * 20],
        "slow": [3.0, *[2.0] * 18, 400.0, 400.0],
    }
    answers = {name: iter(each) for name, each in times.items()}
    client = SimpleNamespace(ask=lambda path: (next(answers[path]), b"x" * 2048))
    cpu = itertools.count(0.0, 0.2)
    pages = {name: (lambda name=name: name) for name in times}
    missed = marks._table("title", client, pages, 20, lambda: (next(cpu), 0.0), {})
    assert missed == ["slow at first", "slow"]
    assert "| fast | 3 | 2 | 2 | 900 | 10 | 0 | 2 |" in capsys.readouterr().out


def test_hostile_answers_are_counted_by_status(marks: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    attack = marks.Attack(port, "127.0.0.1")
    attack.send("search", "GET", "/series")
    ((kind, (seconds, statuses)),) = attack.report.items()
    assert (kind, len(seconds), statuses) == ("search", 1, {"no answer": 1})
    assert json.loads(json.dumps(attack.report)) == {"search": [seconds, statuses]}
