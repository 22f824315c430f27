"""The parts that the tuners of grouped-product kernels share: the problem on the GPU, and the command.

The gradient of the rows is the forward product with the other layout of the weights, so it is a separate problem:
--dgrad tunes these problems and adds them to the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from groupbench.operators.catalog.shapes import SUITES, GroupedShape, parse
from groupbench.operators.tuners import tuning

if TYPE_CHECKING:
    from groupbench.kernels.device import Device
    from groupbench.operators.catalog.grouped_gemm import GroupedInputs


def problem_of(shape: GroupedShape, dtype: str, dgrad: bool) -> tuple[GroupedInputs, Device, str]:
    """Return (inputs, GPU, key in files of tuned configs) of a forward product, or of the gradient of its rows."""
    from groupbench.kernels.device import device_of
    from groupbench.kernels.grouped_gemm.support import stored_weights
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.operators.catalog import grouped_gemm, grouped_gemm_dgrad

    x = (grouped_gemm_dgrad if dgrad else grouped_gemm).make_inputs(shape, dtype, "cuda", seed=0)
    G, K, N = x.b.shape
    return x, device_of(x.a.device), tuning_key(shape.M, G, N, K, x.a.dtype, stored_weights(x.b)[1])


def command(backend: str, about: str, search: Callable[[GroupedShape, str, bool], tuning.Search]) -> click.Command:
    """Return the command that tunes a backend's kernel.

    about   description, stored in the file
    search  (shape, dtype, whether to tune the gradient of the rows) -> the search
    """

    @click.command(help=f"Tune {backend} for this GPU.")
    @tuning.output_option()
    @tuning.suite_option(SUITES, "tritonbench", "moe")
    @tuning.shape_option
    @tuning.dtype_option
    @click.option("--dgrad", is_flag=True, help="Tune the gradients of the rows and add them to the output file.")
    def main(output: Path, suites: tuple[str, ...], texts: tuple[str, ...], dtype: str, dgrad: bool) -> None:
        problems = tuning.chosen(parse, texts, (shape for suite in suites for shape in SUITES[suite].values()))
        tuning.tune(output, about, problems, lambda shape: search(shape, dtype, dgrad).keyed_times(), keep=dgrad)

    return main
