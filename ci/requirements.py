"""Print the packages that groupbench needs to measure, store, report and test, one requirement per line.

python ci/requirements.py [PYPROJECT]

An image installs them before groupbench, so that a change of code does not rebuild its environment. Extras that refer
to other extras of the project are expanded. TritonBench is omitted.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

EXTRAS = ("test",)


def requirements(path: Path, extras: tuple[str, ...] = EXTRAS) -> list[str]:
    """Return the requirements of a project, its build system and these extras, without duplicates."""
    text = tomllib.loads(path.read_text())
    project = text["project"]
    packages = [*text["build-system"]["requires"], *project["dependencies"]]
    waiting = list(extras)
    for extra in waiting:
        for requirement in project["optional-dependencies"][extra]:
            if requirement.startswith(f"{project['name']}["):
                waiting += [name.strip() for name in requirement.partition("[")[2].partition("]")[0].split(",")]
            else:
                packages.append(requirement)
    return list(dict.fromkeys(packages))


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1] if len(sys.argv) > 1 else "pyproject.toml"))))
