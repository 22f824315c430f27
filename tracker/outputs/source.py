"""Where a kernel stands in the checkout, found by reading and not by importing: that would need torch, and a GPU.

A record holds the names of the kernels that ran, and a name is a function: `_flat_kernel` is `def _flat_kernel(`.
Helion's compiled kernels are called `_helion_` and the function. Of several functions of one name that one counts whose
module the file imports that declares the backend. Where no name leads anywhere (cuBLAS, Inductor, a result that came
without kernels), that declaration is the place; and where there is none, a file of the root.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from groupbench.tracker import git
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.record import Kernel

_LARGEST = 2**20
_MOST = 20_000
_DECORATED = re.compile(r"@[\w.]*(?:jit|kernel)\b")
_ROOT_FILES = ("pyproject.toml", "README.md", "README.rst", "README", "LICENSE")


@dataclass(frozen=True)
class Source:
    """A line of a file, its path from the root with slashes."""

    path: str
    line: int
    found_by: Literal["kernel", "backend", "nothing"]


def checkout(folder: Path) -> Path:
    """The root of the checkout that a folder is in; the folder itself where git knows none."""
    said = git.ask(folder, "rev-parse", "--show-toplevel")
    return Path(said.strip()) if said and said.strip() else folder.absolute()


def find(
    root: Path,
    worse: Iterable[SeriesRow],
    kernels: Mapping[int, tuple[Kernel, ...]],  # by series
) -> dict[int, Source]:
    """The place of each series' kernel. Files are read once."""
    series = list(worse)
    names = {one.pk: _functions(kernels.get(one.pk, ())) for one in series}
    functions = {name for found in names.values() for name in found}
    backends = {one.backend for one in series}
    defined: dict[str, list[tuple[int, Source]]] = {}
    declared: dict[str, list[Source]] = {}
    for path in _files(root) if series else ():
        text = _read(root / path)
        for match in re.finditer(r"^[ \t]*(?:async[ \t]+)?def[ \t]+(\w+)[ \t]*\(", text, re.MULTILINE):
            if match[1] in functions:
                at = Source(path, text.count("\n", 0, match.start()) + 1, "kernel")
                above = "\n".join(text[: match.start()].split("\n")[-12:])
                rank = (0 if _DECORATED.search(_decorators(above)) else 2) + _is_test(path)
                defined.setdefault(match[1], []).append((rank, at))
        for match in re.finditer(r"\bBackend\(\s*(?:name\s*=\s*)?[\"']([^\"'\n]+)[\"']", text):
            if match[1] in backends:
                line = text.count("\n", 0, match.start(1)) + 1
                declared.setdefault(match[1], []).append(Source(path, line, "backend"))
    nowhere = Source(next((name for name in _ROOT_FILES if (root / name).is_file()), "README.md"), 1, "nothing")

    def place(one: SeriesRow) -> Source:
        stems = sorted(
            declared.get(one.backend, ()), key=lambda at: (_is_test(at.path), _stem(at) != one.operator, at.path)
        )
        declaration = stems[0] if stems else None
        text = _read(root / declaration.path) if declaration else ""
        for name in names[one.pk]:
            if name in defined:
                ranked = [(rank, _module(at.path) not in text, at.path, at.line, at) for rank, at in defined[name]]
                return min(ranked, key=lambda found: found[:4])[-1]
        return declaration or nowhere

    return {one.pk: place(one) for one in series}


def _stem(at: Source) -> str:
    return Path(at.path).stem


def _module(path: str) -> str:
    """As whoever imports it writes its end: `grouped_gemm.flat`."""
    return ".".join(Path(path).with_suffix("").parts[-2:])


def _functions(kernels: Iterable[Kernel]) -> list[str]:
    """Names as in the source; the kernel that takes most of an SM first, which the small ones prepare for."""
    heavy = sorted(
        (one for one in kernels if not one.external),
        key=lambda kernel: (-(kernel.shared_bytes or 0), -(kernel.registers or 0)),
    )
    names = []
    for kernel in heavy:
        names += [kernel.name, kernel.name.removeprefix("_helion_")]
    return list(dict.fromkeys(names))


def _decorators(above: str) -> str:
    """The lines of decorators that end a text: up to the last blank line or other statement at the margin."""
    kept: list[str] = []
    for line in reversed(above.rstrip("\n").split("\n")):
        if not line.strip():
            break
        kept.append(line)
        if line.lstrip().startswith(("def ", "class ", "return ")):
            return ""
    return "\n".join(reversed(kept))


def _files(root: Path) -> Iterator[str]:
    said = git.ask(root, "ls-files", "-z", "-co", "--exclude-standard", "--", "*.py")
    if said is not None:
        names = sorted(set(said.split("\0")) - {""})
    else:
        found = (path.relative_to(root) for path in root.rglob("*.py"))
        names = sorted(path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))
    yield from names[:_MOST]


def _read(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_test(path: str) -> int:
    return int(any(part in ("tests", "test") or part.startswith("test_") for part in path.split("/")))
