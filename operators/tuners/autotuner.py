"""Let Helion's own autotuner search for a config, within a budget.

A grid of block sizes leaves out most settings that Helion can change: the order of programs, indexing by pointers or
descriptors, loops that are unrolled, pipelined or flattened, and tunables such as `split_k`. Helion searches among
these by its own strategy, and starts from our default config.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from groupbench.operators.measure.faults import describe

if TYPE_CHECKING:
    import helion


def by_helion(default: helion.Config, prepare: Callable[[Any], Any], budget_s: float) -> helion.Config | None:
    """Return the config that Helion's autotuner finds for the kernel that `prepare(default)` compiles last.

    Returns None if the search fails; the message is printed.
    """
    from groupbench.kernels.helion_configs import bindings

    with bindings() as bound:
        prepare(default)
    kernel, arguments = bound[-1]
    wanted = {
        "autotune_budget_seconds": math.ceil(budget_s),
        "autotune_seed_configs": [default],
        "autotune_progress_bar": False,
    }
    before = {name: getattr(kernel.settings, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(kernel.settings, name, value)
        fastest: helion.Config = kernel.autotune(arguments)
        return fastest
    except Exception as error:
        click.echo(f"  Helion's autotuner found no config: {describe(error)}", err=True)
        return None
    finally:
        for name, value in before.items():
            setattr(kernel.settings, name, value)
