"""Find the fastest configs of a layer's first grouped GEMM with SwiGLU for each problem, and write the file.

    python -m groupbench.operators.tuners.moe -o kernels/grouped_gemm/configs/gate_up_h100.json
    python -m groupbench.operators.tuners.moe -o gate_up.json --suite decode --limit 60

Runs on the GPU to tune for, in one process, a few seconds per problem. Configs are compared by the sum of the times for
inference and for training. An existing output file keeps the configs of problems that are not tuned again, or not
before the time limit. The layer's other products have their own tuners, flat and wgrad.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from groupbench.operators.catalog import moe
from groupbench.operators.catalog.moe import MoeShape
from groupbench.operators.tuners import tuning

ABOUT = "fastest configs of gate and up with SwiGLU by problem, of the candidates in kernels/moe/gate_up.py"


def search(shape: MoeShape, dtype: str) -> tuning.Search:
    """Return the search over every legal candidate for a problem on this GPU, timed for inference and for training."""
    from groupbench.kernels.device import device_of
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.kernels.moe.gate_up import GateUpConfig, candidates, default_config, gate_up, illegal
    from groupbench.kernels.moe.permute import spread_rows
    from groupbench.kernels.moe.routing import route
    from groupbench.operators.catalog.moe_layer import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    routing = route(x.ids, shape.G)
    rows = spread_rows(x.x, routing.position)
    device = device_of(rows.device)
    legal = [config for config in candidates(shape.choices / shape.G) if illegal(config, rows.dtype, device) is None]

    def first_product(save: bool) -> Callable[[GateUpConfig], Callable[[], object]]:
        return lambda config: partial(gate_up, rows, x.w_gate_up, routing.offs, save, config)

    key = tuning_key(shape.choices, shape.G, 2 * shape.F, shape.H, rows.dtype, nk=True)
    default = default_config(shape.choices, shape.G, shape.F, shape.H, rows.dtype, device)
    return tuning.Search(key, default, legal, (first_product(save=False), first_product(save=True)))


@click.command()
@tuning.output_option()
@tuning.suite_option(moe.LAYER_SUITES, "moe", "decode")
@tuning.shape_option
@tuning.dtype_option
@tuning.limit_option(1200)
def main(output: Path, suites: tuple[str, ...], texts: tuple[str, ...], dtype: str, limit: float) -> None:
    """Tune the first product of a mixture-of-experts layer for this GPU."""
    of_suites = (shape for suite in suites for shape in moe.LAYER_SUITES[suite].values())
    tuning.tune(
        output,
        ABOUT,
        tuning.chosen(partial(moe.parse, layer=True), texts, of_suites),
        lambda shape: search(shape, dtype).keyed_times(),
        limit_s=limit,
        rate=lambda shape, ms: f" {8e-9 * shape.M * shape.H * shape.F / ms:6.1f} TFLOP/s",  # two runs
        sort=True,
    )


if __name__ == "__main__":
    main()
