"""Tune kernels for this GPU and this user: `python -m groupbench.operators.tuners`, run by `groupbench tune`.

The fastest config of each problem is written to the folder GROUPBENCH_CONFIGS, by default ~/.cache/groupbench, in files
with the GPU's name and Triton's version. Kernels read them from there when a problem is prepared.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from groupbench.operators.measure.faults import describe
from groupbench.operators.registry import get_operator
from groupbench.operators.tuners import bias_add_permute, cluster, flat, fp8, helion, split_k, tuning, wgrad, worklist
from groupbench.operators.tuners import moe as gate_up
from groupbench.tracker.text.wording import no_such, printable


@dataclass(frozen=True)
class Tunable:
    """A kernel with configs.

    about     description, shown by --list
    operator  operator whose suites hold its problems; the first suite is tuned by default
    search    (shape, dtype) -> a search for each variant of the problem
    """

    about: str
    operator: str
    search: Callable[[Any, str], Iterable[tuning.Search]]


def _one(search: Callable[[Any, str], tuning.Search]) -> Callable[[Any, str], Iterable[tuning.Search]]:
    return lambda shape, dtype: [search(shape, dtype)]


def _fp8(shape: Any, dtype: str) -> Iterable[tuning.Search]:
    from groupbench.kernels.grouped_gemm.fp8 import MODES

    return (fp8.search(shape, mode) for mode in MODES)


KERNELS = {
    "flat": Tunable("triton_flat", "grouped_gemm", _one(flat.search)),
    "cluster": Tunable("cuda_cluster", "grouped_gemm", _one(cluster.search)),
    "cluster_wgrad": Tunable(
        "cuda_cluster, the gradient of the weights", "grouped_gemm_wgrad", _one(wgrad.search_cluster)
    ),
    "wgrad": Tunable("triton_flat, the gradient of the weights", "grouped_gemm_wgrad", _one(wgrad.search)),
    "fp8": Tunable("triton_flat, each recipe", "grouped_gemm_fp8", _fp8),
    "cluster_fp8": Tunable("cuda_cluster_fast", "grouped_gemm_fp8", lambda shape, dtype: [fp8.search_cluster(shape)]),
    "worklist": Tunable("helion_worklist", "grouped_gemm", _one(worklist.search)),
    "helion_jagged": Tunable("helion_jagged", "grouped_gemm", _one(partial(helion.search, "helion_jagged"))),
    "helion_persistent": Tunable(
        "helion_persistent", "grouped_gemm", _one(partial(helion.search, "helion_persistent"))
    ),
    "helion_wgrad": Tunable(
        "helion_jagged, the gradient of the weights", "grouped_gemm_wgrad", _one(helion.search_wgrad)
    ),
    "gate_up": Tunable("the first product", "moe_layer", _one(gate_up.search)),
    "bias_add_permute": Tunable(
        "triton_fused, its plain kernel", "grouped_gemm_bias_add_permute", _one(bias_add_permute.search)
    ),
    "split_k": Tunable("triton_fixup, its tiled kernel", "split_k_matmul", _one(split_k.search)),
    "helion_barrier": Tunable("helion_barrier, its split_k", "split_k_matmul", _one(helion.search_barrier)),
}


def fields_of(config: Any) -> dict[str, Any]:
    """Return a config as a JSON object: the fields of a dataclass, or the settings of a Helion config."""
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config.config)  # type: ignore[arg-type]


def tune_one(search: tuning.Search) -> tuple[Any, float, float | None] | None:
    """Return (fastest config, its ms, ms of the default config or None if that does not run), or None if none runs."""
    others = [config for config in search.candidates if fields_of(config) != fields_of(search.default)]
    times = tuning.time_each([search.default, *others], *search.prepares)
    if not times:
        return None
    default_ms = next((ms for ms, config in times if config is search.default), None)
    ms, best = min(times, key=lambda timed: timed[0])
    return best, ms, default_ms


def shapes_of(tunable: Tunable, suites: tuple[str, ...], texts: tuple[str, ...]) -> dict[str, Any]:
    """Return shapes by text: those of `texts`, else of the suites, else of the first suite.

    Raises click.BadParameter for an unknown suite or a text that is not a shape.
    """
    operator = get_operator(tunable.operator)
    available = operator.suites
    if unknown := [suite for suite in suites if suite not in available]:
        raise click.BadParameter(no_such("no suite", unknown[0], available), param_hint="--suite")
    of_suites = (shape for name in suites or [*available][:1] for shape in available[name])
    return tuning.chosen(operator.parse_shape, texts, () if texts else of_suites)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--list", "listed", is_flag=True, help="List the kernels and their suites.")
@click.option("--suite", "suites", multiple=True, help="Suites to tune. By default the first of each kernel.")
@tuning.shape_option
@tuning.dtype_option
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Folder to write to.")
@tuning.limit_option(1200)
def main(
    kernels: tuple[str, ...],
    listed: bool,
    suites: tuple[str, ...],
    texts: tuple[str, ...],
    dtype: str,
    folder: Path | None,
    limit: float,
) -> None:
    """Find the fastest configs of the kernels on this GPU and store them for this user.

    Writes to the folder GROUPBENCH_CONFIGS, by default ~/.cache/groupbench. Every file contains the GPU, Triton's
    version, and the margin of each config over the default.
    """
    if unknown := [name for name in kernels if name not in KERNELS]:
        raise click.BadParameter(no_such("no kernel", unknown[0], KERNELS), param_hint="KERNEL")
    if listed:
        for name, tunable in KERNELS.items():
            suites_of = ", ".join(get_operator(tunable.operator).suites)
            click.echo(f"{name:18} {tunable.operator}: {tunable.about} (suites: {suites_of})")
        return
    chosen = kernels or tuple(KERNELS)
    problems = {name: shapes_of(KERNELS[name], suites, texts) for name in chosen}
    tuning.require_gpu()
    end = time.monotonic() + limit
    for name, named in problems.items():
        _tune_kernel(name, named, dtype, folder, end)


def _tune_kernel(name: str, named: Mapping[str, Any], dtype: str, folder: Path | None, end: float) -> None:
    """Tune a kernel's problems until `end`, in seconds of the monotonic clock, and write after each."""
    import torch

    from groupbench.kernels.grouped_gemm import tuned

    gpu = torch.cuda.get_device_name()
    path = tuned.user_file(name, gpu)
    path = path if folder is None else folder / path.name
    for text, shape in named.items():
        if time.monotonic() > end:
            click.echo(f"{name}: time is up before {text}", err=True)
            return
        try:
            for search in KERNELS[name].search(shape, dtype):
                outcome = tune_one(search)
                if outcome is None:
                    click.echo(f"{name} {text}: no config runs", err=True)
                    continue
                config, ms, default_ms = outcome
                margin = {"ms": ms} | ({} if default_ms is None else {"default_ms": default_ms})
                tuned.keep(path, gpu, {search.key: fields_of(config)}, {search.key: margin}, tuning.measured_on())
                faster = "" if default_ms is None else f", {default_ms / ms - 1:.1%} faster than the default"
                click.echo(f"{name} {search.key}: {ms:.4f} ms{faster}")
        except Exception as error:
            click.echo(f"{name} {text}: {describe(error)}", err=True)
        torch.cuda.empty_cache()
    click.echo(f"{name}: {path}")


def run() -> int:
    """Run the command, with each error in one line; return the exit code."""
    try:
        code = main.main(prog_name="groupbench tune", standalone_mode=False)
    except click.ClickException as error:
        print(f"groupbench tune: {printable(error.format_message())}", file=sys.stderr)
        return error.exit_code
    except click.Abort:
        return 130
    return code or 0


if __name__ == "__main__":  # Helion's autotuner starts processes that import this module again
    sys.exit(run())
