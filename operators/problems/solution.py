"""A solution from FlashInfer-Bench or SOL-ExecBench as a backend, from Python and Triton sources.

The sources are written to a folder and imported when it is prepared, in a separate process. Neither the process listing
backends nor the one judging results runs the code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from groupbench.operators.catalog.backends import no_interpreted_bf16
from groupbench.operators.deferred import torch
from groupbench.operators.errors import UsageError
from groupbench.operators.logs import own_folder
from groupbench.operators.operator import Backend, Run
from groupbench.tracker.facts.record import UNREADABLE

RUNS_HERE = ("python", "triton", "pytorch")


class Source(msgspec.Struct, frozen=True):
    path: str
    content: str


class Build(msgspec.Struct, frozen=True):
    """The entry point of a solution. FlashInfer has `language`, SOL-ExecBench `languages`."""

    entry_point: str
    language: str | None = None
    languages: tuple[str, ...] = ()
    destination_passing_style: bool = True


class Solution(msgspec.Struct, frozen=True):
    name: str
    definition: str
    spec: Build
    sources: tuple[Source, ...]
    author: str = ""
    description: str | None = None

    @property
    def languages(self) -> tuple[str, ...]:
        return self.spec.languages or ((self.spec.language,) if self.spec.language else ())


def read_solutions(files: Iterable[Path]) -> list[Solution]:
    """Return the solutions in these files. Files of another form are skipped."""
    solutions = []
    for file in files:
        try:
            solutions.append(msgspec.json.decode(file.read_bytes(), type=Solution))
        except UNREADABLE:
            continue
    return solutions


def solution_backend(solution: Solution) -> Backend:
    """Return the backend that runs a solution. It is unavailable if the solution is in another language."""
    foreign = [language for language in solution.languages if language not in RUNS_HERE]
    reason = f"its sources are {', '.join(foreign)}: only Python and Triton run here" if foreign else None
    triton = "triton" in solution.languages
    return Backend(
        solution.name,
        lambda inputs: _prepared(solution, inputs),
        (solution.description or f"a solution by {solution.author or 'unknown'}").partition("\n")[0],
        kind="triton" if triton else "torch",
        unavailable=lambda target: reason or (no_interpreted_bf16(target) if triton else None),
        operator=solution.definition,
    )


def _prepared(solution: Solution, inputs: Any) -> Run:
    function = _function(solution)
    values = [getattr(inputs, field.name) for field in fields(inputs)]
    outputs: dict[str, Any] = inputs._outputs
    if not solution.spec.destination_passing_style:

        def returns() -> Any:
            out = function(*values)
            if isinstance(out, dict):
                out = tuple(out[name] for name in outputs)
            return out[0] if isinstance(out, (tuple, list)) and len(out) == 1 else out

        return returns

    def writes() -> Any:
        made = [torch.empty(sizes, dtype=dtype, device=device) for sizes, dtype, device in outputs.values()]
        if not _accepts(function, len(values) + len(made)) and _accepts(function, len(values)):
            raise TypeError(
                f"{solution.spec.entry_point} takes the inputs alone, but the solution's spec passes outputs too: "
                'set "destination_passing_style": false in it'
            )
        function(*values, *made)
        return made[0] if len(made) == 1 else tuple(made)

    return writes


def _accepts(function: Callable[..., Any], number: int) -> bool:
    """Return whether a function can be called with so many positional arguments, as far as the signature shows it."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _function(solution: Solution) -> Callable[..., Any]:
    """Import the entry point from a folder of the solution's own. Raises UsageError if it is not in the sources."""
    file, _, name = solution.spec.entry_point.partition("::")
    folder = _written(solution)
    stems = {PurePosixPath(source.path).parts[0].removesuffix(".py") for source in solution.sources}
    for stem in stems:  # forget modules of the same name, of another solution in this process
        if not str(getattr(sys.modules.get(stem), "__file__", "") or folder).startswith(str(folder)):
            del sys.modules[stem]
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"solution_{folder.name}", folder / file)
    if spec is None or spec.loader is None or not (folder / file).is_file():
        raise UsageError(f"solution {solution.name}: {file} is not among its sources")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _written(solution: Solution) -> Path:
    """Write the sources to a folder named by their content. Raises UsageError if a path leads out of it."""
    digest = hashlib.sha256(msgspec.json.encode(solution.sources)).hexdigest()[:16]
    folder = own_folder() / "solutions" / digest
    for source in solution.sources:
        path = PurePosixPath(source.path)
        if path.is_absolute() or ".." in path.parts:
            raise UsageError(f"solution {solution.name}: source {source.path} leads out of its folder")
        file = folder / path
        if not file.exists() or file.read_text() != source.content:
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{file.name}.{os.getpid()}")
            part.write_text(source.content)
            part.replace(file)
    return folder
