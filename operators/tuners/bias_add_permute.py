"""Find the fastest configs of the fused kernel with bias and permutation, and write the file that ships.

    python -m groupbench.operators.tuners.bias_add_permute -o kernels/grouped_gemm/configs/bias_add_permute_h100.json

Runs on the GPU to tune for, in one process: a dozen configs per shape, about a second each with compiling. Each time is
printed with the bandwidth of the minimum bytes, relative to that of a copy. After the time limit the configs tuned so
far are written; an existing output file keeps those of other problems.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import click

from groupbench.operators.catalog.grouped_gemm_bias_add_permute import EXAMPLES, FusedShape, min_bytes, parse_shape
from groupbench.operators.tuners import tuning

ABOUT = "fastest configs of the fused kernel by problem, of the candidates in kernels/bias_add_permute/fused.py"


def search(shape: FusedShape, dtype: str) -> tuning.Search:
    """Return the search over every legal candidate for a problem on this GPU."""
    from groupbench.kernels.bias_add_permute.fused import candidates, config_key, configs_for, illegal, prepare_fused
    from groupbench.kernels.device import device_of
    from groupbench.operators.catalog.grouped_gemm_bias_add_permute import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    a = x.groups[0].a
    device = device_of(a.device)
    default = next(config for name, config, _ in configs_for(x.groups, x.op, device) if name == "default")
    legal = [config for config in candidates(x.op) if illegal(config, a.dtype, x.op, device) is None]
    key = config_key(x.groups, x.op)
    return tuning.Search(key, default, legal, (lambda config: prepare_fused(x.groups, x.op, config),))


@cache
def copy_gb_per_s() -> float:
    """Return the bandwidth of a copy of 1 GiB in GB/s, reads and writes counted."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").zero_()
    return 2 * source.numel() / tuning.fastest_burst(source.clone) / 1e6


@click.command()
@tuning.output_option()
@click.option("--shape", "--shapes", "texts", multiple=True, default=tuple(EXAMPLES), show_default=True)
@tuning.dtype_option
@tuning.limit_option(120)
def main(output: Path, texts: tuple[str, ...], dtype: str, limit: float) -> None:
    """Tune the fused kernel with bias and permutation for this GPU."""

    def share(shape: FusedShape, ms: float) -> str:
        return f" {min_bytes(shape, dtype) / ms / 1e6 / copy_gb_per_s():.0%} of copy"

    problems = tuning.chosen(parse_shape, texts, ())
    tuning.tune(
        output, ABOUT, problems, lambda shape: search(shape, dtype).keyed_times(), limit_s=limit, rate=share, sort=True
    )


if __name__ == "__main__":
    main()
