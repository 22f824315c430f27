"""Tables on a terminal."""

from __future__ import annotations

from typing import Any

from groupbench.tracker.cli import output
from groupbench.tracker.cli.output import Column
from groupbench.tracker.facts.verdicts import INCIDENT_STATES


def test_a_new_alert_is_red_on_a_terminal_and_a_new_series_is_not(monkeypatch: Any, capsys: Any) -> None:
    """Alerts and verdicts share the word."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for tones, red in ((INCIDENT_STATES, True), ({}, False)):
        output._terminal([Column("state", "state", tones=tones)], [{"state": "new"}])
        assert ("\x1b[31mnew" in capsys.readouterr().out) is red
