"""The same questions for programs, through the Model Context Protocol."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.cli import mcp as served


def names(tools: list[Callable[..., Any]]) -> list[str]:
    return [tool.__name__ for tool in tools]


def test_what_measures_is_not_among_what_reads() -> None:
    assert names(served.reading_tools(None)) == ["history", "gate", "compare", "alerts", "show", "explain"]
    assert names(served.measuring_tools(None, "cpu")) == ["evaluate", "bisect"]
    assert all(tool.__doc__ for tool in (*served.reading_tools(None), *served.measuring_tools(None, "cpu")))


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
    assert set(tools["history"].input_schema["properties"]) == {"operator", "backend", "shape", "since", "limit"}
