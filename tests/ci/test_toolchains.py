"""Check the constraints that ci/toolchain.sh gives to pip for each set of versions."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETS = sorted(path.stem for path in (ROOT / "ci" / "toolchains").glob("torch-*.txt"))


@pytest.mark.parametrize("name", SETS)
def test_each_package_has_one_constraint(name: str, tmp_path: Path) -> None:
    """pip installs nothing if a set asks for one version of a package, and ci/constraints.txt for another."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nmkdir -p "$3/bin" && ln -s /bin/false "$3/bin/python"\n')  # -m venv FOLDER
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    done = subprocess.run(["bash", "ci/toolchain.sh", name], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 1, "pip is /bin/false"
    written = (tmp_path / ".toolchains" / name / "constraints.txt").read_text().splitlines()
    names = [re.split("[=<>]", line)[0].lower() for line in written if line and not line.startswith("#")]
    assert len(names) > 30 and sorted(set(names)) == sorted(names)
    assert set((ROOT / "ci" / "toolchains" / f"{name}.txt").read_text().split()) <= set(written)
