"""Test the contents of `groupbench serve`'s pages, in HTML and in JSON."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest
from cases import Cli
from sqlalchemy import select

from groupbench.tracker.judge.incident_rows import OPEN, STATES
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import NAMED, Compared, NamedCommits
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.schema import Incident, IncidentEvent

from .conftest import Client


def test_the_overview_says_what_the_gate_says(nights: Any, serve: Client, cli: Cli) -> None:
    client = serve()
    body = client.get("/overview.json").json()
    line = cli("gate").stdout.split("\n")[0]
    assert body["verdict"]["summary"] == line
    assert body["verdict"]["word"] == "regression"
    assert body["run"]["run"] == "run-007"
    (row,) = [row for row in body["verdict"]["rows"] if row["verdict"] == "regressed"]
    assert (row["backend"], row["head"][:3], row["author"]) == ("triton", "006", "Ada")
    assert row["change"] == pytest.approx(0.05, abs=0.003)
    assert body["incidents"]["counts"] == {"new": 1}
    assert body["runs"][0]["counts"] == {"ok": 4, "unavailable": 1}
    page, (unmeasured,) = client.get("/").text, body["incidents"]["notes"]
    assert "not measured: 1 unavailable of grouped_gemm" in unmeasured
    note = unmeasured.partition(";")[0]
    assert all(text in page for text in (line, "regressed", "+5.0%", "Not measured", "/incidents/1", note))
    assert "needs &lt;/script&gt;" in page


def test_acknowledged_regressions_are_no_failure(nights: Any, serve: Client, cli: Cli) -> None:
    client = serve()
    assert '<span class="count bad"><b>1</b> regressed</span>' in client.get("/").text
    cli("incidents", "ack", "1", "--reason", "</td>on it")
    run = client.get("/overview.json").json()["run"]["run"]
    for page in (client.get("/").text, client.get(f"/runs/{run}").text):
        assert '<span class="count warn"><b>1</b> regressed (1 acknowledged)</span>' in page
        assert '<a href="/incidents/1">incident 1</a> acknowledged by Ada: &lt;/td&gt;on it</td>' in page


def test_verdicts_cells_and_alerts_have_a_command(nights: Any, serve: Client, cli: Cli) -> None:
    client = serve()
    (row,) = [row for row in client.get("/overview.json").json()["verdict"]["rows"] if row["verdict"] == "regressed"]

    def shown(path: str) -> str:
        return html.unescape(client.get(path).text.replace("<wbr>", ""))

    assert row["repro"].startswith("groupbench ab ")
    assert f"Reproduce: <code>{row['repro']}</code>" in shown(f"/series/{row['series']}")
    point = client.get(f"/series/{row['series']}.json").json()["points"][0]["id"]
    command = client.get(f"/points/{point}.json").json()["repro"]
    assert command.startswith("git switch --detach ")
    assert f"<code>{command}</code>" in shown(f"/points/{point}")
    alert = client.get("/incidents/1.json").json()["incident"]["members"][0]["repro"]
    assert f"<code>{alert}</code>" in shown("/incidents/1")


def test_an_import_has_no_command(
    stored: Any, make: Any, serve: Client, cli: Cli, two_nights_are_certain: None
) -> None:
    levels = [1 + 0.001 * (night % 3 - 1) + (0.05 if night > 5 else 0) for night in range(8)]
    stored([make(night, ms, cell={"host": "asv"}) for night, ms in enumerate(levels)])
    assert "1 opened" in cli("gate", "--update").stderr
    client = serve()
    incident, alert = client.get("/incidents/1.json").json()["incident"], client.get("/incidents/1").text
    series = incident["members"][0]["series"]
    points = client.get(f"/series/{series}.json").json()["points"]
    point = client.get(f"/points/{points[0]['id']}").text
    assert "reproduce" not in alert and "Measure it again" not in point
    assert "reproduce" not in cli("incidents", "--each").stdout


def test_a_new_run_is_judged_anew(nights: Any, serve: Client, stored: Any, make: Any) -> None:
    client = serve()
    assert client.get("/overview.json").json()["verdict"]["run"] == "run-007"
    stored([make(8, ms=1.0)])
    assert client.get("/overview.json").json()["verdict"]["run"] == "run-008"


def test_an_empty_database_says_so(opened: Any, serve: Client) -> None:
    client = serve()
    assert "has no runs yet" in client.get("/").text
    assert client.get("/series.json").json()["series"] == []
    for page in ("/runs", "/series", "/incidents"):
        assert client.get(page).status_code == 200
    assert client.get("/series/1").status_code == 404


def test_a_series_shows_its_history_with_what_happened(stored: Any, make: Any, serve: Client) -> None:
    """A step, a change of driver and a failure; by the statistics of the tracker.

    The driver changed no latency: the level goes on across it.
    """
    nights = [make(n, 1.0 if n < 12 else 1.2, environment={"driver": "580.2"} if n < 4 else {}) for n in range(24)]
    stored([*nights, make(24, status="error", message="no")])
    body = serve().get("/series/1.json").json()
    assert [(mark["kind"], mark["commit"][:3]) for mark in body["marks"]] == [("environment", "004"), ("change", "00c")]
    assert "driver 580.2 → 570.1" in body["marks"][0]["text"]
    page = serve().get("/series/1").text
    assert '<span class="badge faint"><span aria-hidden="true">·</span> environment</span>' in page
    assert '<span class="badge warn"><span aria-hidden="true">!</span> change</span>' in page
    levels = [(level["first"], level["last"], round(level["ms"], 1)) for level in body["levels"]]
    assert levels == [("run-000", "run-011", 1.0), ("run-012", "run-023", 1.2)]
    assert body["paging"]["total"] == body["shown"] == 25
    newest, second = body["points"][:2]
    assert (newest["status"], newest["message"], second["status"]) == ("error", "no", "ok")
    assert body["points"][12]["change"] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("state", STATES)
def test_a_series_shows_its_alert_in_every_state(nights: Any, serve: Client, db: Any, state: str) -> None:
    with open_store(str(db), create=False) as store, store.write() as session:
        incident = session.scalars(select(Incident)).one()
        incident.state = state
        session.add(
            IncidentEvent(incident_id=incident.id, at=datetime.now(UTC), who="Ada", state=state, reason="known")
        )
    client = serve()
    key = client.get("/incidents/1.json").json()["incident"]["members"][0]["series"]
    marks = {mark["kind"] for mark in client.get(f"/series/{key}.json").json()["marks"]}
    assert ("alert" if state in OPEN else "closed") in marks
    for page in (f"/series/{key}", "/incidents?state=all", "/incidents/1", "/"):
        assert client.get(page).status_code == 200, page
    text = client.get(f"/series/{key}").text
    assert all(f"</span> {kind}</span>" in text for kind in marks)
    assert f"{state}</span>" in text


@pytest.mark.usefixtures("two_nights_are_certain")
def test_two_changes_of_a_series_are_both_shown(stored: Any, make: Any, serve: Client) -> None:
    slow = [make(night, ms=1.5, rms=2e-3 if night < 8 else 9e-3) for night in range(6, 10)]
    stored([*[make(night, ms=1 + 0.001 * (night % 3)) for night in range(6)], *slow])
    client = serve()
    client.get("/")
    body = client.get("/series/1.json").json()
    assert [row["metric"] for row in body["verdict"]["rows"]] == ["latency", "accuracy"]
    assert "+49." in client.get("/series/1").text
    assert "rms 0.002" in client.get("/series/1").text


def test_only_the_newest_points_are_drawn_where_there_are_many(stored: Any, make: Any, serve: Client) -> None:
    stored([make(n) for n in range(5)])
    client = serve()
    body = client.get("/series/1.json?last=2").json()
    assert (body["shown"], body["series"]["points"]) == (2, 5)
    assert [point["run"] for point in body["points"]] == ["run-004", "run-003"]
    assert "The newest 2 of 5 points" in client.get("/series/1?last=2").text


def test_other_backends_have_a_line_for_each_toolchain(stored: Any, make: Any, serve: Client) -> None:
    def night(number: int) -> list[Any]:
        newer = number % 2
        new = {"environment": {"triton": "3.8.0"}} if newer else {}
        return [make(number, 0.9 if newer else 1.0, **new), make(number, 1.8 if newer else 2.0, backend="b", **new)]

    stored([record for number in range(8) for record in night(number)])
    html = serve().get("/series/1").text
    lines = json.loads(re.findall(r'id="figures">(.*?)</script>', html)[0])["backends"]["data"]
    assert {line["name"]: {round(ms, 2) for ms in line["y"]} for line in lines} == {
        "triton, triton 3.7.1": {1.0},
        "triton, triton 3.8.0": {0.9},
        "b, triton 3.7.1": {2.0},
        "b, triton 3.8.0": {1.8},
    }


def test_an_interpreted_latency_of_another_backend_is_not_in_the_chart(stored: Any, make: Any, serve: Client) -> None:
    stored([make(0, 900.0, timing="interpreted", backend="other"), make(1, 2.0, backend="other"), make(0), make(1)])
    client = serve()
    (key,) = [row["series"] for row in client.get("/series.json").json()["series"] if row["backend"] == "triton"]
    drawn = json.loads(re.findall(r'id="figures">(.*?)</script>', client.get(f"/series/{key}").text)[0])
    other = next(trace for trace in drawn["backends"]["data"] if trace.get("name") == "other")
    assert other["y"] == [pytest.approx(2.0, rel=0.01)]


@pytest.mark.parametrize(("nights", "kind"), [(1, "blind"), (2, "ok")])
def test_a_pass_without_a_judged_latency_is_not_green(
    stored: Any, make: Any, serve: Client, nights: int, kind: str
) -> None:
    stored([make(night) for night in range(nights)])
    assert f'<p class="verdict {kind}">' in serve().get("/").text


def test_pages_show_the_commit_that_a_search_named(nights: Any, serve: Client, db: Any) -> None:
    first, last, cause = (f"{number:03x}" + "c" * 37 for number in (5, 6, 0xABC))
    commit = {"hash": cause, "subject": "Use one tile", "author": "Grace"}
    named = NamedCommits((commit,), first, "latency", 0.99)
    named_by_search = Compared(first, last, NAMED, datetime.now(UTC), 0.05, details={NAMED: asdict(named)})
    client = serve()
    with open_store(str(db), create=False) as store, store.write() as session:
        series = client.get("/incidents/1.json").json()["incident"]["members"][0]["series"]
        comparisons.store(session, series, named_by_search)
    run = client.get("/overview.json").json()["run"]["run"]
    for page in ("/", "/incidents", "/incidents/1", f"/runs/{run}", f"/series/{series}"):
        text = client.get(page).text
        assert cause[:10] in text and "Use one tile" in text and "named by bisect" in text, page
