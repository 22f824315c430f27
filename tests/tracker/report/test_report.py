"""`groupbench report`: one page, whole, escaped, and free of the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, refused

DOCS = (Path(__file__).parents[3] / "docs" / "guide" / "report.md").read_text(encoding="utf-8")
EXAMPLES = [line.removeprefix("$ ") for line in DOCS.split("\n") if line.startswith("$ ")]
BREAKING = """</script><script>alert(1)</script> "quoted" 'it' & 100% $title ${x} <!--\u2028"""


class Page(HTMLParser):
    """Parse a page: its scripts, the text outside of them, and resources from the network."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []  # that run
        self.data: dict[str, str] = {}  # by id
        self.rules = ""  # the content security policy
        self.text = ""
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        attributes = {name: value or "" for name, value in attrs}
        self.rules += attributes.get("content", "") if "http-equiv" in attributes else ""
        self.reading = attributes.get("id", "") if tag == "script" else ""
        if tag == "script" and not self.reading:
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script" and self.reading:
            self.data[self.reading] = self.data.get(self.reading, "") + data
        elif self.cdata_elem == "script":
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


def data(page: Page, operator: str = "grouped_gemm") -> dict[str, Any]:
    return json.loads(page.data[f"data-op-{operator}"])


def series(page: Page) -> dict[str, dict[str, Any]]:
    """By backend."""
    return {one["backend"]: one for one in data(page)["series"]}


def test_the_page_says_what_the_gate_says(cli: Cli, page: Any, stored: Any, make: Any) -> None:
    stored([make(0), make(1), make(1, backend="b", status="wrong", message="0.5 outside")])
    stored([make(1, backend="c", status="unavailable", message="needs sm_100")])
    html = page()
    head, _, counts = cli("gate").stdout.split("\n")[0].removeprefix("GATE ").rpartition(". ")
    word, _, rest = head.partition(": ")
    start = html.text.index(word, html.text.index("groupbench", html.text.index("Skip")))
    assert html.text.index(rest, start) < html.text.index("What changed")
    for count in counts.split(", "):
        assert start < html.text.index(count) < html.text.index("What changed")
    assert html.text.index("0.5 outside") > html.text.index("What changed")
    assert html.text.index("needs sm_100") > html.text.index("Series without a result")


@pytest.mark.parametrize(
    ("nights", "kind", "text"), [(1, "blind", "nothing to compare with yet"), (6, "ok", "no change above")]
)
def test_a_pass_without_a_judged_latency_is_not_green(
    page: Any, stored: Any, make: Any, tmp_path: Path, nights: int, kind: str, text: str
) -> None:
    stored([make(night) for night in range(nights)])
    assert text in page().text
    assert f'<p class="verdict {kind}">' in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("acknowledged", "tone", "special"),
    [((), "bad", ""), ((1,), "bad", " (1 acknowledged)"), ((1, 2), "warn", " (2 acknowledged)")],
)
@pytest.mark.usefixtures("two_nights_are_certain")
def test_regressions_are_red_until_all_are_acknowledged(
    page: Any, stored: Any, make: Any, cli: Cli, tmp_path: Path, acknowledged: tuple[int, ...], tone: str, special: str
) -> None:
    steps = (("a", 4), ("b", 5))  # two causes, so two incidents
    stored([make(night, 1.0 if night < at else 1.1, backend=name) for night in range(7) for name, at in steps])
    stored([make(night, 1.0, backend="c") for night in range(7)])
    assert "2 opened" in cli("gate", "--update").stderr
    for alert in acknowledged:
        cli("incidents", "ack", str(alert), "--reason", "known")
    page()
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert f'<li class="{tone}"><b>2</b> regressed{special}</li>' in text
    assert '<li class="good"><b>1</b> ok</li>' in text
    assert re.search(rf'class="message {tone}"[^>]*>2 regressed,<wbr> 1 ok<', text)  # of the operator


def test_special_cases_do_not_change_the_colour_of_ok(
    page: Any, stored: Any, make: Any, tmp_path: Path, two_nights_are_certain: None
) -> None:
    stored([make(night, ms=1.0 if night < 5 else 0.9) for night in range(26)])
    page()
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert '<li class="good"><b>1</b> ok (1 changed long ago)</li>' in text


@pytest.mark.usefixtures("two_nights_are_certain")
def test_what_changed_names_the_commit_its_author_and_the_levels(page: Any, stored: Any, make: Any) -> None:
    facts = {"subject": "Tiles of 128x256", "author": "Ada <ada@example.org>"}
    stored([make(night, ms=1.0 if night < 5 else 1.1, commit_facts=facts) for night in range(7)])
    text = page().text
    changed = text[text.index("What changed") : text.index("Operators")]
    for expected in ("regressed", "+10.", "005ccccccc Tiles of 128x256", "by Ada <ada@example.org>"):
        assert expected in changed, expected
    before, now = (float(level) for level in re.findall(r"([\d.]+) ms", changed)[:2])
    assert (before, now) == pytest.approx((1.0, 1.1), abs=0.01)
    assert "last before: 004ccccccc" in changed


