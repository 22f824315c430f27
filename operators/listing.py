"""What there is to measure: operators, suites, backends, metrics. None of it needs torch."""

from __future__ import annotations

from typing import Any

from groupbench.operators.registry import get_operator, operator_names
from groupbench.operators.sizes import counted


def theirs(ops: tuple[str, ...]) -> tuple[str, ...]:
    """The operators that groupbench has not."""
    return tuple(op for op in ops if op not in operator_names())


def show(options: dict[str, Any]) -> None:
    """Print the lists that the flags ask for."""
    operators = [get_operator(name, tuple(options["plugins"])) for name in options["ops"] or operator_names()]
    if options["list_operators"]:
        from groupbench.operators import contract  # what it stands on takes longer than the other lists

        print(contract.NOTE)
    for operator in operators:
        if options["list_operators"]:
            print(f"{operator.name}: modes {', '.join(operator.modes)}; precisions {', '.join(operator.dtypes)}")
            for name, suite in operator.suites.items():
                print(f"  suite {name}: {counted(len(suite), 'shape')}, {suite[0]} ...")
            for line in contract.lines(operator):
                print(line)
        if options["list_backends"]:
            print(f"{operator.name}:")
            for backend in operator.backends:
                mark = " (baseline)" if backend.name == operator.baseline else ""
                print(f"  {backend.name}{mark}: {backend.source}")
    if options["list_metrics"]:
        from groupbench.operators import table

        for name, (meaning, _) in table.metrics_of_tables().items():
            print(f"{name}: {meaning}")
