"""Test `gate -o`: each format is well formed and within its reader's limits, for any text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cases import refused
from click.testing import Result as CliResult
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.facts.record import Environment
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.headline import summary as first_line
from groupbench.tracker.judge.incident_rows import IncidentRow, MemberRow, StateChange
from groupbench.tracker.judge.verdicts import Effect, Gate, Judged, Span, exit_code
from groupbench.tracker.outputs import FORMATS, comment, http, junit, summary
from groupbench.tracker.outputs.escape import code, shown, size, words
from groupbench.tracker.outputs.result import CiLocation, GateResult, ci_place
from groupbench.tracker.outputs.verdict import render as render_json
from groupbench.tracker.query.rows import EnvironmentRow, PointRow, RunRow, SeriesRow
from groupbench.tracker.text.wording import printable

Cli = Callable[..., CliResult]

EVIL = "Tiles | `x` </details> <script>alert(1)</script> @everyone closes #12 [a](http://evil) ]]> & 😀 {0}"
NIGHT = datetime(2026, 1, 14, 3, tzinfo=UTC)


# ---- verdicts of any kind, with any text


def run_row(text: str = "fix", commit: str = "c" * 40) -> RunRow:
    return RunRow(1, "run-1", commit, False, "main", text, NIGHT, "nightly", text or None, author=text)


def series_row(pk: int, text: str = "triton_flat", shape: str | None = None) -> SeriesRow:
    shape = shape or f"G=4,N={pk},K=64"
    return SeriesRow(pk, "grouped_gemm", text, "fwd", "bf16", shape, "builtin", "cooled", "H100", 0, {}, None, None)


def judged(pk: int, verdict: Any, text: str = "note", **facts: Any) -> Judged:
    series, run = series_row(pk, text or "b"), run_row(text)
    point = PointRow(
        pk=pk, series=series, run=run, environment=EnvironmentRow(1, "e", Environment(device="cuda")),
        status="ok", message=None, baseline=False, timing="gpu", median_ms=1.05, low_ms=1.0, high_ms=1.1, error=0.01,
        prepare_ms=None, enqueue_ms=None, rms=9e-3, max_abs=None, worst_block_rms=None, mismatch=None, unwritten=None,
        repeatable=True, kernel_hash=None, duration_s=3.0,
    )  # fmt: skip
    moved = verdict in ("regressed", "improved", "suspect", "unresolved")
    fields: dict[str, Any] = {"note": text}
    if moved:
        fields |= {"what": "latency", "cause": "code", "effect": Effect(1.0, change=0.05, low=0.04, high=0.06)}
        fields["span"] = Span(run_row(commit="b" * 40), run)
    return Judged(series, Verdict(verdict), None if verdict == "missing" else point, **fields | facts)


def alert_row(pk: int, text: str) -> MemberRow:
    events = (StateChange(NIGHT, text, "new", text),)
    incident = IncidentRow(pk, text, "acknowledged", text, NIGHT, events=events)
    return MemberRow(
        pk, series_row(pk), "latency", incident, "code", Span(None, run_row(text)), None, 1.0, 1.05, 0.05, 0.04, 0.06,
        NIGHT, None, None,
    )  # fmt: skip


def result_of(rows: list[Judged], *, strict: bool = False, text: str = "fix", **facts: Any) -> GateResult:
    code = exit_code(rows, strict)
    summary_line = first_line(rows, code, strict=strict, same_commit=False)
    return GateResult(Gate(run_row(text), tuple(rows), code, summary_line), strict=strict, **facts)


TRAPS = (
    *(EVIL, "", "`", "``", "|", "a | b", "\\|", "a\\", "<!--", "-->", "\n# x", "\ufffe\uffff\x0b\x00", "\ud800"),
    *("😀" * 400, "x" * 3000, "&" * 3000),
)
TEXTS = st.one_of(st.sampled_from(TRAPS), st.text(st.characters(), max_size=60))


@st.composite
def results(draw: Any) -> GateResult:
    verdicts = draw(st.lists(st.sampled_from(list(Verdict)), max_size=6))
    rows = [judged(pk, verdict, draw(TEXTS), loud=draw(st.booleans())) for pk, verdict in enumerate(verdicts)]
    text = draw(TEXTS)
    acknowledged = draw(st.booleans())
    rows = [replace(row, alert=alert_row(row.series.pk, text)) if acknowledged else row for row in rows]
    place = CiLocation("https://example.org/o/r") if draw(st.booleans()) else CiLocation()
    return result_of(rows, strict=draw(st.booleans()), text=text, place=place)


class Tags(HTMLParser):
    """Parse rendered Markdown: its tags in order, and whether they nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []
        self.outside, self.inside = "", ""  # of code
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [value or "" for name, value in attrs if name == "href"]
        if tag not in ("br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if "code" in self.open:
            self.inside += data
        else:
            self.outside += data


def rendered(text: str) -> Tags:
    markdown_it = pytest.importorskip("markdown_it")
    parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    tags = Tags(parser.render(text))
    assert not tags.open
    return tags


def check_markdown(text: str, result: GateResult, limit: int) -> Tags:
    assert size(text) <= limit
    tags = rendered(text)
    allowed = {"h2", "h3", "p", "strong", "ul", "li", "code", "a", "details", "summary", "table", "thead", "tbody"}
    allowed |= {"tr", "th", "td"}
    assert tags.seen <= allowed, tags.seen - allowed
    assert all(link.startswith("https://example.org/o/r/commit/") for link in tags.links), tags.links
    assert "@" not in tags.outside
    assert "http" not in tags.outside
    return tags


@given(results())
def test_any_verdict_is_well_formed_markdown_within_the_limits(result: GateResult) -> None:
    check_markdown(summary.render(result), result, 2**20)
    text = comment.render(result)
    check_markdown(text, result, 65_535)
    assert comment.mark_of(text)


@given(results())
def test_any_verdict_is_well_formed_for_programs(result: GateResult) -> None:
    check_junit(junit.render(result), result)
    assert json.loads(render_json(result))["exit_code"] == result.gate.exit_code


def check_junit(text: str, result: GateResult) -> ElementTree.Element:
    """Elements and attributes are those that Jenkins' junit-10.xsd knows, counts are right, and red is red."""
    top = ElementTree.fromstring(text)
    allowed = {
        "testsuites": {"name", "tests", "failures", "errors"},
        "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
        "properties": set(),
        "property": {"name", "value"},
        "testcase": {"name", "classname", "time"},
        "failure": {"type", "message"},
        "error": {"type", "message"},
        "skipped": {"type", "message"},
        "system-out": set(),
    }
    for element in top.iter():
        assert set(element.attrib) <= allowed[element.tag], element.tag
    for suite in top:
        cases = suite.findall("testcase")
        assert int(suite.get("tests", "")) == len(cases)
        for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert int(suite.get(name, "")) == sum(case.find(tag) is not None for case in cases)
        assert re.fullmatch(r"\d+\.\d{3}", suite.get("time", ""))
    assert len(top.findall("testsuite/testcase")) == len(result.gate.rows) + 1
    assert top.get("tests") == str(len(result.gate.rows) + 1)
    red = int(top.get("failures", "")) + int(top.get("errors", ""))
    assert (red > 0) == (result.gate.exit_code != 0)
    return top


@given(TEXTS)
def test_code_shows_the_text_as_it_is(text: str) -> None:
    table = f"| a | b |\n| --- | --- |\n| {code(text)} | {words(text)} |\n"
    assert rendered(table).seen <= {"table", "thead", "tbody", "tr", "th", "td", "code"}
    assert rendered(f"| a |\n| --- |\n| {code(text)} |\n").inside == printable(text)


def test_a_command_in_a_sentence_stays_code_and_the_sentence_text() -> None:
    text = "fix or revert abc of helion_x, or `groupbench incidents expect 3 --reason TEXT` by @me"
    expected = "fix or revert abc of `helion_x`, or `groupbench incidents expect 3 --reason TEXT` by `@me`"
    assert words(text) == expected


@pytest.mark.parametrize(("cause", "blamed"), [("code", True), ("toolchain", False)])
def test_an_author_is_named_only_if_the_code_is_the_cause(cause: str, blamed: bool) -> None:
    rows = [judged(1, "unresolved", "Ada", note="", cause=cause), judged(2, "ok", "Bob", loud=True)]
    result = result_of(rows)
    result = replace(result, gate=replace(result.gate, transitions=("driver 570.1 → 580.2: 1 series moved",)))
    text = comment.render(result).partition("<details>")[0]
    assert ("by `Ada`" in text) is blamed
    assert "- driver 570.1 → 580.2: 1 series moved\n" in text
    assert "**ok**" not in text


def test_a_cut_text_has_no_half_command() -> None:
    assert words(shown("run `groupbench gate` or `groupbench confirm` now", 35)) == "run `groupbench gate` or …"


def test_nothing_is_read_as_markup_in_a_subject() -> None:
    tags = check_markdown(comment.render(result_of([judged(1, "regressed", EVIL)], text=EVIL)), result_of([]), 65_535)
    assert "script" not in tags.seen


# ---- limits


def many(number: int, verdict: Any = "regressed") -> GateResult:
    rows = [replace(judged(pk, verdict, "😀" * 500), cause="code") for pk in range(number)]
    return result_of(
        [replace(row, series=series_row(pk, f"b{pk % 50}", "😀" * 300 + str(pk))) for pk, row in enumerate(rows)]
    )


def test_a_comment_of_5000_regressions_fits_and_says_what_was_cut() -> None:
    text = comment.render(many(5000))
    assert 60_000 < size(text) < 65_536
    rows = text.count("\n| `grouped_gemm`")
    left = re.search(r"(\d+) lines were left out", text)
    assert left
    assert rows + int(left[1]) == 5000
    assert rendered(text).seen >= {"details", "table"}
    assert "latency of 5000 series" in text


def test_a_summary_of_8000_series_fits_and_says_what_was_cut(tmp_path: Path) -> None:
    result = many(8000)
    assert 2**20 - 20_000 < size(summary.render(result)) < 2**20
    path = tmp_path / "step.md"
    path.write_text("x" * 500_000)
    summary.append(result, path)
    assert 1_000_000 < path.stat().st_size < 2**20
    assert "lines were left out" in path.read_text()
    with pytest.raises(Exception, match="no room"):
        summary.append(result, path)


def test_a_comment_of_any_length_is_cut_at_a_line(tmp_path: Path) -> None:
    text = "<details><summary>x</summary>\n\n```\n" + "😀 line\n" * 20_000
    cut = comment.fitted(text)
    assert size(cut) < 65_536
    assert "lines were left out" in cut
    assert "\ufffd" not in cut
    tags = rendered(cut)
    assert tags.seen >= {"details", "pre", "code"}
    assert "left out" in tags.outside
    assert comment.fitted("short\n") == "short\n"
    closed = comment.fitted("```\n<details>\n```\n" + "line\n" * 20_000)
    assert "details" not in rendered(closed).seen
    assert "left out" in rendered(closed).outside


# ---- the text of each


def test_what_changed_together_is_told_once() -> None:
    rows = [replace(judged(pk, "regressed", "n"), effect=Effect(change=0.03 + pk / 100)) for pk in range(3)]
    (group,) = result_of(rows).groups
    assert (group.change, group.head) == ("+3.0% to +5.0%", "latency of 3 series")
    worse = replace(judged(1, "regressed"), what="accuracy", effect=Effect(before_rms=2e-3))
    assert result_of([worse]).groups[0].change == "rms 4.50×"


def test_an_interpreter_s_time_is_no_latency() -> None:
    rows = [judged(1, "new", loud=True), judged(2, "wrong")]
    result = result_of([replace(row, point=replace(row.point, timing="interpreted", median_ms=6.927)) for row in rows])
    for text in (summary.render(result), comment.render(result)):
        assert "interpreted" in rendered(text).outside
        assert "6.927" not in text
    assert [row["timing"] for row in json.loads(render_json(result))["series"]] == ["interpreted"] * 2


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("strict", (False, True))
def test_junit_is_red_where_the_gate_fails(verdict: Any, strict: bool) -> None:
    result = result_of([judged(1, verdict), judged(2, "ok")], strict=strict)
    top = check_junit(junit.render(result), result)
    case = next(case for case in top.iter("testcase") if case.get("classname", "").startswith("grouped"))
    young = "error" if strict else "skipped"
    expected = {
        "wrong": "failure", "regressed": "failure", "missing": "error", "unresolved": "error", "suspect": "error",
        "incomparable": "error", "improved": "system-out", "ok": "system-out", "new": young, "noisy": young,
        "unconfirmed": "error", "undecided": young,
        "unavailable": "skipped", "~": "skipped",
    }  # fmt: skip
    assert [child.tag for child in case] == [expected[verdict]]


def test_a_known_regression_and_a_canary_are_skipped_in_junit() -> None:
    row = replace(judged(1, "regressed"), alert=alert_row(1, "me"))
    canary = judged(2, "suspect")
    canary = replace(canary, series=replace(canary.series, operator="canary"))
    top = check_junit(junit.render(result_of([row, canary])), result_of([row, canary]))
    assert [case[0].tag for case in top.iter("testcase") if len(case)] == ["skipped", "skipped"]


def test_two_changes_of_a_series_are_two_cases_of_two_names() -> None:
    """Names must differ, because a report would show only one of equal names."""
    slower = judged(1, "regressed")
    result = result_of([slower, replace(slower, what="accuracy"), judged(2, "ok")])
    top = check_junit(junit.render(result), result)
    names = [(case.get("classname"), case.get("name")) for case in top.iter("testcase")]
    assert len(set(names)) == len(names) == 4
    assert str(names[2][1]) == f"{names[1][1]} accuracy"


def test_the_verdict_on_a_series_is_the_gravest_of_its_rows() -> None:
    slower, expected = judged(1, "regressed"), replace(judged(1, "ok"), what="accuracy")
    for rows in ([slower, expected], [expected, slower]):
        assert result_of([*rows, judged(2, "ok")]).gate.by_series == {1: "regressed", 2: "ok"}


def test_nothing_measured_is_an_error_of_the_gate_itself() -> None:
    result = result_of([replace(judged(1, "unavailable"), point=None)])
    assert result.gate.exit_code == 3
    top = check_junit(junit.render(result), result)
    assert [case.get("name") for case in top.iter("testcase") if case.find("error") is not None] == ["gate"]


def test_place_is_what_ci_says() -> None:
    github = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "o/r", "GITHUB_RUN_ID": "5"}
    assert ci_place(github) == CiLocation("https://github.com/o/r", "https://github.com/o/r/actions/runs/5")
    gitlab = {"CI_PROJECT_URL": "https://gitlab.com/o/r", "CI_JOB_URL": "https://gitlab.com/o/r/-/jobs/1"}
    assert ci_place(gitlab).commit("abc") == "https://gitlab.com/o/r/-/commit/abc"
    assert ci_place({"CI_PROJECT_URL": "javascript:alert(1)"}).repository is None
    assert ci_place({"CI_PROJECT_URL": "https://x/)[a"}).repository == "https://x/%29%5Ba"
    assert ci_place({}) == CiLocation()