@pytest.mark.usefixtures("two_nights_are_certain")
def test_every_change_and_every_cell_has_a_command(page: Any, stored: Any, make: Any) -> None:
    stored([make(night, ms=1.0 if night < 5 else 1.1) for night in range(7)])
    html = page()
    old, new = (f"{night:03d}" + "c" * 37 for night in (4, 5))
    changed = html.text[html.text.index("What changed") : html.text.index("Operators")]
    assert f"groupbench ab {old} {new} --operator grouped_gemm --backend triton" in changed
    last = f"{6:03d}" + "c" * 37
    assert series(html)["triton"]["repro"].startswith(f"git switch --detach {last} && tritonbench --host builtin --op")


def test_series_that_are_missing_alike_are_one_line(page: Any, stored: Any, make: Any) -> None:
    shapes = [f"G=4,N={size}" for size in range(1, 5)]
    stored([make(0, backend=name, shape=shape) for name in ("a", "b") for shape in shapes])
    stored([make(1, backend="a", shape=shapes[0])])
    html = page()
    changed = html.text[html.text.index("What changed") : html.text.index("Operators")]
    assert changed.count("absent from this one") == 2
    for expected in ("grouped_gemm a: 3 series", "grouped_gemm b: 4 series", "G=4,N=4"):
        assert expected in changed, expected
    for empty in ("effect", "before", "now", "cause"):  # a column of nothing
        assert empty not in changed, empty
    assert sum(link.startswith("#op-grouped_gemm/s") for link in html.links) == 7 + 1  # and the result's own
    assert "grouped_gemm" + "8" + "1" + "7 missing" in html.text  # series, results in this run, verdicts


def test_an_interpreter_s_time_is_no_latency(page: Any, stored: Any, make: Any) -> None:
    stored([make(0, ms=6.927, timing="interpreted", status="wrong", message="0.5 outside")])
    text = page().text
    changed = text[text.index("What changed") : text.index("Operators")]
    assert "interpreted" in changed
    assert "6.93" not in changed


def test_every_backend_with_a_speed_can_be_the_baseline(page: Any, stored: Any, make: Any) -> None:
    stored([make(ms=3.0, backend="torch", baseline=True), make(ms=1.5), make(backend="c", status="oom")])
    maps = data(page())["maps"]
    assert [list(one) for one in maps] == [["torch", "triton"]]
    assert maps[0]["torch"]["data"][0]["text"] == [["1.00×", "", "▲ 2.00×"]]
    assert maps[0]["triton"]["data"][0]["text"] == [["▼ 0.50×", "", "1.00×"]]
    assert maps[0]["torch"]["data"][1]["text"] == ["oom"]


def test_a_very_large_map_offers_fewer_baselines() -> None:
    from groupbench.tracker.report import page as module
    from groupbench.tracker.report.shown import RunLabel, SpeedMap, SpeedRow

    names = tuple(f"b{n}" for n in range(50))
    row = SpeedRow("s", "s", RunLabel("r", "c", "d"), False, dict.fromkeys(names, 1.0), {})
    assert module.baselines(SpeedMap("", names, (row,) * 10)) == list(names[:40])
    assert module.baselines(SpeedMap("", names, (row,) * 10_000)) == ["b0"]
    assert module.baselines(SpeedMap("", ("b0",), (row,))) == []


def test_nothing_stored_can_leave_its_place(page: Any, stored: Any, make: Any) -> None:
    names = {"operator": BREAKING, "backend": BREAKING, "shape": BREAKING, "plan": BREAKING, "run": BREAKING}
    commit = {"subject": BREAKING, "branch": BREAKING, "author": BREAKING}
    status = {"status": "error", "message": BREAKING}
    where = {"gpu": BREAKING, "settings": {BREAKING: BREAKING}}
    stored([make(**names, **status, commit_facts=commit, environment=where, commit=BREAKING)])
    html = page()
    assert len(html.scripts) == 2
    assert "alert(1)" not in "".join(html.scripts)
    assert html.scripts[0].endswith("*/\n")
    assert len(html.data) == 2
    assert not set("<>&\u2028") & set("".join(html.data.values()))
    assert BREAKING in html.text
    (one,) = json.loads(html.data[next(name for name in html.data if name != "runs")])["series"]
    assert one["backend"] == BREAKING
    assert BREAKING in one["none"]


