"""Select an operator's modes, dtypes and shapes, with defaults, and find the backends able to run.

It is next to the measuring code, since a commit comparison applies it to operators from other trees.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from groupbench.operators.errors import UsageError
from groupbench.operators.measure.environment import interpreter_problem
from groupbench.operators.measure.faults import describe
from groupbench.operators.measure.texts import one_line
from groupbench.operators.operator import Backend, Operator, Target
from groupbench.tracker.text.wording import no_such

LargeModule = Literal["torch._dynamo", "triton.experimental.gluon", "torch._inductor.choices"]
"""A module that the fork server may import for cells. A plugin's process names it, and must not name its own."""
DYNAMO: LargeModule = "torch._dynamo"
GLUON: LargeModule = "triton.experimental.gluon"
"""What Triton imports at the first launch of a kernel."""
INDUCTOR: LargeModule = "torch._inductor.choices"
"""What TritonBench imports. TritonBench itself asks for a GPU, which the fork server must not open."""
USES_DYNAMO = re.compile(r"helion|torch\.compile|_dynamo|_inductor")
"""Text of a plugin that imports Dynamo, maybe only when it is called."""
USES_TORCH = re.compile(r"\btorch\b")
USES_INDUCTOR = re.compile(r"\bBenchmarkOperator\b")


def select_mode(operator: Operator, mode: str) -> Operator:
    """Return the operator in this mode. Raises UsageError if it does not have the mode."""
    if mode not in operator.modes:
        raise UsageError(no_such(f"{operator.name} has no mode", mode, operator.modes))
    return operator.in_mode(mode)


def select_dtypes(operator: Operator, dtypes: Sequence[str], device: str) -> tuple[str, ...]:
    """Return the named dtypes, or the default. Raises UsageError for a dtype unknown to the operator."""
    for dtype in dtypes:
        if dtype not in operator.dtypes:
            raise UsageError(no_such(f"{operator.name} has no precision", dtype, operator.dtypes))
    return tuple(dtypes) or default_dtypes(operator, device)


def select_shapes(operator: Operator, suites: Sequence[str], texts: Sequence[str], device: str) -> list[Any]:
    """Return the suites' shapes, by default the default suite's, and those given as text, without duplicates.

    Raises UsageError for an unknown suite or an empty or invalid shape.
    """
    if not suites and not texts:
        suites = (default_suite(operator, device),)
    shapes: list[Any] = []
    for suite in suites:
        if suite not in operator.suites:
            raise UsageError(no_such(f"{operator.name} has no suite", suite, operator.suites))
        shapes += operator.suites[suite]
    if not all(text.strip() for text in texts):
        raise UsageError("a shape is empty")
    try:
        shapes += [operator.parse_shape(text) for text in texts]
    except ValueError as error:
        raise UsageError(f"{operator.name}: {error}") from error
    return list({str(shape): shape for shape in shapes}.values())


def why_unavailable(operator: Operator, backend: str, target: Target) -> str | None:
    """Return why the named backend cannot run on the target, or None. An error in the check is a reason too."""
    try:
        chosen = operator.backend(backend)
        reason = chosen.unavailable(target)
        if not reason and target.interpreted and chosen.kind != "torch":
            reason = interpreter_problem()
        return (one_line(str(reason)) or "its `unavailable` gives no reason") if reason else None
    except (Exception, SystemExit) as error:  # in a plugin, for example: only its own cells fail
        return f"its `unavailable` raised {describe(error)}"


def imports_of(backend: Backend, plugins: Sequence[str]) -> tuple[LargeModule, ...]:
    """Return the large modules to be imported by a backend's processes, so the fork server can import them once.

    Triton imports Gluon, Helion and torch.compile Dynamo, and TritonBench Inductor. A plugin's text is searched for the
    latter two: a wrong guess only costs time.
    """
    needs = {
        GLUON: backend.kind in ("triton", "helion"),
        DYNAMO: backend.kind == "helion"
        or "compile" in backend.name
        or any(_mentions(plugin, USES_DYNAMO) for plugin in plugins),
        INDUCTOR: any(_mentions(plugin, USES_INDUCTOR) for plugin in plugins),
    }
    return tuple(name for name, needed in needs.items() if needed)


def imports_to_count(home: Sequence[str]) -> tuple[LargeModule, ...]:
    """Return the large modules needed to count an operator's bytes.

    Torch's device "meta", on which tensors are counted, imports Dynamo. A NumPy operator imports neither.

    Args:
        home: The plugins that may define the operator.
    """
    return (DYNAMO,) if any(_mentions(plugin, USES_TORCH) for plugin in home) else ()


def _mentions(plugin: str, pattern: re.Pattern[str]) -> bool:
    """Return whether a plugin's text matches. This process has imported it."""
    file, python, _ = plugin.partition(".py:")
    module = sys.modules.get(plugin) or sys.modules.get(plugin.replace(":", ".").rpartition(".")[0])
    path = Path(getattr(module, "__file__", None) or file + python.rstrip(":"))
    try:
        return pattern.search(path.read_text(errors="replace")) is not None
    except OSError:
        return False


def default_dtypes(operator: Operator, device: str) -> tuple[str, ...]:
    """Return the operator's first dtype; on a CPU fp16 if supported, since Triton's interpreter gets bf16 wrong."""
    return ("fp16",) if device == "cpu" and "fp16" in operator.dtypes else operator.dtypes[:1]


def default_suite(operator: Operator, device: str) -> str:
    """Return the operator's first suite; on a CPU, where that may take hours, the suite for CPUs if it has one."""
    for name in (device, "smoke" if device == "cpu" else ""):
        if name in operator.suites:
            return name
    return next(iter(operator.suites))
