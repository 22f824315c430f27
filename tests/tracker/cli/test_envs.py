"""`groupbench list envs`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import Cli


@pytest.fixture
def three(stored: Any, make: Any) -> None:
    newer = {"driver": "580.2"}
    stored(
        [
            make(0),
            make(1, environment={"host": "other"}),  # no declared field: the same environment
            make(2, environment=newer),
            make(3, environment={"gpu": "B200"}),
        ]
    )


def test_each_with_what_differs_from_the_one_before(cli: Cli, three: None) -> None:
    environments = json.loads(cli("list", "envs", "--format=json").stdout)
    assert [(r["hardware"], r["runs"], r["variants"]) for r in environments] == [
        ("B200", 1, 1),
        ("NVIDIA H100 80GB HBM3", 2, 2),
        ("NVIDIA H100 80GB HBM3", 1, 1),
    ]
    assert [r["differs"] for r in environments] == [[], [], ["driver 570.1 → 580.2"]]
    assert environments[1]["first"][:10] == "2026-01-01"
    assert environments[1]["last"][:10] == "2026-01-02"
    assert "driver 570.1 → 580.2" in cli("list", "envs").stdout
    assert len(json.loads(cli("list", "envs", "--hardware", "*H100*", "--format=json").stdout)) == 2
    assert "no environments match" in cli("list", "envs", "--hardware", "x*").stderr
    assert "no hardware 'x'; known: B200, NVIDIA H100 80GB HBM3" in cli("list", "envs", "--hardware", "x").stderr


@pytest.mark.both
def test_two_of_them(cli: Cli, three: None) -> None:
    _, a, b = (row["environment"] for row in json.loads(cli("list", "envs", "--format=json").stdout))
    assert json.loads(cli("list", "envs", a[:8], b[:8], "--format=json").stdout) == [
        {"fact": "driver", "a": "570.1", "b": "580.2"}
    ]
    assert "the environments are equal" in cli("list", "envs", a, a).stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["x"], "two environments"),
        (["x", "y"], "no environment 'x'"),
        (["", ""], "no environment"),
        (["%", "%"], "no "),
    ],
)
def test_mistakes(cli: Cli, three: None, args: list[str], message: str) -> None:
    result = cli("list", "envs", *args)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
