"""Find triton_flat's fastest config for each problem of the suites, and write the file that ships.

    python -m groupbench.operators.tuners.flat -o kernels/grouped_gemm/configs/flat_h100.json
    python -m groupbench.operators.tuners.flat --dgrad -o kernels/grouped_gemm/configs/flat_h100.json

Runs on the GPU to tune for, in one process, about five seconds per problem.
"""

from __future__ import annotations

from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.tuners import product, tuning

ABOUT = "triton_flat's fastest config by problem, of the candidates in flat.py"


def search(shape: GroupedShape, dtype: str, dgrad: bool = False) -> tuning.Search:
    """Return the search over every legal candidate for a problem on this GPU."""
    from groupbench.kernels.grouped_gemm.flat import candidates, default_config, illegal, prepare_flat

    x, device, key = product.problem_of(shape, dtype, dgrad)
    legal = [config for config in candidates(shape.M / shape.G) if illegal(config, x.a.dtype, device) is None]
    default = default_config(shape.M, shape.G, x.a.dtype, device)
    return tuning.Search(key, default, legal, (lambda config: prepare_flat(x.a, x.b, x.offs, config),))


main = product.command("triton_flat", ABOUT, search)

if __name__ == "__main__":
    main()
