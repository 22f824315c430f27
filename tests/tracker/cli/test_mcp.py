"""The same questions for programs, through the Model Context Protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.cli import mcp as served
from groupbench.tracker.text.brief import brief, size


def names(tools: list[Callable[..., Any]]) -> list[str]:
    return [tool.__name__ for tool in tools]


def test_what_measures_is_not_among_what_reads() -> None:
    assert names(served.reading_tools(None)) == ["history", "gate", "compare", "incidents", "show", "explain"]
    assert names(served.measuring_tools(None, "cpu")) == ["evaluate", "bisect"]
    assert names(served.writing_tools(None)) == ["acknowledge", "expect"]
    every = (*served.reading_tools(None), *served.measuring_tools(None, "cpu"), *served.writing_tools(None))
    assert all(tool.__doc__ for tool in every)


def test_evaluate_finds_modules_where_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    class Evaluator:
        def __init__(self, plugins: object, *, folders: object, device: str) -> None:
            found.append((plugins, folders, device))

        def evaluate(self, *_: object, **__: object) -> list[str]:
            return []

    monkeypatch.setattr("groupbench.tracker.cli.mcp.Evaluator", Evaluator)
    served.measuring_tools(None, "cpu", ("python",))[0]("cand.py")
    assert found == [((), ("python",), "cpu")]


def test_options_are_spelled_as_the_commands_take_them() -> None:
    options = served.options(operator="a", shape=None, plugin=["-x", "y"], min_effect=1, since="")
    assert options == ["--operator=a", "--plugin=-x", "--plugin=y", "--min-effect=1"]


def test_a_tool_answers_with_data_and_what_the_exit_code_means(tmp_path: Path) -> None:
    history = served.reading_tools(str(tmp_path / "none.db"))[0]
    response = history(operator="--x")
    assert response["exit_code"] == 2 and response["meaning"] == "usage"
    assert "none.db" in response["messages"]
    assert not (tmp_path / "none.db").exists(), "reading must not create a database"


def test_without_the_sdk_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mcp.server.mcpserver", None)
    with pytest.raises(served.NotInstalled, match=r"pip install 'groupbench\[mcp\]'"):
        served.server([])


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo that the SDK prints the log messages of the whole process."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.getLogger().level)


@pytest.mark.usefixtures("handlers")
def test_the_server_lists_tools_with_their_arguments() -> None:
    pytest.importorskip("mcp", reason="NOT TESTED: the MCP server. It needs the SDK")
    server = served.server(served.reading_tools(None) + served.measuring_tools(None, "cpu"))
    with ThreadPoolExecutor(1) as elsewhere:  # the browser's tests leave an event loop running in this thread
        tools = {tool.name: tool for tool in elsewhere.submit(asyncio.run, server.list_tools()).result()}
    assert tools["gate"].annotations.read_only_hint and not tools["evaluate"].annotations.read_only_hint
    where = {"operator", "backend", "shape", "dtype", "mode"}
    assert set(tools["history"].input_schema["properties"]) == where | {"since", "limit"}
    assert set(tools["bisect"].input_schema["properties"]) == where | {"good", "bad", "metric", "series", "plugins"}


QUIET = [f"backend_{number}" for number in range(15)]


@pytest.fixture
def week(stored: Callable[..., Any], make: Any) -> str:
    """Twelve nights of sixteen backends, of which one is 8 % slower since the ninth night."""
    records = [make(night, backend=name, ms=1 + night % 3 / 1000) for night in range(12) for name in QUIET]
    for night in range(12):
        facts = {"subject": "Use larger tiles", "author": "Ada", "branch": "main"} if night == 8 else {"branch": "main"}
        ms = (1.08 if night >= 8 else 1) * (1 + night % 3 / 1000)
        records.append(make(night, backend="slow", ms=ms, commit_facts=facts))
    return str(stored(records))


def nulls(answer: Any) -> int:
    if isinstance(answer, dict):
        return sum(map(nulls, answer.values()))
    return sum(map(nulls, answer)) if isinstance(answer, list) else answer is None


@pytest.mark.sqlite
def test_what_is_slower_whether_it_is_real_since_when_and_how_to_reproduce_it_take_four_calls(week: str) -> None:
    history, gate, compare, incidents = served.reading_tools(week)[:4]

    slower = gate()
    (row,) = slower["answer"]["series"]
    assert (slower["exit_code"], slower["meaning"]) == (1, "worse")
    assert (row["backend"], row["verdict"]) == ("slow", "regressed")
    assert 0.06 < row["low"] < row["change"] < row["high"] < 0.1
    assert (row["author"], row["subject"]) == ("Ada", "Use larger tiles")

    real = gate(why="slow")
    assert "regressed" in real["answer"] and "rule " in real["answer"]

    since = history(backend="slow", since="2026-01-06")
    points = since["answer"]["series"][0]["points"]
    assert [point["commit"][:3] for point in points if abs(point.get("change", 0)) > 0.05] == ["008"]

    again = compare("007", "latest")
    assert (again["exit_code"], again["meaning"]) == (1, "worse")
    assert again["answer"]["series"][0]["backend"] == "slow"
    assert row["repro"].startswith("groupbench ab 007") and "--backend slow" in row["repro"]

    for answer in (slower, real, since, again, history(), incidents()):
        assert size(answer) <= 10_000 and nulls(answer) == 0


@pytest.mark.sqlite
def test_the_whole_history_is_shortened_and_says_how_to_narrow_it(stored: Callable[..., Any], make: Any) -> None:
    many = [make(night, backend=f"b{number}") for night in range(8) for number in range(100)]
    history = served.reading_tools(str(stored(many)))[0]
    response = history()
    assert 5_000 < size(response) <= 10_000 and nulls(response) == 0
    assert response["answer"]["points_each"] == 1
    assert re.fullmatch(r"\d+ of series; give operator, backend, shape or since .*", response["answer"]["left_out"])


@pytest.mark.sqlite
@pytest.mark.usefixtures("handlers")
def test_what_the_server_sends_is_as_short(stored: Callable[..., Any], make: Any) -> None:
    pytest.importorskip("mcp", reason="NOT TESTED: the MCP server. It needs the SDK")
    db = str(stored([make(night, backend=f"b{number}") for night in range(8) for number in range(100)]))
    server = served.server(served.reading_tools(db))
    with ThreadPoolExecutor(1) as elsewhere:
        sent = elsewhere.submit(asyncio.run, server.call_tool("history", {"since": "2026-01-03"})).result()
    text = "".join(part.text for part in sent.content)
    assert 5_000 < len(text.encode()) <= 10_000 and json.loads(text)["exit_code"] == 0
    assert not sent.structured_content


def test_advice_that_names_commands_is_explained(tmp_path: Path) -> None:
    response = served.reading_tools(str(tmp_path / "none.db"))[1]()
    assert "`groupbench ingest`" in response["messages"] or "`" in response["messages"]
    assert "shell" in response["in_a_shell"]
    assert served.in_a_shell("nothing to do") == ""


@pytest.mark.parametrize(
    "value",
    ["x" * 30_000, [{"a": "é" * 900}] * 50, {"a": {"b": list(range(9000))}}, {str(n): "y" * 90 for n in range(900)}],
    ids=["text", "rows", "nested", "fields"],
)
def test_every_answer_fits(value: Any) -> None:
    answer = brief(value, "ask for less")
    assert 5_000 < size(answer) <= 10_000
    assert "ask for less" in answer["left_out"]


@pytest.mark.sqlite
def test_with_write_a_client_acknowledges_incidents(week: str, cli: Callable[..., Any]) -> None:
    assert cli("gate", "--update").exit_code == 1
    acknowledge, expect = served.writing_tools(week)
    assert acknowledge([1], "")["exit_code"] == 2
    assert acknowledge([1], "Ada works on it")["exit_code"] == 0
    (alert,) = served.reading_tools(week)[3]()["answer"]
    assert alert["state"] == "acknowledged" and "Ada works on it" in alert["next"]
    assert expect([1], "larger tiles are needed")["exit_code"] == 0
