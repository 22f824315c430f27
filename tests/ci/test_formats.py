"""Check scripts, workflows and the Dockerfile with the linter of each format, and the rights of workflows' jobs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CI = ROOT / "ci"
GITHUB = sorted(path for path in (CI / "github").glob("*.yml") if path.stem != "zizmor")
GITLAB = sorted((CI / "gitlab").glob("*.yml"))
SCRIPTS = sorted(CI.glob("*.sh"))


def lint(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def tool(name: str) -> str:
    """Return the path of a tool that the extra `test` installs next to this interpreter."""
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{name} is missing: python -m pip install -e '.[test]'"
    return str(path)


def test_all_files_are_checked() -> None:
    assert [len(GITHUB), len(GITLAB)] == [4, 4]
    assert {path.name for path in SCRIPTS} >= {"environment.sh", "nightly.sh", "pull-request.sh", "test.sh"}


def test_scripts() -> None:
    lint(tool("shellcheck"), "-x", *map(str, SCRIPTS))


def test_workflows_of_github() -> None:
    lint(tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *map(str, GITHUB))
    lint(tool("zizmor"), "--offline", "--quiet", "--config", str(CI / "github" / "zizmor.yml"), *map(str, GITHUB))


def test_pipelines_of_gitlab() -> None:
    lint(
        *(tool("check-jsonschema"), "--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"),
        *map(str, GITLAB),
    )


def test_the_dockerfile() -> None:
    lint(tool("hadolint"), str(CI / "Dockerfile"))


def test_files_that_the_dockerfile_copies_exist() -> None:
    text = (CI / "Dockerfile").read_text()
    (files,) = re.findall(r"^COPY (.*) /tmp/needs/$", text, re.MULTILINE)
    for name in files.split():
        assert (ROOT / name).is_file(), name


def test_the_requirements_of_the_image_are_those_of_the_project() -> None:
    done = subprocess.run([sys.executable, "ci/requirements.py"], capture_output=True, text=True, cwd=ROOT, check=True)
    lines = done.stdout.split("\n")
    assert {"torch>=2.11,<2.16", "sqlalchemy>=2.1", "plotly>=6", "pytest>=8", "setuptools>=77"} <= set(lines)
    assert not [line for line in lines if line.startswith("groupbench")]
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("path", [*GITHUB, *GITLAB], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_scripts_of_workflows(path: Path, workflow: Callable[[str], Any], tmp_path: Path) -> None:
    read = workflow(str(path.relative_to(CI)))
    jobs = read["jobs"].values() if "jobs" in read else read.values()
    texts = [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]
    texts += ["\n".join(job[part]) for job in jobs for part in ("script", "after_script") if part in job]
    assert texts
    scripts = [tmp_path / f"{number}.sh" for number in range(len(texts))]
    for script, text in zip(scripts, texts, strict=True):
        script.write_text(f"# shellcheck disable=SC1091\n{text}")
    lint(tool("shellcheck"), "-s", "bash", *map(str, scripts))


@pytest.mark.parametrize("path", GITLAB, ids=lambda path: path.name)
def test_jobs_of_a_request_have_no_token_on_gitlab(path: Path, workflow: Callable[[str], Any]) -> None:
    """Only a schedule of the default branch starts jobs with a token, never a request's pipeline or its children."""
    for name, job in workflow(str(path.relative_to(CI))).items():
        conditions = [rule["if"] for rule in job["rules"]]
        if any("merge_request" in condition for condition in conditions):
            assert name == "groupbench-compare"
            assert not {"needs", "trigger", "inherit"} & job.keys()
            assert job["script"][0].startswith('test -z "${GITLAB_TOKEN:-}" ||')
            assert not [line for line in job["script"][1:] if "TOKEN" in line]
        elif name == "groupbench-comments":
            (condition,) = conditions
            assert condition.startswith('$CI_PIPELINE_SOURCE == "schedule" && ')
            assert condition.endswith("$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH")
        assert not [c for c in conditions if '"pipeline"' in c or '"trigger"' in c or '"push"' in c]


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_tokens_may_do_no_more_than_they_must(path: Path, workflow: Callable[[str], Any]) -> None:
    read = workflow(str(path.relative_to(CI)))
    assert read["permissions"] == {}
    assert "pull_request_target" not in read["on"]
    for name, job in read["jobs"].items():
        writes = {scope for scope, level in job["permissions"].items() if level == "write"}
        assert writes <= {"night": {"security-events"}, "comment": {"pull-requests"}}.get(name, set())
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
    if "pull_request" in read["on"]:  # foreign code runs without secrets, and not in the job that may write
        assert "secrets." not in str(read["jobs"]["measure"])
        assert read["jobs"]["comment"]["runs-on"] == "ubuntu-latest"
        checkouts = [s for s in read["jobs"]["comment"]["steps"] if s.get("uses", "").startswith("actions/checkout@")]
        assert [step["with"]["ref"] for step in checkouts] == ["${{ github.event.pull_request.base.sha }}"]
