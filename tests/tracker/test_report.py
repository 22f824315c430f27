"""`groupbench report`: one page, whole, escaped, and free of the network."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Cli = Callable[..., Result]

BREAKING = """</script><script>alert(1)</script> "quoted" 'it' & 100% $title ${x} <!--\u2028"""


class Page(HTMLParser):
    """Scripts, text outside of them, and what is loaded from elsewhere."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.text += data


@pytest.fixture
def page(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Page]:
    """Build the page; plotly's 5 MB are left out, since each test would parse them."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly </script> */")

    def build(*args: str) -> Page:
        out = tmp_path / "r.html"
        result = cli("report", "-o", out, *args)
        assert (result.exit_code, result.stdout) == (0, ""), result.stderr
        return Page(out.read_text(encoding="utf-8"))

    return build


def data(page: Page) -> dict[str, Any]:
    return json.loads(page.scripts[0])


def test_the_page_says_what_the_gate_says(cli: Cli, page: Any, stored: Any, make: Any) -> None:
    stored([make(0), make(1), make(1, backend="b", status="wrong", message="0.5 outside")])
    stored([make(1, backend="c", status="unavailable", message="needs sm_100")])
    html = page()
    assert cli("gate").stdout.split("\n")[0] in html.text
    assert "needs sm_100" in html.text
    assert "0.5 outside" in html.text


def test_speedup_is_over_the_baseline_of_the_same_problem(page: Any, stored: Any, make: Any) -> None:
    stored([make(ms=3.0, backend="torch", baseline=True), make(ms=1.5), make(ms=1.0, shape="other")])
    html = page()
    assert "2.00×" in html.text
    assert "3.00×" not in html.text


def test_nothing_stored_can_leave_its_place(page: Any, stored: Any, make: Any) -> None:
    names = {"operator": BREAKING, "backend": BREAKING, "shape": BREAKING, "plan": BREAKING, "run": BREAKING}
    commit = {"subject": BREAKING, "branch": BREAKING}
    status = {"status": "error", "message": BREAKING}
    where = {"gpu": BREAKING, "settings": {BREAKING: BREAKING}}
    stored([make(**names, **status, commit_facts=commit, environment=where, commit=BREAKING)])
    html = page()
    assert len(html.scripts) == 3
    assert "alert(1)" not in html.scripts[1] + html.scripts[2]
    assert html.scripts[1].endswith("*/\n")
    assert not set("<>&") & set(html.scripts[0])
    assert BREAKING in html.text
    assert data(html)["series"][0]["name"][0] == BREAKING
    assert data(html)["series"][0]["message"]["0"] == BREAKING


def test_nothing_is_loaded_from_elsewhere(page: Any, stored: Any, make: Any) -> None:
    stored([make()])
    html = page()
    assert html.links == ["data:,"]
    assert not {"img", "iframe", "base"} & set(html.tags)
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|url\(|@import|https?:", html.scripts[2] + html.text)


def test_plots_hold_every_series_and_run(page: Any, stored: Any, make: Any) -> None:
    stored([make(0), make(1, ms=2.0), make(2, status="oom", environment={"driver": "2"}), make(0, backend="b")])
    found = data(page())
    assert [run[0] for run in found["runs"]] == [f"00{n}ccccccc" for n in range(3)]
    one, other = sorted(found["series"], key=lambda series: series["name"][0])
    assert (one["name"][0], one["x"]) == ("b", [0])
    assert other["x"] == [0, 1, 2]
    assert other["ms"] == [pytest.approx(1, rel=0.01), pytest.approx(2, rel=0.01), None]
    assert (other["status"], other["environments"]) == ({"2": "oom"}, [[2, "driver 570.1 → 2"]])
    assert [run[0] for run in data(page("--runs", "1"))["runs"]] == ["002ccccccc"]


def test_plotly_is_within_the_page(cli: Cli, stored: Any, make: Any, tmp_path: Path) -> None:
    stored([make()])
    out = tmp_path / "r.html"
    assert cli("report", "-o", out).exit_code == 0
    text = out.read_text(encoding="utf-8")
    assert "plotly.js v" in text
    assert 4e6 < len(text) < 1e7
    assert text.count("</script") == 3


def test_without_plotly_it_says_what_to_install(
    cli: Cli, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make()])
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = cli("report")
    assert (result.exit_code, "pip install 'groupbench[report]'" in result.stderr) == (2, True)


def test_a_place_that_cannot_be_written(cli: Cli, stored: Any, make: Any, tmp_path: Path) -> None:
    stored([make()])
    (tmp_path / "file").write_text("kept")
    for bad in (tmp_path, tmp_path / "none" / "r.html", tmp_path / "file" / "r.html"):
        result = cli("report", "-o", bad)
        assert result.exit_code == 2
    assert (tmp_path / "file").read_text() == "kept"
    assert not list(tmp_path.glob(".*"))


def test_a_failed_write_keeps_the_old_page(
    cli: Cli, stored: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make()])
    out = tmp_path / "r.html"
    out.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = cli("report", "-o", out)
    assert (result.exit_code, "No space left" in result.stderr) == (2, True)
    assert out.read_text() == "old"
    assert not list(tmp_path.glob(".*"))


def test_a_dash_is_standard_output(
    cli: Cli, stored: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make()])
    monkeypatch.chdir(tmp_path)
    assert cli("report", "-o", "-").stdout.startswith("<!doctype html>")
    assert not Path("-").exists()
