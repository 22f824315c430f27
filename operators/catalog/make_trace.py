"""Make a small routing trace: `python -m groupbench.operators.catalog.make_trace -o trace.npy`.

The loads follow a routing (routing.py), such as zipf(1.2), and drift: the logarithm of each expert's popularity does a
random walk over steps, so neighbouring steps are similar and distant ones are not. A token's k experts are drawn by
popularity without replacement. They are the k largest of log popularity plus Gumbel noise (Kool, van Hoof and Welling,
"Stochastic beams and where to find them", ICML 2019).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from groupbench.operators.catalog import routing as routings
from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.tools import shell

if TYPE_CHECKING:
    import numpy as np


def make(
    experts: int, k: int, tokens: int, steps: int, routing: str, drift: float, seed: int
) -> np.ndarray:  # [steps, T, k] int32
    """Return every token's experts at every step. Equal arguments give equal traces."""
    import numpy as np

    random = np.random.RandomState(seed)
    log_popularity = np.log(np.maximum(np.array(routings.rows(routing, experts, 1 << 30), dtype=np.float64), 1e-20))
    ids = np.empty((steps, tokens, k), dtype=np.int32)
    for step in ids:
        noise = random.gumbel(size=(tokens, experts))
        step[:] = np.argsort(-(log_popularity + noise), axis=1, kind="stable")[:, :k]
        log_popularity = log_popularity + drift * random.standard_normal(experts)
    return ids


@click.command()
@click.option("--experts", type=click.IntRange(1, 4096), default=128, show_default=True, help="Number of experts.")
@click.option(
    "--k", type=click.IntRange(1, 4096), default=8, show_default=True, help="Number of experts that each token goes to."
)
@click.option(
    "--tokens", type=click.IntRange(1, 65_536), default=256, show_default=True, help="Number of tokens in each step."
)
@click.option("--steps", type=click.IntRange(1, 10_000), default=32, show_default=True, help="Number of steps.")
@click.option(
    "--routing", default="zipf(1.2)", show_default=True, help="Distribution of tokens over experts at the first step."
)
@click.option(
    "--drift",
    type=click.FloatRange(0, 10),
    default=0.1,
    show_default=True,
    help="Change per step: the standard deviation of the logarithm of an expert's load.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed for the trace.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Write the trace to this .npy file.",
)
def command(experts: int, k: int, tokens: int, steps: int, routing: str, drift: float, seed: int, output: Path) -> None:
    """Write a routing trace for `tritonbench --routing-trace`. The experts' loads drift from step to step."""
    import numpy as np

    if k > experts:
        raise UsageError(f"--k {k} is too large: a token's experts are all different, and there are only {experts}")
    if output.suffix != ".npy":
        raise UsageError(f"{output}: the name of a trace file must end in .npy")
    try:
        routings.check(routing, experts)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with whole_file(output, UsageError) as file:
        np.save(file, make(experts, k, tokens, steps, routing, drift, seed))


if __name__ == "__main__":
    shell.run("make_trace", command, GroupbenchError)