# ---- the command


@pytest.fixture
def slower(stored: Any, make: Any, two_nights_are_certain: None, monkeypatch: Any, tmp_path: Path) -> Path:
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_REPOSITORY", "CI_PROJECT_URL"):
        monkeypatch.delenv(name, raising=False)
    facts = {"subject": EVIL, "author": "A. N. Other"}
    stored([*[make(n) for n in range(6)], *[make(n, ms=1.05, commit_facts=facts) for n in (6, 7)]])
    monkeypatch.chdir(tmp_path)
    return tmp_path


FILES = {"summary": "s.md", "comment": "c.md", "junit": "j.xml", "json": "v.json"}


def test_the_help_lists_every_format(cli: Cli) -> None:
    text = " ".join(cli("gate", "--help").stdout.split())
    named = text.partition("may be repeated: ")[2].partition(". --format")[0]
    assert re.sub(r"\[?=\w+\]?", "", named).replace(". ", "") == ", ".join(FORMATS)
    assert "summary[=FILE], comment=FILE, junit=FILE" in named, "a file is named where one is needed"


def test_all_at_once(cli: Cli, slower: Path) -> None:
    assert set(FILES) == set(FORMATS)
    options = [text for form, name in FILES.items() for text in ("-o", f"{form}={name}")]
    result = cli("gate", "--update", *options)
    assert result.exit_code == 1
    assert result.stdout.startswith("GATE regression: 1 series regressed")
    assert "GATE regression" in (slower / "s.md").read_text()
    assert EVIL not in (slower / "c.md").read_text()
    assert ElementTree.parse(slower / "j.xml").getroot().get("failures") == "1"
    verdict = json.loads((slower / "v.json").read_text())
    assert verdict == json.loads(cli("gate", "--format=json").stdout) | {"series": verdict["series"]}


