"""Print lists: operators, suites, backends and metrics, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from groupbench.operators.operator import Operator
from groupbench.operators.registry import get_operator, has_operator, operator_names
from groupbench.tracker.text.wording import counted


def foreign(ops: tuple[str, ...], plugins: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the operators unknown to groupbench and plugins."""
    return tuple(op for op in ops if not has_operator(op, plugins))


def show(options: dict[str, Any]) -> None:
    """Print the requested lists."""
    plugins = tuple(options["plugins"])
    operators = [get_operator(name, plugins) for name in options["ops"] or operator_names(plugins)]
    if options["list_operators"]:
        from groupbench.operators import contract  # its imports take longer than the other lists

        print(contract.NOTE)
    missing = _missing(operators) if options["list_backends"] else {}
    for operator in operators:
        if options["list_operators"]:
            _show_operator(operator)
        if options["list_backends"]:
            _show_backends(operator, missing)
    if options["list_metrics"]:
        from groupbench.operators import table

        for name, (meaning, _) in table.metrics_of_tables().items():
            print(f"{name}: {meaning}" + ("; not in `groupbench history`" if name in table.OF_TABLES else ""))


def _show_operator(operator: Operator) -> None:
    from groupbench.operators import contract

    print(f"{operator.name}: modes {', '.join(operator.modes)}; precisions {', '.join(operator.dtypes)}")
    for name, suite in operator.suites.items():
        print(f"  suite {name}: {counted(len(suite), 'shape')}, {suite[0]} ...")
    for line in contract.lines(operator):
        print(line)


def _show_backends(operator: Operator, missing: dict[tuple[str, str], str]) -> None:
    print(f"{operator.name}:")
    for backend in operator.backends:
        mark = " (baseline)" if backend.name == operator.baseline else ""
        suites = [suite for suite, name in operator.suite_baselines.items() if name == backend.name]
        mark += f" (baseline of suite {', '.join(suites)})" if suites else ""
        print(f"  {backend.name}{mark}: {backend.source}{missing.get((operator.name, backend.name), '')}")


def _missing(operators: Iterable[Operator]) -> dict[tuple[str, str], str]:
    """Return, by operator and backend, how to install the required package, in brackets."""
    from groupbench.operators.catalog import rivals

    return {
        (operator.name, name): f" ({how})"
        for operator in operators
        for name, how in rivals.not_installed([operator.name]).items()
    }
