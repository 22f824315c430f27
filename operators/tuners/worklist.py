"""Find helion_worklist's fastest config for problems on this GPU, and write the file that ships.

    python -m groupbench.operators.tuners.worklist -o kernels/grouped_gemm/configs/worklist_h100.json

Runs in one process, about four seconds per problem. An existing output file keeps the configs of problems that are not
tuned again, or not before the time limit; a problem's config in the file is also a candidate.

`--autotune SECONDS` runs Helion's own search for that long too, for each problem, with the tile rows and the order of
the fastest config so far. Its result is a candidate like the others, timed in the same way.
"""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.operators.catalog.shapes import SUITES, GroupedShape, parse
from groupbench.operators.tuners import tuning

if TYPE_CHECKING:
    from groupbench.kernels.grouped_gemm.helion_worklist import WorklistConfig

ABOUT = "helion_worklist's fastest config by problem, of the candidates in helion_worklist.py"


def search(shape: GroupedShape, dtype: str) -> tuning.Search:
    """Return the search over every legal candidate for a problem on this GPU."""
    from groupbench.kernels.device import device_of
    from groupbench.kernels.grouped_gemm import helion_worklist
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.operators.catalog.grouped_gemm import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    torch_dtype, device = x.a.dtype, device_of(x.a.device)
    candidates = helion_worklist.candidates(shape.M / shape.G, shape.K)
    legal = [config for config in candidates if helion_worklist.illegal(config, torch_dtype, device) is None]
    default = helion_worklist.default_config(shape.M, shape.G, shape.N, torch_dtype, device)
    key = tuning_key(shape.M, shape.G, shape.N, shape.K, torch_dtype, shape.nk)
    prepare = helion_worklist.prepare_helion_worklist
    return tuning.Search(key, default, legal, (lambda config: prepare(x.a, x.b, x.offs, config),))


def times_of(
    shape: GroupedShape,
    dtype: str,
    chosen: list[WorklistConfig] | None = None,
    before: dict[str, dict[str, Any]] | None = None,
    autotune_s: float = 0,
) -> tuple[str, list[tuple[float, WorklistConfig]]]:
    """Return (key, [(ms, config)]) for the configs that run.

    chosen      configs to try; all candidates if None or empty
    before      fields of the configs in the file by problem; this problem's is tried too
    autotune_s  seconds of Helion's own search, whose result is tried too; 0 for no search
    """
    from groupbench.kernels.grouped_gemm import helion_worklist
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.operators.catalog.grouped_gemm import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    key = tuning_key(shape.M, shape.G, shape.N, shape.K, x.a.dtype, shape.nk)
    configs = list(chosen or helion_worklist.candidates(shape.M / shape.G, shape.K))
    if before and key in before and (last := helion_worklist.config_from(before[key])) not in configs:
        configs.append(last)

    def times(configs: list[WorklistConfig]) -> list[tuple[float, WorklistConfig]]:
        return tuning.time_each(
            configs, lambda config: helion_worklist.prepare_helion_worklist(x.a, x.b, x.offs, config)
        )

    measured = times(configs)
    if autotune_s and measured:
        fastest = min(measured, key=itemgetter(0))[1]
        measured += times([helion_worklist.tune_helion_worklist(x.a, x.b, x.offs, fastest, autotune_s)])
    return key, measured


def read_configs(path: Path) -> list[WorklistConfig]:
    """Read a list of configs from JSON: [{"block_m": 128, "block_n": 256, ...}, ...]. Raises click.BadParameter."""
    from groupbench.kernels.grouped_gemm.helion_worklist import config_from

    try:
        return [config_from(values) for values in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise click.BadParameter(f"{path} is not a list of configs: {error}") from error


@click.command()
@tuning.output_option()
@tuning.suite_option(SUITES, "tritonbench", "moe")
@tuning.shape_option
@click.option("--configs", "configs_path", type=click.Path(path_type=Path), help="JSON list of configs to try instead.")
@tuning.dtype_option
@tuning.limit_option(600)
@click.option(
    "--autotune", "autotune_s", default=0.0, show_default=True, help="Seconds of Helion's search per problem."
)
def main(
    output: Path,
    suites: tuple[str, ...],
    texts: tuple[str, ...],
    configs_path: Path | None,
    dtype: str,
    limit: float,
    autotune_s: float,
) -> None:
    """Tune helion_worklist for this GPU."""
    problems = tuning.chosen(parse, texts, (shape for suite in suites for shape in SUITES[suite].values()))
    chosen = read_configs(configs_path) if configs_path else None
    before = tuning.read_tuned(output)
    tuning.tune(
        output,
        ABOUT,
        problems,
        lambda shape: times_of(shape, dtype, chosen, before, autotune_s),
        "helion",
        limit_s=limit,
    )


if __name__ == "__main__":  # Helion's autotuner starts processes that import this module again
    main()
