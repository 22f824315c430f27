"""Facts of a run under the names by which programs usually write them: `GIT_COMMIT_HASH`, `sha`, `CI_COMMIT_BRANCH`.

All readers find a commit here that their format does not define: in a context, a machine's facts or free metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from groupbench.tracker.formats.values import FormatError, from_iso, from_timestamp

COMMIT = (
    *("commit", "commit_hash", "commit_id", "commit_sha", "commitid", "commithash", "git_commit", "git_commit_hash"),
    *("git_commit_id", "git_commit_sha", "git_hash", "git_sha", "git_sha1", "git_rev", "gitrev", "gitsha", "gitcommit"),
    *("git_revision", "git_head", "head_sha", "sha", "sha1", "revision", "rev", "vcs_revision", "vcs_commit"),
    *("vcs_commit_id", "vcs_sha", "vcs_ref", "source_commit", "build_commit", "build_vcs_number"),
    *("build_sourceversion", "github_sha", "ci_commit_sha", "circle_sha1", "travis_commit", "drone_commit_sha"),
    *("buildkite_commit", "git_describe", "git_version"),
)
BRANCH = (
    *("branch", "git_branch", "gitbranch", "branch_name", "vcs_branch", "head_branch", "source_branch", "git_ref_name"),
    *("github_head_ref", "github_ref_name", "ci_commit_branch", "ci_commit_ref_name", "circle_branch", "travis_branch"),
    *("buildkite_branch", "build_sourcebranchname", "github_ref"),
)
COMMITTED = (
    *("commit_date", "commit_time", "commit_timestamp", "committed", "committed_at", "git_commit_date"),
    *("git_commit_time", "git_commit_timestamp", "git_date", "vcs_time", "ci_commit_timestamp", "committer_date"),
)
DATE = ("date", "datetime", "timestamp", "started", "start_time", "benchmark_date", "run_date", "run_at", "created_at")
DIRTY = (
    *("dirty", "git_dirty", "is_dirty", "vcs_modified", "git_modified", "git_clean_status", "git_status", "git_clean"),
)
CPU = (
    *("cpu", "cpu_model", "cpu_name", "cpu_brand", "cpu_info", "processor", "processor_name"),
    *("brand_raw", "model_name"),
)
GPU = ("gpu", "gpu_name", "gpu_model", "gpu_type", "device_name", "accelerator")
"""Names in lower case, from the most to the least exact. `vcs: {"revision": ...}` counts as `vcs_revision`."""

_NOTHING = {"", "unknown", "none", "null", "unversioned", "n/a", "(unknown)", "(detached head)", "head", "detached"}
_DESCRIBED = re.compile(r"(?:.*-g)?([0-9a-fA-F]{7,64})(?:[-+.](?:dirty|modified|broken)|\+)?")
_DIRTY_MARK = re.compile(r".*(?:[-+.](?:dirty|modified)|\+)", re.IGNORECASE)


@dataclass(frozen=True)
class Usual:
    """A mapping's facts under usual names."""

    commit: str | None = None
    branch: str | None = None
    committed: datetime | None = None
    date: datetime | None = None
    dirty: bool = False
    cpu: str | None = None
    gpu: str | None = None


def usual(facts: Mapping[str, Any]) -> Usual:
    """Return a run's facts among a file's loose facts. Unusable text is ignored."""
    flat = dict(_flat(facts))
    commit = _text(flat, COMMIT)
    match = _DESCRIBED.fullmatch(commit or "")
    return Usual(
        commit=match[1] if match else commit,
        branch=(_text(flat, BRANCH) or "").removeprefix("refs/heads/").removeprefix("origin/") or None,
        committed=_time(flat, COMMITTED),
        date=_time(flat, DATE),
        dirty=_dirty(flat) or _DIRTY_MARK.fullmatch(commit or "") is not None,
        cpu=_text(flat, CPU),
        gpu=_text(flat, GPU),
    )


def _flat(facts: Mapping[str, Any], above: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the names in lower case with their values; those of inner objects with and without the outer name."""
    for name, value in facts.items():
        plain = re.sub(r"[^a-z0-9]+", "_", str(name).lower()).strip("_")
        if isinstance(value, Mapping) and depth < 2:
            yield from _flat(value, f"{above}{plain}_", depth + 1)
        else:
            yield above + plain, value


def _text(flat: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    for name in names:
        value = flat.get(name)
        if isinstance(value, str) and value.strip().lower() not in _NOTHING:
            return value.strip()
    return None


def _time(flat: Mapping[str, Any], names: tuple[str, ...]) -> datetime | None:
    for name in names:
        value = flat.get(name)
        try:
            if isinstance(value, str) and value.strip() and not value.strip().isdigit():
                return from_iso(value, name)
            if isinstance(value, int | float | str) and not isinstance(value, bool) and float(value) > 1e8:
                seconds = float(value)
                return from_timestamp(seconds / 1e3 if seconds > 1e11 else seconds)
        except (FormatError, ValueError, OverflowError):
            continue
    return None


def _dirty(flat: Mapping[str, Any]) -> bool:
    for name in DIRTY:
        value = flat.get(name)
        text = str(value).strip().lower()
        if value is None or text in _NOTHING:
            continue
        if "clean" in name and text in ("true", "false", "1", "0", "yes", "no"):
            return text in ("false", "0", "no")
        return text in ("true", "1", "yes", "dirty", "modified", "unclean", "not clean")
    return False