def test_the_step_summary_is_added_to(cli: Cli, slower: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(slower / "step.md"))
    (slower / "step.md").write_text("before\n")
    assert cli("gate", "-o", "summary").exit_code == 1
    assert cli("gate", "-o", "summary=other.md").exit_code == 1
    text = (slower / "step.md").read_text()
    assert text.startswith("before\n\n## ")
    assert text.count("GATE") == 1
    assert (slower / "other.md").read_text().startswith("## ")


def test_what_cannot_be_written_is_2_after_all_else(cli: Cli, slower: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli("gate", "-o", "junit=no/such/j.xml", "-o", "json=v.json")
    assert result.exit_code == 2
    assert result.stdout.startswith("GATE regression")
    assert "no/such/j.xml: cannot be written" in result.stderr
    assert (slower / "v.json").exists()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("nonsense=x",), "no output format 'nonsense'; known: summary"),
        (("junit",), "junit: needs a file, junit=FILE"),
        (("junit=-",), "stdout already carries the verdict"),
        (("summary",), "GITHUB_STEP_SUMMARY"),
        (("junit=x", "json=./x"), "two outputs name the same file"),
    ],
    ids=["unknown", "no-file", "stdout", "summary", "twice"],
)
def test_usage_is_checked_before_anything_is_judged(
    cli: Cli, slower: Path, targets: tuple[str, ...], message: str
) -> None:
    assert message in refused(cli, "gate", *[text for one in targets for text in ("-o", one)])


def test_host_is_all_that_is_said_of_an_url() -> None:
    assert http.host("https://hooks.slack.com/services/T/B/secret") == "hooks.slack.com"
