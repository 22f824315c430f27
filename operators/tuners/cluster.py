"""Find cuda_cluster's fastest config for each problem of the suites, and write the file that ships.

    python -m groupbench.operators.tuners.cluster -o kernels/grouped_gemm/configs/cluster_h100.json
    python -m groupbench.operators.tuners.cluster --dgrad -o kernels/grouped_gemm/configs/cluster_h100.json

The gradient of the rows is the forward product with the other layout of the weights, so it is a separate problem:
--dgrad tunes these problems and adds them to the file.
"""

from __future__ import annotations

from pathlib import Path

import click

from groupbench.operators.catalog.shapes import SUITES, GroupedShape, parse
from groupbench.operators.tuners import tuning

ABOUT = "cuda_cluster's fastest config by problem, of the candidates in cluster.py"


def search(shape: GroupedShape, dtype: str, dgrad: bool = False) -> tuning.Search:
    """Return the search over every legal candidate for a problem on this GPU."""
    from groupbench.kernels.device import device_of
    from groupbench.kernels.grouped_gemm.cluster import DEFAULT, candidates, illegal, prepare_cluster
    from groupbench.kernels.grouped_gemm.support import stored_weights
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.operators.catalog import grouped_gemm, grouped_gemm_dgrad

    x = (grouped_gemm_dgrad if dgrad else grouped_gemm).make_inputs(shape, dtype, "cuda", seed=0)
    device = device_of(x.a.device)
    legal = [config for config in candidates() if illegal(config, x.a.dtype, device) is None]
    G, K, N = x.b.shape
    key = tuning_key(shape.M, G, N, K, x.a.dtype, stored_weights(x.b)[1])
    return tuning.Search(key, DEFAULT, legal, (lambda config: prepare_cluster(x.a, x.b, x.offs, config),))


@click.command()
@tuning.output_option()
@tuning.suite_option(SUITES, "tritonbench", "moe")
@tuning.shape_option
@tuning.dtype_option
@click.option("--dgrad", is_flag=True, help="Tune the gradients of the rows and add them to the output file.")
def main(output: Path, suites: tuple[str, ...], texts: tuple[str, ...], dtype: str, dgrad: bool) -> None:
    """Tune cuda_cluster for this GPU."""
    problems = tuning.chosen(parse, texts, (shape for suite in suites for shape in SUITES[suite].values()))
    tuning.tune(output, ABOUT, problems, lambda shape: search(shape, dtype, dgrad).keyed_times(), keep=dgrad)


if __name__ == "__main__":
    main()
