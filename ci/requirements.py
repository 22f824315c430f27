"""Everything that groupbench needs to measure, store, report and test, one requirement a line, without groupbench.

python ci/requirements.py [PYPROJECT]

For an image whose environment is to stay when only code changes. Its own extras are followed, TritonBench is left out.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

EXTRAS = ("test",)


def requirements(path: Path, extras: tuple[str, ...] = EXTRAS) -> list[str]:
    """Of the project, its build and its extras, each once."""
    text = tomllib.loads(path.read_text())
    project = text["project"]
    found = [*text["build-system"]["requires"], *project["dependencies"]]
    waiting = list(extras)
    for extra in waiting:
        for requirement in project["optional-dependencies"][extra]:
            if requirement.startswith(f"{project['name']}["):
                waiting += [name.strip() for name in requirement.partition("[")[2].partition("]")[0].split(",")]
            else:
                found.append(requirement)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1] if len(sys.argv) > 1 else "pyproject.toml"))))
