"""Find cuda_cluster's fastest config for each problem of the suites, and write the file that ships.

python -m groupbench.operators.tuners.cluster -o kernels/grouped_gemm/configs/cluster_h200.json
python -m groupbench.operators.tuners.cluster --dgrad -o kernels/grouped_gemm/configs/cluster_h200.json
"""

from __future__ import annotations

from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.tuners import product, tuning

ABOUT = "cuda_cluster's fastest config by problem, of the candidates in cluster_tiles.py"


def search(shape: GroupedShape, dtype: str, dgrad: bool = False) -> tuning.Search:
    """Return the search over every legal candidate for a problem on this GPU."""
    from groupbench.kernels.grouped_gemm.cluster import default_config, illegal, prepare_cluster
    from groupbench.kernels.grouped_gemm.cluster_tiles import candidates

    x, device, key = product.problem_of(shape, dtype, dgrad)
    legal = [config for config in candidates() if illegal(config, x.a.dtype, device) is None]
    G, K, _ = x.b.shape
    default = default_config(x.a.size(0), G, K)
    return tuning.Search(key, default, legal, (lambda config: prepare_cluster(x.a, x.b, x.offs, config),))


main = product.command("cuda_cluster", ABOUT, search)

if __name__ == "__main__":
    main()
