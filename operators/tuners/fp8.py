"""Find the fp8 kernel's fastest config for each problem and mode, and write the file that ships.

    python -m groupbench.operators.tuners.fp8 -o kernels/grouped_gemm/configs/fp8_h100.json --limit 240
    python -m groupbench.operators.tuners.fp8 --cluster -o kernels/grouped_gemm/configs/cluster_fp8_h200.json

Runs on the GPU to tune for, in one process. The first problem with a number of experts takes about ten seconds per
mode, mostly to compile. After the time limit the configs tuned so far are written; the other problems use the configs
by size class. An existing file keeps the configs of problems that are not tuned again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from groupbench.operators.catalog.shapes import SUITES, GroupedShape
from groupbench.operators.tuners import tuning
from groupbench.tracker.text.wording import no_such

if TYPE_CHECKING:
    from groupbench.kernels.grouped_gemm.cluster_tiles import ClusterConfig

ABOUT = "the fp8 kernel's fastest config by problem and mode, of the candidates in fp8.py"
ABOUT_CLUSTER = "cuda_cluster_fast's fastest config by problem, of the candidates in cluster_tiles.py"
MOE = SUITES["moe"]
# Few experts with many rows, many with fewer, and a few rows each; the first are tuned first.
SHAPES = (
    *("dsv3_gu_ep32_zipf", "dsv3_dn_ep32", "mixtral8x7b_gu", "qwen30b_gu", "qwen30b_dn", "qwen30b_decode"),
    *("gptoss20b_gu", "dsv3_decode"),
)


def search(shape: GroupedShape, mode: str) -> tuning.Search:
    """Return the search over every legal candidate for a problem on this GPU."""
    from groupbench.kernels.device import device_of
    from groupbench.kernels.grouped_gemm import fp8
    from groupbench.kernels.grouped_gemm.tuned import first_legal, problem_key
    from groupbench.operators.catalog.grouped_gemm_fp8 import make_inputs

    x = make_inputs(shape, "fp8", "cuda", seed=0, blockwise=mode == fp8.BLOCKWISE)
    device = device_of(x.a.device)
    configs = fp8.configs_for(mode, shape.M, shape.G, shape.N, shape.K, device)
    runs_here = [named for named in configs if named[0] != "tuned" and (device.hopper or not named[1].specialized)]
    default = first_legal(runs_here)

    def prepare(config: fp8.Fp8Config) -> Callable[[], object]:
        fast = mode == fp8.ROWWISE_FAST
        return fp8.prepare_fp8(x.a, x.scale_a, x.b, x.scale_b, x.offs, fast_accum=fast, config=config)

    legal = [config for config in fp8.candidates(mode, shape.M / shape.G) if fp8.illegal(config, mode, device) is None]
    return tuning.Search(problem_key(shape.M, shape.G, shape.N, shape.K, mode), default, legal, (prepare,))


def search_cluster(shape: GroupedShape) -> tuning.Search:
    """Return the search over every legal candidate of cuda_cluster_fast for a problem on this GPU."""
    from groupbench.kernels.device import device_of
    from groupbench.kernels.grouped_gemm.cluster import default_config, illegal
    from groupbench.kernels.grouped_gemm.cluster_fp8 import prepare_cluster_fp8
    from groupbench.kernels.grouped_gemm.cluster_tiles import candidates
    from groupbench.kernels.grouped_gemm.fp8 import ROWWISE_FAST
    from groupbench.kernels.grouped_gemm.tuned import problem_key
    from groupbench.operators.catalog.grouped_gemm_fp8 import make_inputs

    x = make_inputs(shape, "fp8", "cuda", seed=0)
    device = device_of(x.a.device)
    legal = [config for config in candidates() if illegal(config, x.a.dtype, device) is None]
    key = problem_key(shape.M, shape.G, shape.N, shape.K, ROWWISE_FAST)
    default = default_config(shape.M, shape.G, shape.K)

    def prepare(config: ClusterConfig) -> Callable[[], object]:
        return prepare_cluster_fp8(x.a, x.scale_a, x.b, x.scale_b, x.offs, config)

    return tuning.Search(key, default, legal, (prepare,))


@click.command()
@tuning.output_option()
@click.option(
    "--shape",
    "--shapes",
    "names",
    type=click.Choice([*MOE]),
    multiple=True,
    default=SHAPES,
    help="Shapes of suite moe.",
)
@click.option("--mode", "modes", multiple=True, default=("rowwise", "rowwise_fast", "blockwise"), show_default=True)
@click.option("--cluster", is_flag=True, help="Tune cuda_cluster_fast, not triton_flat.")
@tuning.limit_option(240)
def main(output: Path, names: tuple[str, ...], modes: tuple[str, ...], cluster: bool, limit: float) -> None:
    """Tune the fp8 kernel for this GPU."""
    from groupbench.kernels.grouped_gemm.fp8 import MODES

    if cluster:
        shapes = {name: MOE[name] for name in names}
        tuning.tune(output, ABOUT_CLUSTER, shapes, lambda shape: search_cluster(shape).keyed_times(), limit_s=limit)
        return
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise click.BadParameter(no_such("no mode", unknown[0], MODES), param_hint="--mode")
    problems = {f"{name} {mode}": (MOE[name], mode) for name in names for mode in modes}
    tuning.tune(output, ABOUT, problems, lambda problem: search(*problem).keyed_times(), limit_s=limit)


if __name__ == "__main__":
    main()
