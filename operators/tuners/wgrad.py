"""Find the fastest configs of the weights' gradient for each problem, and write the file that ships.

    python -m groupbench.operators.tuners.wgrad -o kernels/grouped_gemm/configs/wgrad_h100.json
    python -m groupbench.operators.tuners.wgrad -o wgrad.json --suite moe --limit 300
    python -m groupbench.operators.tuners.wgrad --cluster -o kernels/grouped_gemm/configs/cluster_wgrad_h200.json
    python -m groupbench.operators.tuners.wgrad --helion dsv3_gu_ep32 --limit 120

Runs on the GPU to tune for, in one process, about five seconds per problem. An existing output file keeps the configs
of problems that are not tuned again, or not before the time limit. With --helion, Helion's own search runs for one
shape instead and prints its config, for helion_wgrad.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from groupbench.operators.catalog import shapes
from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.tuners import tuning

if TYPE_CHECKING:
    from groupbench.kernels.device import Device
    from groupbench.operators.catalog.grouped_gemm_wgrad import WgradInputs

ABOUT = "fastest configs of the weights' gradient by problem, of the candidates in wgrad.py"
ABOUT_CLUSTER = "cuda_cluster's fastest configs of the weights' gradient by problem, of those in cluster_tiles.py"


def search(shape: GroupedShape, dtype: str) -> tuning.Search:
    """Return the search over every legal candidate for a problem on this GPU."""
    from groupbench.kernels.grouped_gemm.wgrad import MOST_RANKED, candidates, default_config, illegal, prepare_wgrad

    x, device, key = _problem_of(shape, dtype)
    legal = [
        config
        for config in candidates(shape.M / shape.G)
        if illegal(config, x.a.dtype, device) is None and not (config.dynamic and shape.G > MOST_RANKED)
    ]
    default = default_config(shape.M, shape.G, shape.N, shape.K, x.a.dtype, device)
    return tuning.Search(key, default, legal, (lambda config: prepare_wgrad(x.a, x.dc, x.offs, x.nk, config),))


def search_cluster(shape: GroupedShape, dtype: str) -> tuning.Search:
    """Return the search over every legal candidate of cuda_cluster for a problem on this GPU."""
    from groupbench.kernels.grouped_gemm.cluster_wgrad import (
        candidates,
        default_config,
        illegal,
        prepare_cluster_wgrad,
    )

    x, device, key = _problem_of(shape, dtype)
    legal = [config for config in candidates() if illegal(config, x.a.dtype, device) is None]
    default = default_config(shape.M, shape.G)
    return tuning.Search(key, default, legal, (lambda config: prepare_cluster_wgrad(x.a, x.dc, x.offs, x.nk, config),))


def _problem_of(shape: GroupedShape, dtype: str) -> tuple[WgradInputs, Device, str]:
    """Return (inputs, GPU, key in files of tuned configs)."""
    from groupbench.kernels.device import device_of
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.operators.catalog.grouped_gemm_wgrad import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    key = tuning_key(shape.M, shape.G, shape.N, shape.K, x.a.dtype, shape.nk)
    return x, device_of(x.a.device), key


def tune_helion(shape: GroupedShape, dtype: str, limit_s: float) -> str:
    """Return Helion's best config for a problem as text, after a search of about limit_s seconds."""
    import os

    os.environ.setdefault("HELION_AUTOTUNE_EFFORT", "quick")
    os.environ["HELION_AUTOTUNE_BUDGET_SECONDS"] = str(int(limit_s))
    from groupbench.kernels.grouped_gemm.helion_wgrad import tune_helion_wgrad
    from groupbench.operators.catalog.grouped_gemm_wgrad import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    return repr(tune_helion_wgrad(x.a, x.dc, x.offs, x.nk))


@click.command()
@tuning.output_option(required=False)
@tuning.suite_option(shapes.SUITES, "tritonbench", "moe")
@tuning.shape_option
@tuning.dtype_option
@tuning.limit_option(1200)
@click.option("--cluster", is_flag=True, help="Tune cuda_cluster, not triton_flat.")
@click.option("--helion", help="Let Helion search for this shape instead.")
def main(
    output: Path | None,
    suites: tuple[str, ...],
    texts: tuple[str, ...],
    dtype: str,
    limit: float,
    cluster: bool,
    helion: str | None,
) -> None:
    """Tune the weights' gradient for this GPU."""
    if helion is not None:
        click.echo(tune_helion(shapes.parse(helion), dtype, limit))
        return
    if output is None:
        raise click.UsageError("name the file for the configs: -o FILE")
    of_suites = shapes.weight_gradient_suites()
    tuning.tune(
        output,
        ABOUT_CLUSTER if cluster else ABOUT,
        tuning.chosen(shapes.parse, texts, (shape for suite in suites for shape in of_suites[suite])),
        lambda shape: (search_cluster if cluster else search)(shape, dtype).keyed_times(),
        limit_s=limit,
        rate=lambda shape, ms: f" {2e-9 * shape.M * shape.N * shape.K / ms:6.1f} TFLOP/s",
        sort=True,
    )


if __name__ == "__main__":
    main()
