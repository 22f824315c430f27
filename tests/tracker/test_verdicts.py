"""The tables of verdicts and of exit codes, from which every display and count is derived."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from groupbench import operators, tracker
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.verdicts import OUTCOMES, TONES, Verdict, most_severe, style_sheet, tone_of
from groupbench.tracker.judge.verdicts import Judged, exit_code
from groupbench.tracker.outputs.escape import clean
from groupbench.tracker.query.rows import PointRow, SeriesRow

FOLDER = Path(tracker.__path__[0])


def test_the_most_severe_comes_first_and_severity_follows_the_exit_code() -> None:
    assert [verdict.severity for verdict in Verdict] == list(range(len(Verdict)))
    failing = [verdict for verdict in Verdict if verdict.fails]
    assert failing == list(Verdict)[: len(failing)]


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_that_fails_or_stops_a_job_is_not_quiet(verdict: Verdict) -> None:
    listed = verdict in (Verdict.IMPROVED, Verdict.UNDECIDED)
    assert verdict.quiet == (verdict.exit is ExitCode.OK and not listed)


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_is_its_word_in_text_and_json(verdict: Verdict) -> None:
    import msgspec

    assert f"{verdict}" == verdict.value == str(verdict)
    assert msgspec.json.decode(msgspec.json.encode(clean({"v": verdict}))) == {"v": verdict.value}
    assert {verdict: 1}[verdict.value] == 1  # type: ignore[index]


def row(verdict: Verdict, operator: str = "grouped_gemm") -> Judged:
    series = SeriesRow(
        pk=1, operator=operator, backend="b", mode="fwd", dtype="bf16", shape="s", host="builtin", protocol="cooled",
        hardware="H100", seed=0, dims={}, flops=None, min_bytes=None,
    )  # fmt: skip
    point = PointRow(**dict.fromkeys(PointRow.__dataclass_fields__) | {"status": "ok"})  # type: ignore[arg-type]
    return Judged(series, verdict, point)


@pytest.mark.parametrize(
    ("verdicts", "strict", "code"),
    [
        pytest.param(["ok", "incomparable", "suspect", "regressed"], False, ExitCode.FAILED, id="failed first"),
        pytest.param(["ok", "incomparable", "missing"], False, ExitCode.INCOMPLETE, id="then incomplete"),
        pytest.param(["ok", "incomparable", "new"], True, ExitCode.INCOMPARABLE, id="then incomparable"),
        pytest.param(["ok", "new"], True, ExitCode.INCOMPLETE, id="young ones under strict"),
        pytest.param(["ok", "new"], False, ExitCode.OK, id="young ones"),
        pytest.param(["improved", "ok", "unavailable"], True, ExitCode.OK, id="better"),
        pytest.param([], False, ExitCode.INCOMPLETE, id="nothing measured"),
    ],
)
def test_the_exit_code_of_a_run(verdicts: Sequence[str], strict: bool, code: ExitCode) -> None:
    assert exit_code([row(Verdict(word)) for word in verdicts], strict) is code


def test_a_canary_in_doubt_does_not_stop_a_job() -> None:
    assert exit_code([row(Verdict.OK), row(Verdict.SUSPECT, "canary")], strict=True) is ExitCode.OK


def test_a_verdict_that_only_passes_without_strict_has_a_reason() -> None:
    """The gate's first line lists it by that."""
    assert all(verdict.unjudged for verdict in Verdict if verdict.strict is not ExitCode.OK)
    assert not any(verdict.unjudged for verdict in (Verdict.OK, Verdict.IMPROVED, Verdict.REGRESSED, Verdict.SUSPECT))


def test_every_exit_code_of_a_verdict_has_an_outcome() -> None:
    assert {verdict.exit for verdict in Verdict} == set(OUTCOMES)
    assert most_severe(OUTCOMES) is next(iter(OUTCOMES))


@pytest.mark.parametrize(
    ("word", "tone"),
    [
        *((str(verdict), verdict.tone.name) for verdict in Verdict),
        ("error", "bad"), ("skipped", "faint"), ("timeout", "warn"), ("", "faint"), (None, "faint"),
    ],
)  # fmt: skip
def test_each_word_has_a_tone(word: str | None, tone: str) -> None:
    assert tone_of(word).name == tone


def test_the_style_sheet_has_each_tone_for_both_grounds() -> None:
    sheet = style_sheet()
    for tone in TONES:
        assert sheet.count(f"--{tone}: {tone.light};") == 1
        assert sheet.count(f"--{tone}: {tone.dark};") == 2


WORD = re.compile(r"""["'](regressed|improved|unresolved|unconfirmed|incomparable)["']""")


def test_no_other_file_spells_a_verdict() -> None:
    files = [path for kind in ("*.py", "*.html", "*.js") for path in FOLDER.rglob(kind)]
    spelled = {str(path.relative_to(FOLDER)) for path in files if WORD.search(path.read_text())}
    assert spelled <= {"facts/verdicts.py", "judge/rules.py"}  # where rules have names


FILES = [
    pytest.param(path, id=f"{package.__name__.rpartition('.')[2]}/{path.relative_to(folder)}")
    for package in (tracker, operators)
    for folder in (Path(package.__path__[0]),)
    for path in sorted(folder.rglob("*.py"))
    if re.search(r"exit\(|SystemExit\(|exit_code[^=\n]*=", path.read_text())
]
"""All files in which `literals` can find something; to parse the others takes a second."""


def literals(tree: ast.AST) -> Iterator[int]:
    """Lines that call something named `exit` with a number, or set an `exit_code` to one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            values = node.args if name in ("exit", "_exit", "SystemExit") else []
        elif isinstance(node, ast.Assign):
            named = any(getattr(target, "id", getattr(target, "attr", "")) == "exit_code" for target in node.targets)
            values = [node.value] if named else []
        else:
            continue
        for value in values:
            if any(isinstance(part, ast.Constant) and isinstance(part.value, int) for part in ast.walk(value)):
                yield node.lineno


@pytest.mark.parametrize("path", FILES)
def test_no_exit_code_is_a_number(path: Path) -> None:
    assert list(literals(ast.parse(path.read_text()))) == []


def test_codes_that_scripts_rely_on_do_not_change() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0, "FAILED": 1, "USAGE": 2, "INCOMPLETE": 3, "INCOMPARABLE": 4, "CANDIDATE": 5, "BUG": 70, "BUSY": 75,
        "INTERRUPTED": 130, "BROKEN_PIPE": 141, "TERMINATED": 143,
    }  # fmt: skip
