"""A metric that is registered when the program runs is stored, listed, exported, judged and drawn like all others."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Cli, rarely
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators import table
from groupbench.tracker.facts import metrics
from groupbench.tracker.facts.metrics import METRICS, RMS, Metric
from groupbench.tracker.facts.record import Record, RecordError, decode, encode
from groupbench.tracker.store.points import content_of

EFFORT = Metric("effort", "J", "effort of one call", rule="scatter", floor=0.005, least=0.02)
HOLES = Metric("holes", "", "registers that the compiler spilled", rule="exact", least=0.0)
WIDTH = Metric("width", "", "share of warps that fit", rule="exact", better="higher", least=0.0)


@pytest.fixture
def further(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(metrics, "METRICS", METRICS)
    before = dict(METRICS)
    for metric in (EFFORT, HOLES, WIDTH):
        metrics.register(metric)
    yield
    METRICS.clear()
    METRICS.update(before)


@pytest.fixture
def nights(stored: Callable[..., Any], make: Callable[..., Record], further: None) -> Callable[..., str]:
    """Store nights of two series whose metrics a function gives; gives the id of the last run."""

    def store(values: Callable[[int], dict[str, float]], number: int = 14) -> str:
        random = np.random.default_rng(5)
        records = []
        for night in range(number):
            scatter = 1 + 0.002 * random.standard_normal()
            held = {name: value * (scatter if name == "effort" else 1) for name, value in values(night).items()}
            records += [make(night, metrics=held), make(night, backend="torch", metrics={"effort": 2.0 * scatter})]
        stored(records)
        return f"run-{number - 1:03d}"

    return store


# ---- in a record


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        pytest.param({"effort": -1.0}, ">= 0", id="below zero"),
        pytest.param({"effort": "1"}, "float", id="text"),
        pytest.param({"": 1.0}, "length", id="no name"),
    ],
)
def test_a_record_refuses_invalid_values(held: dict[str, Any], problem: str, make: Callable[..., Record]) -> None:
    line = json.loads(encode(make())) | {"metrics": held}
    with pytest.raises(RecordError, match=problem):
        decode(json.dumps(line))


def test_a_record_without_them_is_the_line_and_the_hash_that_it_was(make: Callable[..., Record]) -> None:
    assert "metrics" not in json.loads(encode(make()))
    assert content_of(make()) != content_of(make(metrics={"effort": 1.0})) != content_of(make(metrics={"holes": 1.0}))
    assert content_of(make(metrics={"a": 1.0, "b": 2.0})) == content_of(make(metrics={"b": 2.0, "a": 1.0}))


def test_a_change_of_accuracy_is_one_of_the_relative_error() -> None:
    assert metrics.named("accuracy") is metrics.named("rms") is metrics.of_alert("accuracy") is RMS
    assert metrics.named("result") is metrics.named(None) is None
    assert metrics.of_alert("result") is METRICS["latency"]


def test_a_name_is_registered_once(further: None) -> None:
    with pytest.raises(ValueError, match="effort"):
        metrics.register(EFFORT)


# ---- comparing values


@pytest.mark.parametrize(
    ("metric", "before", "after", "worse"),
    [
        pytest.param(RMS, 2e-3, 2.9e-3, False, id="within the ratio"),
        pytest.param(RMS, 2e-3, 3.1e-3, True, id="beyond the ratio"),
        pytest.param(RMS, 2e-6, 3.3e-6, True, id="just above the floor"),
        pytest.param(RMS, 0.0, 9e-7, False, id="rounding"),
        pytest.param(HOLES, 0.0, 1.0, True, id="from none"),
        pytest.param(HOLES, 8.0, 8.0, False, id="the same"),
        pytest.param(HOLES, 8.0, 0.0, False, id="fewer"),
        pytest.param(WIDTH, 0.5, 0.25, True, id="higher is better"),
        pytest.param(WIDTH, 0.25, 0.5, False, id="higher is better, and it is"),
        pytest.param(Metric("x", "", "", better="neither"), 1.0, 9.0, False, id="neither"),
    ],
)
def test_worse(metric: Metric, before: float, after: float, worse: bool) -> None:
    assert bool(metric.worse(before, after)) is worse


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_no_two_values_are_each_worse_than_the_other(a: float, b: float) -> None:
    for metric in (RMS, EFFORT, HOLES, WIDTH):
        assert not (metric.worse(a, b) and metric.worse(b, a))
        assert list(metric.worse(np.array([a]), np.array([b]))) == [metric.worse(a, b)]


# ---- stored and listed


def test_it_is_stored_listed_and_shown(nights: Callable[..., str], cli: Cli) -> None:
    nights(lambda night: {"effort": 3.0, "holes": 0.0}, 2)
    rows = json.loads(cli("history", "--format=json", "--backend", "triton").stdout)
    assert [row["holes"] for row in rows] == [0.0, 0.0]
    assert rows[0]["effort"] == pytest.approx(3.0, rel=0.02)
    text = cli("history", "--metrics", "effort,latency", "--ids").stdout
    assert "effort J" in text.splitlines()[0]
    identifier = json.loads(cli("history", "--format=json").stdout)[0]["id"]
    assert json.loads(cli("show", identifier, "--format=json").stdout)["effort"] > 0
    assert cli("db", "verify").exit_code == 0


# ---- written and read again


@pytest.mark.parametrize("suffix", [".csv", ".v3.jsonl"])
def test_it_is_imported(suffix: str, nights: Callable[..., str], cli: Cli, tmp_path: Path) -> None:
    nights(lambda night: {"holes": 7.0, "effort": 3.0}, 1)
    path = tmp_path / f"out{suffix}"
    cli("db", "export", *(("--format", "v3") if suffix.startswith(".v3") else ()), path)
    assert suffix == ".csv" or '"unit":"J"' in path.read_text().replace(" ", "")
    options = ("--map", "date=started") if suffix == ".csv" else ()
    done = cli("import", *options, path, db=tmp_path / "other.db")
    assert done.exit_code == 0, done.output
    rows = json.loads(cli("history", "--format=json", "--backend", "triton", db=tmp_path / "other.db").stdout)
    assert [row["holes"] for row in rows] == [7.0]


# ---- judged


def stepped(name: str, before: float, after: float, at: int) -> Callable[[int], dict[str, float]]:
    return lambda night: {"effort": 3.0, "holes": 8.0, "width": 0.5} | {name: after if night >= at else before}


def rows_of(cli: Cli, *args: str) -> list[dict[str, Any]]:
    return json.loads(cli("gate", "--format=json", *args).stdout)["series"]


@pytest.mark.parametrize(
    ("name", "before", "after", "earlier", "verdict"),
    [
        pytest.param("effort", 3.0, 3.6, 24, {"regressed"}, id="scatter"),
        pytest.param("effort", 3.0, 9.0, 5, {"regressed"}, id="scatter, young"),
        pytest.param("holes", 0.0, 2.0, 1, {"regressed"}, id="exact, from none, after one night"),
        pytest.param("holes", 8.0, 0.0, 4, {"improved"}, id="exact, for the better"),
        pytest.param("width", 0.5, 0.25, 4, {"regressed"}, id="exact, higher is better"),
        *rarely(("holes", 8.0, 9.0, 4, {"regressed"}), ("width", 0.5, 0.75, 4, {"improved"})),
    ],
)
def test_a_change_is_found_at_once_or_if_no_ab_can_decide_in_three_nights(
    name: str, before: float, after: float, earlier: int, verdict: set[str], nights: Callable[..., str], cli: Cli
) -> None:
    number = 3 if METRICS[name].rule == "scatter" else 1
    nights(stepped(name, before, after, earlier), earlier + number)
    (row,) = [row for row in rows_of(cli) if row["verdict"] not in ("ok", "new", "insufficient")]
    assert (row["metric"], row["backend"], row["verdict"] in verdict) == (name, "triton", True)
    assert row["now"] == pytest.approx(after, rel=0.02)
    assert row["before"] == pytest.approx(before, rel=0.02)
    assert row["unit"] == METRICS[name].unit
    assert cli("gate").exit_code == {"regressed": 1, "suspect": 3, "improved": 0}[row["verdict"]]
    if name == "holes":
        assert f"holes {before:g} → {after:g}" in cli("gate").stdout


def test_quiet_nights_are_not_listed(nights: Callable[..., str], cli: Cli) -> None:
    nights(lambda night: {"effort": 3.0, "holes": 8.0, "width": 0.5}, 25)
    for night in range(4, 25, 4):
        rows = rows_of(cli, "--run", f"run-{night:03d}")
        assert {row["verdict"] for row in rows} <= {"ok", "new", "insufficient"}
        assert len(rows) == 2


def test_its_alert_is_opened_accepted_and_closed(nights: Callable[..., str], cli: Cli) -> None:
    nights(stepped("holes", 8.0, 9.0, 4), 5)
    cli("gate", "--update")
    (alert,) = json.loads(cli("incidents", "--each", "--format=json").stdout)
    assert (alert["metric"], alert["before"], alert["after"], alert["state"]) == ("holes", 8.0, 9.0, "new")
    assert cli("gate").exit_code == 1
    assert cli("incidents", "expect", "1", "--reason", "a larger tile").exit_code == 0
    assert cli("gate").exit_code == 0
    assert "incident 1 expected" in cli("gate").stdout


def test_an_alert_is_closed_where_the_level_is_back(nights: Callable[..., str], cli: Cli) -> None:
    nights(lambda night: {"holes": 9.0 if night == 4 else 8.0}, 6)
    cli("gate", "--run", "run-004", "--update")
    assert json.loads(cli("incidents", "--each", "--format=json").stdout)[0]["state"] == "new"
    cli("gate", "--update")
    assert json.loads(cli("incidents", "--all", "--format=json").stdout)[0]["state"] == "fixed"


@pytest.mark.both
def test_the_report_draws_it(nights: Callable[..., str], cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    nights(lambda night: {"effort": 3.0, "holes": 0.0 if night < 5 else 96.0}, 6)
    out = tmp_path / "r.html"
    assert cli("report", "-o", out).exit_code == 0
    text = out.read_text()
    assert '"further":[["effort J",' in text.replace(", ", ",").replace(": ", ":")
    assert "holes 0 → 96" in text


# ---- measuring


def test_the_tables_of_a_measurement_have_it(further: None, make: Callable[..., Record]) -> None:
    record = make(metrics={"effort": 3.5})
    out = io.StringIO()
    table.write_csv([record], ("latency", "effort"), None, out)
    assert "triton-effort" in out.getvalue().splitlines()[0]
    assert out.getvalue().splitlines()[1].endswith(";3.5")
    assert table.metrics_of_tables()["effort"][0] == "J, effort of one call"


# ---- of compiled kernels


@pytest.fixture
def kernels(stored: Callable[..., Any], make: Callable[..., Record]) -> Callable[..., None]:
    """Store a night for each value of a metric that compiled kernels tell."""

    def store(name: str, values: list[float], **fields: Any) -> None:
        stored([make(night, metrics={name: value}, **fields) for night, value in enumerate(values)])

    return store


@pytest.mark.parametrize(
    ("name", "values", "verdict"),
    [
        pytest.param("spills", [0, 96], "regressed", id="a spill"),
        pytest.param("local_ops", [0, 0, 12], "regressed", id="traffic to local memory"),
        pytest.param("stages", [4, 4, 3], "suspect", id="one fewer stage"),
        pytest.param("occupancy", [0.25, 0.125], "suspect", id="occupancy"),
        pytest.param("stages", [3, 4], "improved", id="one more stage"),
        pytest.param("registers", [168, 255], None, id="registers alone"),
    ],
)
def test_facts_of_a_compiled_kernel_are_judged_on_the_first_night(
    name: str, values: list[float], verdict: str | None, kernels: Callable[..., None], cli: Cli
) -> None:
    kernels(name, values)
    verdicts = [(row["metric"], row["verdict"]) for row in rows_of(cli) if row["metric"] not in (None, "latency")]
    assert verdicts == ([(name, verdict)] if verdict else [])


def test_the_command_of_an_alert_measures_its_metric(kernels: Callable[..., None], cli: Cli) -> None:
    kernels("workspace_mib", [8.0, 80.0])
    assert cli("gate", "--update").exit_code == 1
    (alert,) = json.loads(cli("incidents", "--each", "--format=json").stdout)
    assert alert["repro"].endswith("--costs memory --metrics latency,workspace_mib")
    assert alert["repro"] in cli("incidents", "--each").stdout
    assert alert["repro"] in [row["repro"] for row in rows_of(cli)]


def test_an_alternating_value_is_listed_once(kernels: Callable[..., None], cli: Cli) -> None:
    values = [4, 3, 4, 3, 4, 3, 4, 3]
    kernels("stages", values)
    verdicts = [
        night
        for night in range(len(values))
        for row in rows_of(cli, "--run", f"run-{night:03d}")
        if (row["metric"], row["verdict"]) == ("stages", "suspect")
    ]
    assert verdicts == [1, 2] or verdicts == [1]
    kernels("stages", [*values, 2])
    (row,) = [row for row in rows_of(cli) if row["metric"] == "stages"]
    assert (row["verdict"], row["now"]) == ("suspect", 2)


def test_an_undone_improvement_names_the_date_until_which_the_level_was_accepted(kernels: Any, cli: Cli) -> None:
    kernels("special_values", [0, 0, 1, 1, 0])
    (row,) = [row for row in rows_of(cli) if row["metric"] == "special_values"]
    assert (row["verdict"], row["cause"], row["before"], row["now"]) == ("regressed", "undone", 1, 0)
    improved = json.loads(cli("gate", "--run", "run-002", "--format", "json").stdout)
    assert "undone: the level accepted until 20" in row["note"]
    assert row["note"].endswith(f"is back, which {improved['commit'][:10]} had improved")


def test_a_second_change_for_the_worse_has_a_row_of_its_own(kernels: Callable[..., None], cli: Cli) -> None:
    kernels("spills", [0, 32])
    assert cli("gate", "--update").exit_code == 1
    kernels("spills", [0, 32, 96])
    rows = [row for row in rows_of(cli) if row["metric"] == "spills"]
    regressions = [(row["verdict"], row["before"], row["incident"]) for row in rows]
    assert regressions == [("regressed", 0, 1), ("regressed", 32, None)]


def test_the_same_commit_is_not_a_change(kernels: Callable[..., None], cli: Cli) -> None:
    kernels("spills", [0, 96], commit="c" * 40)
    assert "spills" not in {row["metric"] for row in rows_of(cli)}


@pytest.mark.parametrize(
    ("effect", "ab_verdict", "code"),
    [
        pytest.param(0.08, ("stages", "regressed"), 1, id="slower"),
        pytest.param(0.0, ("stages", "ok"), 0, id="the same"),
        pytest.param(-0.1, ("stages", "ok"), 0, id="faster"),
    ],
)
def test_an_ab_of_the_latency_decides_about_fewer_stages(
    effect: float, ab_verdict: tuple[str, str], code: int, kernels: Callable[..., None], cli: Cli, db: Any
) -> None:
    from datetime import UTC, datetime

    from sqlalchemy import select

    from groupbench.tracker.store import comparisons
    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.schema import Commit

    kernels("stages", [4, 3])
    assert cli("gate").exit_code == 3
    with open_store(db, create=False) as store, store.write() as session:
        base, head = session.scalars(select(Commit.hash).order_by(Commit.id)).all()
        verdict = "different" if effect else "same"
        made = comparisons.Compared(base, head, verdict, datetime.now(UTC), effect=effect, low=effect, high=effect)
        comparisons.store(session, 1, made)
    (row,) = [row for row in rows_of(cli) if row["metric"] == "stages"]
    assert (row["metric"], row["verdict"]) == ab_verdict
    assert "A/B of the latency" in row["note"]
    assert cli("gate").exit_code == code


@pytest.mark.parametrize(
    ("amount", "ms", "unit", "expected"),
    [
        (2 * 10**12, 4.0, metrics.TFLOPS, 500.0),
        (3 * 10**9, 1.5, metrics.GBPS, 2000.0),
        (None, 1.0, metrics.GBPS, None),
        (0, 1.0, metrics.GBPS, None),
        (10**9, None, metrics.TFLOPS, None),
    ],
)
def test_a_rate_is_work_over_latency(amount: int | None, ms: float | None, unit: float, expected: float | None) -> None:
    assert metrics.rate(amount, ms, unit) == expected
