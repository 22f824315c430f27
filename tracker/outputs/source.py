"""Find the source line of a kernel in the checkout, by reading files: importing them would need torch and a GPU.

A record holds the names of the kernels that ran, and each is a function: `_flat_kernel` is `def _flat_kernel(`. Helion
names a compiled kernel `_helion_` and the function. If several functions have the name, the one counts whose module is
imported by the file that declares the backend. If no function has it (cuBLAS, Inductor, a record without kernels), the
line is the backend's declaration, and without that, the first line of a file in the root.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from groupbench.tracker.facts.record import Kernel
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.tools import git

_SOURCE_BYTES = 2**20  # a larger file is passed over
_MOST_FILES = 20_000  # the first by name
_DECORATED = re.compile(r"@[\w.]*(?:jit|kernel)\b")
_ROOT_FILES = ("pyproject.toml", "README.md", "README.rst", "README", "LICENSE")


@dataclass(frozen=True)
class SourceLine:
    """A line of a file. The path is relative to the root, with forward slashes."""

    path: str
    line: int
    found_by: Literal["kernel", "backend", "nothing"]


def checkout(folder: Path) -> Path:
    """Return the root of the checkout that contains a folder, or the folder itself if it is in none."""
    top = git.ask(folder, "rev-parse", "--show-toplevel")
    return Path(top.strip()) if top and top.strip() else folder.absolute()


def find(
    root: Path,
    worse: Iterable[SeriesRow],
    kernels: Mapping[int, tuple[Kernel, ...]],  # by series
) -> dict[int, SourceLine]:
    """Return the source line of each series' kernel, by the series' key. Each file is read once."""
    series = list(worse)
    names = {one.pk: _functions(kernels.get(one.pk, ())) for one in series}
    functions = {name for candidates in names.values() for name in candidates}
    backends = {one.backend for one in series}
    defined: dict[str, list[tuple[int, SourceLine]]] = {}
    declared: dict[str, list[SourceLine]] = {}
    for path in _files(root) if series else ():
        text = _read(root / path)
        for match in re.finditer(r"^[ \t]*(?:async[ \t]+)?def[ \t]+(\w+)[ \t]*\(", text, re.MULTILINE):
            if match[1] in functions:
                at = SourceLine(path, text.count("\n", 0, match.start()) + 1, "kernel")
                above = "\n".join(text[: match.start()].split("\n")[-12:])
                rank = (0 if _DECORATED.search(_decorators(above)) else 2) + _is_test(path)
                defined.setdefault(match[1], []).append((rank, at))
        for match in re.finditer(r"\b\w+\(\s*(?:name\s*=\s*)?[\"']([^\"'\n]+)[\"']", text):
            if match[1] in backends:
                line = text.count("\n", 0, match.start(1)) + 1
                declared.setdefault(match[1], []).append(SourceLine(path, line, "backend"))
    nowhere = SourceLine(next((name for name in _ROOT_FILES if (root / name).is_file()), "README.md"), 1, "nothing")

    def place(one: SeriesRow) -> SourceLine:
        stems = sorted(
            declared.get(one.backend, ()), key=lambda at: (_is_test(at.path), _stem(at) != one.operator, at.path)
        )
        declaration = stems[0] if stems else None
        text = _read(root / declaration.path) if declaration else ""
        for name in names[one.pk]:
            if name in defined:
                ranked = [(rank, _module(at.path) not in text, at.path, at.line, at) for rank, at in defined[name]]
                return min(ranked, key=lambda candidate: candidate[:4])[-1]
        return declaration or nowhere

    return {one.pk: place(one) for one in series}


def _stem(at: SourceLine) -> str:
    return Path(at.path).stem


def _module(path: str) -> str:
    """Return the last two parts of a module's name, as an import writes them: `grouped_gemm.flat`."""
    return ".".join(Path(path).with_suffix("").parts[-2:])


def _functions(kernels: Iterable[Kernel]) -> list[str]:
    """Return the names of kernels as in the source.

    The kernel that uses most of an SM comes first; small ones only prepare for it.
    """
    heavy = sorted(
        (one for one in kernels if not one.external),
        key=lambda kernel: (-(kernel.shared_bytes or 0), -(kernel.registers or 0)),
    )
    names = []
    for kernel in heavy:
        names += [kernel.name, kernel.name.removeprefix("_helion_")]
    return list(dict.fromkeys(names))


def _decorators(above: str) -> str:
    """Return the decorator lines at a text's end, after the last blank line or other statement."""
    kept: list[str] = []
    for line in reversed(above.rstrip("\n").split("\n")):
        if not line.strip():
            break
        kept.append(line)
        if line.lstrip().startswith(("def ", "class ", "return ")):
            return ""
    return "\n".join(reversed(kept))


def _files(root: Path) -> Iterator[str]:
    listing = git.ask(root, "ls-files", "-z", "-co", "--exclude-standard", "--", "*.py")
    if listing is not None:
        names = sorted(set(listing.split("\0")) - {""})
    else:
        paths = (path.relative_to(root) for path in root.rglob("*.py"))
        names = sorted(path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))
    yield from names[:_MOST_FILES]


def _read(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _SOURCE_BYTES:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_test(path: str) -> int:
    return int(any(part in ("tests", "test") or part.startswith("test_") for part in path.split("/")))
