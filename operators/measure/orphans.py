"""Imported by the fork server alone: makes it the parent of processes whose warden was killed."""

from __future__ import annotations

from groupbench.operators.measure import warden

warden._prctl(warden.PR_SET_CHILD_SUBREAPER, 1)