def test_nothing_is_loaded_from_elsewhere(page: Any, stored: Any, make: Any) -> None:
    stored([make()])
    html = page()
    assert [link for link in html.links if not link.startswith("#")] == ["data:,"]
    assert not {"img", "iframe", "base"} & set(html.tags)
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|url\(|@import|https?:", html.scripts[1] + html.text)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in html.scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)  # no other script runs
    assert html.rules.startswith(f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:")


def test_plots_hold_every_series_and_run(page: Any, stored: Any, make: Any) -> None:
    stored([make(0), make(1, ms=2.0), make(2, status="oom", environment={"driver": "2"}), make(0, backend="b")])
    html = page()
    assert [short for _, short in json.loads(html.data["runs"])] == [f"00{n}cccc<br>01-0{n + 1}" for n in range(3)]
    histories = series(html)
    assert histories["b"]["latency"]["data"][0]["x"] == [0]
    good, crosses = histories["triton"]["latency"]["data"][:2]
    assert (good["x"], good["y"]) == ([0, 1], [pytest.approx(1, rel=0.01), pytest.approx(2, rel=0.01)])
    assert (crosses["x"], crosses["text"]) == ([2], ["oom: it was oom"])
    assert histories["triton"]["latency"]["data"][-1]["text"] == ["driver 570.1 → 2"]
    assert [short for _, short in json.loads(page("--runs", "1").data["runs"])] == ["002cccc<br>01-03"]


def test_a_run_of_the_past_knows_nothing_of_later_ones(page: Any, stored: Any, make: Any) -> None:
    stored([make(0), make(1, ms=2.0), make(2, backend="later")])
    html = page("--run", "run-001")
    assert [short for _, short in json.loads(html.data["runs"])] == ["000cccc<br>01-01", "001cccc<br>01-02"]
    assert "later" not in series(html)
    (newest,) = json.loads(page("--run", "run-001", "--runs", "1").data["runs"])
    assert newest[1] == "001cccc<br>01-02"


def test_runs_of_one_instant_are_told_apart(page: Any, stored: Any, make: Any) -> None:
    """Imported files of one day have such runs."""
    stored([make(0), make(1, run="a"), make(1, run="b", commit="b" * 40), make(1, run="c", commit="c" * 40)])
    for name, runs in (("a", ["001cccc"]), ("b", ["bbbbbbb"]), ("c", ["ccccccc"])):
        html = page("--run", name, "--runs", "1")
        assert [short.partition("<br>")[0] for _, short in json.loads(html.data["runs"])] == runs
    assert len(json.loads(page("--run", "b").data["runs"])) == 3


def test_operators_whose_names_look_alike_have_pages_of_their_own(page: Any, stored: Any, make: Any) -> None:
    stored([make(operator="a b"), make(operator="a.b"), make(operator="a-b")])
    html = page()
    assert set(html.data) == {"runs", "data-op-a-b", "data-op-a-b-2", "data-op-a-b-3"}


def test_plotly_is_within_the_page(cli: Cli, stored: Any, make: Any, tmp_path: Path) -> None:
    stored([make()])
    out = tmp_path / "r.html"
    assert cli("report", "-o", out).exit_code == 0
    text = out.read_text(encoding="utf-8")
    assert "plotly.js v" in text
    assert "cdn.plot.ly" not in text
    assert 4e6 < len(text) < 1e7
    assert text.count("</script") == 4


def test_without_plotly_it_says_what_to_install(cli: Cli, stored: Any, make: Any, monkeypatch: Any) -> None:
    stored([make()])
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert "pip install -e '.[report]'" in refused(cli, "report")


def test_a_dash_is_standard_output(cli: Cli, stored: Any, make: Any, tmp_path: Path, monkeypatch: Any) -> None:
    stored([make()])
    monkeypatch.chdir(tmp_path)
    assert cli("report", "-o", "-").stdout.startswith("<!doctype html>")
    assert not Path("-").exists()


@pytest.mark.usefixtures("page")
def test_a_directory_takes_it_as_report_html(cli: Cli, stored: Any, make: Any, tmp_path: Path) -> None:
    stored([make()])
    (tmp_path / "out").mkdir()
    assert "-o names no file" in cli("report", "-o", "").stderr
    assert cli("report", "-o", tmp_path / "out").stderr == f"wrote {tmp_path}/out/report.html\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_docs_run(
    cli: Cli, stored: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    stored([make(0, run="night-000"), make(1, run="night-001")])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    program, *args = shlex.split(example)
    assert program == "groupbench"
    result = cli(*args)
    assert (result.exit_code, result.stderr.startswith("wrote ")) == (0, True), result.stderr


@pytest.mark.parametrize(("status", "tone"), [("ok", "faint"), ("error", "warn"), ("wrong", "bad")])
def test_an_operator_has_the_tone_of_its_most_severe_verdict(
    page: Any, stored: Any, make: Any, tmp_path: Path, status: str, tone: str
) -> None:
    stored([make(0), make(0, backend="b")])
    stored([make(1), make(1, backend="b", status=status, message="why")])
    page()
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    table = html[html.index("Operators") :]
    assert f'class="message {tone}"' in table[: table.index("</table>")]
