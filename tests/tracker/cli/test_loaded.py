"""Name the files and packages that differ: history, show, explain, and the gate's cause."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import Cli

from groupbench.tracker.facts.loaded import loaded_of

FILES = {"kern/a.py": "1", "kern/b.py": "2", "tuned.json": "3"}
OLD = loaded_of(FILES, {"numpy": "2.2.6", "torch": "2.13.0"})
NEW = loaded_of({**FILES, "tuned.json": "4"}, {"numpy": "2.4.0", "torch": "2.13.0"})
EDITED = loaded_of({**FILES, "tuned.json": "4"}, OLD.versions)
TEXTS = ["1 of 3 loaded files differ: tuned.json", "numpy 2.2.6 → 2.4.0"]


@pytest.fixture
def two(cli: Cli, write: Any, make: Any) -> None:
    assert cli("ingest", write([make(0, loaded=OLD), make(1, loaded=OLD), make(2, loaded=NEW)])).exit_code == 0


@pytest.mark.usefixtures("two")
def test_history_names_them(cli: Cli) -> None:
    rows = json.loads(cli("history", "--format=json").stdout)
    assert [row["loaded_changed"] for row in rows] == [[], [], TEXTS]
    assert [row["code_hash"] for row in rows] == [OLD.code, OLD.code, NEW.code]
    table = cli("history").stdout.splitlines()
    assert "tuned.json" in table[-1] and "tuned.json" not in table[-2]


def test_history_without_fingerprints_has_no_such_column(cli: Cli, write: Any, make: Any) -> None:
    cli("ingest", write([make(0), make(1, loaded=OLD), make(2)]))
    assert "loaded" not in cli("history").stdout
    assert [row["loaded_changed"] for row in json.loads(cli("history", "--format=json").stdout)] == [[], [], []]


@pytest.mark.usefixtures("two")
def test_show_lists_them(cli: Cli) -> None:
    text = cli("show", "1.3").stdout
    assert "loaded files (3)" in text and "numpy    2.4.0" in text
    assert f"loaded_changed {'; '.join(TEXTS)}" in " ".join(text.split())
    facts = json.loads(cli("show", "1.3", "--format=json").stdout)
    assert (facts["loaded"]["files"]["tuned.json"], facts["loaded_changed"]) == ("4", TEXTS)
    assert "loaded_changed" not in cli("show", "1.1").stdout  # the first of its series


@pytest.mark.usefixtures("two")
def test_explain_begins_with_them(cli: Cli) -> None:
    result = cli("explain", "previous", "latest")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:2] == [TEXTS[0], f"packages: {TEXTS[1]}"]
    assert json.loads(cli("explain", "previous", "latest", "--format=json").stdout)["loaded"]["files"] == ["tuned.json"]


@pytest.mark.usefixtures("two_nights_are_certain")
@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [(OLD, OLD, "infrastructure"), (OLD, EDITED, "code"), (None, OLD, "code"), (None, None, "code")],
)
def test_an_equal_hash_is_never_the_code(cli: Cli, write: Any, make: Any, before: Any, after: Any, cause: str) -> None:
    nights = [make(n, ms=1 + 0.001 * (n % 3 - 1), loaded=before) for n in range(8)]
    cli("ingest", write([*nights, make(8, ms=1.3, loaded=after)]))
    (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
    assert row["cause"] == cause


UPGRADED = loaded_of(FILES, NEW.versions)


@pytest.mark.usefixtures("two_nights_are_certain")
@pytest.mark.parametrize("again", [True, False], ids=["the same commit", "another commit"])
def test_an_upgraded_package_is_the_cause_on_every_night_since(cli: Cli, write: Any, make: Any, again: bool) -> None:
    """An A/B of commits on one numpy finds no difference, and does not clear it."""
    nights = [make(n, ms=1 + 0.001 * (n % 3 - 1), loaded=OLD) for n in range(8)]
    cli("ingest", write(nights))
    for n in range(8, 12):
        fields = {"commit": nights[-1].run.commit.hash} if again else {}
        cli("ingest", write([make(n, ms=5.8, loaded=UPGRADED, **fields)]))
        (row,) = json.loads(cli("gate", "--update", "--format=json").stdout)["series"]
        print(n, row["verdict"], row["rule"], row["note"])
        assert row["cause"] == "toolchain"
        assert "numpy 2.2.6 → 2.4.0" in row["note"]
