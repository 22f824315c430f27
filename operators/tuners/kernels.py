"""Kernels that can be tuned, one row each: default config, configs to try, and how to run one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from groupbench.operators.deferred import torch
from groupbench.operators.registry import get_operator
from groupbench.operators.tuners import neighbours

if TYPE_CHECKING:
    from groupbench.kernels.device import Device

Run = Callable[[], object]


@dataclass(frozen=True)
class Search:
    """The configs to try for a problem."""

    key: str  # tuned-config key
    default: Any  # config used without tuning; margins are over this one
    candidates: list[Any]  # configs that are legal on this GPU
    prepare: Callable[[Any], Run]  # config -> the call to time
    in_helion: bool = False  # Helion's autotuner can search too


@dataclass(frozen=True)
class Problem:
    """Arguments of the functions of a row."""

    k: Any  # the kernel's module
    s: Any  # shape
    x: Any  # inputs on the GPU
    dtype: torch.dtype
    device: Device
    variant: str

    @property
    def rows(self) -> float:
        """Mean rows per group."""
        return float(self.s.M / self.s.G)


def _key(p: Problem) -> str:
    from groupbench.kernels.grouped_gemm.tuned import tuning_key

    return tuning_key(p.s.M, p.s.G, p.s.N, p.s.K, p.dtype, p.s.nk)


def _forward(prepare: str) -> Callable[[Problem, Any], Run]:
    """Return the `run` of a forward kernel, whose entry point is `prepare`."""
    return lambda p, config: getattr(p.k, prepare)(p.x.a, p.x.b, p.x.offs, config)


def _wgrad(prepare: str) -> Callable[[Problem, Any], Run]:
    return lambda p, config: getattr(p.k, prepare)(p.x.a, p.x.dc, p.x.offs, p.x.nk, config)


@dataclass(frozen=True)
class Tunable:
    """A kernel with configs.

    Attributes:
        about: Backend that runs the kernel, for `--list`.
        operator: Operator of the problems. Its first suite is tuned by default.
        module: Module below `groupbench.kernels`.
        default: Config that is used without tuning.
        choices: Configs to try; those that are not legal are skipped.
        run: Compile a config and return the call to time.
        illegal: Why a config cannot run, or None.
        key: Tuned-config key.
        operand: Input tensor with the kernel's dtype.
        variants: (variant, operator that draws its inputs); tuned one after another.
        in_helion: Helion's own autotuner can search for configs of the kernel.
    """

    about: str
    operator: str
    module: str
    default: Callable[[Problem], Any]
    choices: Callable[[Problem], Iterable[Any]]
    run: Callable[[Problem, Any], Run]
    illegal: Callable[[Problem, Any], str | None] = lambda p, config: p.k.illegal(config, p.dtype, p.device)
    key: Callable[[Problem], str] = _key
    operand: Callable[[Any], torch.Tensor] = lambda x: x.a
    variants: tuple[tuple[str, str], ...] = ()
    in_helion: bool = False

    def searches(self, shape: Any, dtype: str) -> Iterator[Search]:
        """Yield the search for each variant of a problem on this GPU."""
        from groupbench.kernels.device import device_of

        k = importlib.import_module(f"groupbench.kernels.{self.module}")
        for variant, operator in self.variants or (("", self.operator),):
            x = draw(operator, shape, dtype)
            operand = self.operand(x)
            p = Problem(k, shape, x, operand.dtype, device_of(operand.device), variant)
            legal = [config for config in self.choices(p) if self.illegal(p, config) is None]
            yield Search(self.key(p), self.default(p), legal, partial(self.run, p), self.in_helion)


def draw(operator: str, shape: Any, dtype: str) -> Any:
    """Draw inputs on the GPU, in `dtype` if the operator has it."""
    drawn = get_operator(operator)
    return drawn.make_inputs(shape, dtype if dtype in drawn.dtypes else drawn.dtypes[0], "cuda", 0)


def _cluster_tiles(p: Problem) -> Iterable[Any]:
    from groupbench.kernels.grouped_gemm.cluster_tiles import candidates

    return candidates()


# --- fp8 --------------------------------------------------------------------------------------------------------------


def _fp8_key(p: Problem) -> str:
    from groupbench.kernels.grouped_gemm.tuned import problem_key

    return problem_key(p.s.M, p.s.G, p.s.N, p.s.K, p.variant)


def _fp8_default(p: Problem) -> Any:
    from groupbench.kernels.grouped_gemm.tuned import first_legal

    configs = p.k.configs_for(p.variant, p.s.M, p.s.G, p.s.N, p.s.K, p.device)
    return first_legal([c for c in configs if c[0] != "tuned" and (p.device.hopper or not c[1].specialized)])


def _fp8(p: Problem, config: Any) -> Run:
    x, fast = p.x, p.variant == "rowwise_fast"
    run: Run = p.k.prepare_fp8(x.a, x.scale_a, x.b, x.scale_b, x.offs, fast_accum=fast, config=config)
    return run


def _cluster_fp8(p: Problem, config: Any) -> Run:
    run: Run = p.k.prepare_cluster_fp8(p.x.a, p.x.scale_a, p.x.b, p.x.scale_b, p.x.offs, config)
    return run


# --- weights of four bits ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # all configs of a problem take the same
def _blocks(x: Any, fp8: bool) -> Any:
    from groupbench.kernels.four_bit.layout import lay_out

    return lay_out(x.weights, fp8)


def _w4_fp8(p: Problem) -> bool:
    return p.variant == "a8"


def _w4_hopper(p: Problem, config: Any) -> Run:
    from groupbench.kernels.four_bit.hopper import bind_hopper

    x = p.x
    run = bind_hopper(x.a, x.scale_a, _blocks(x, _w4_fp8(p)), x.offs, x.bias, config)
    return lambda: run(x.a, x.scale_a, x.offs)


_W4 = (("a16", "grouped_gemm_w4a16"), ("a8", "grouped_gemm_w4a8"))


# --- Helion -----------------------------------------------------------------------------------------------------------


def _helion_default(p: Problem) -> Any:
    from groupbench.kernels.helion_configs import fit

    return fit(p.k.CHOICES.default(p.x.a, p.rows), p.dtype, p.device)


def _helion(
    module: str,
    run: Callable[[Problem, Any], Run],
    order: tuple[int, int, int],
    operator: str = "grouped_gemm",
    about: str = "",
) -> Tunable:
    """Return the row of a Helion kernel of `grouped_gemm`; `order` goes to `neighbours.helion_grid`."""
    return Tunable(
        about or module,
        operator,
        f"grouped_gemm.{module}",
        default=_helion_default,
        choices=lambda p: neighbours.helion_grid(_helion_default(p), order),
        run=run,
        illegal=_helion_illegal,
        in_helion=True,
    )


def _helion_illegal(p: Problem, config: Any) -> str | None:
    from groupbench.kernels.helion_configs import illegal

    return illegal(config, p.dtype, p.device)


# --- MoE --------------------------------------------------------------------------------------------------------------


def config_key(x: Any) -> str:
    """Return the tuned-config key of lists of products."""
    from groupbench.kernels.grouped_gemm import mnk

    return mnk.config_key(x.a, x.b)


def _gate_up_key(p: Problem) -> str:
    from groupbench.kernels.grouped_gemm.tuned import tuning_key

    return tuning_key(p.s.choices, p.s.G, 2 * p.s.F, p.s.H, p.dtype, nk=True)


def _gate_up(p: Problem, config: Any) -> Run:
    """Time the product for inference and the one for training together."""
    from groupbench.kernels.moe.permute import spread_rows
    from groupbench.kernels.moe.routing import route

    routing = route(p.x.ids, p.s.G)
    rows = spread_rows(p.x.x, routing.position)
    return lambda: [p.k.gate_up(rows, p.x.w_gate_up, routing.offs, save, config) for save in (False, True)]


KERNELS = {
    "flat": Tunable(
        "triton_flat",
        "grouped_gemm",
        "grouped_gemm.flat",
        default=lambda p: p.k.default_config(p.s.M, p.s.G, p.dtype, p.device),
        choices=lambda p: p.k.candidates(p.rows),
        run=_forward("prepare_flat"),
    ),
    "cluster": Tunable(
        "cuda_cluster",
        "grouped_gemm",
        "grouped_gemm.cluster",
        default=lambda p: p.k.default_config(p.s.M, p.s.G, p.s.N, p.s.K, p.device),
        choices=_cluster_tiles,
        run=_forward("prepare_cluster"),
    ),
    "cluster_wgrad": Tunable(
        "cuda_cluster, the gradient of the weights",
        "grouped_gemm_wgrad",
        "grouped_gemm.cluster_wgrad",
        default=lambda p: p.k.default_config(p.s.M, p.s.G, p.s.N, p.s.K, p.device, p.x.nk),
        choices=lambda p: p.k.candidates(),
        run=_wgrad("prepare_cluster_wgrad"),
    ),
    "wgrad": Tunable(
        "triton_flat, the gradient of the weights",
        "grouped_gemm_wgrad",
        "grouped_gemm.wgrad",
        default=lambda p: p.k.default_config(p.s.M, p.s.G, p.s.N, p.s.K, p.dtype, p.device),
        choices=lambda p: [c for c in p.k.candidates(p.rows) if not c.dynamic or p.s.G <= p.k.MOST_RANKED],
        run=_wgrad("prepare_wgrad"),
    ),
    "fp8": Tunable(
        "triton_flat, each recipe",
        "grouped_gemm_fp8",
        "grouped_gemm.fp8",
        default=_fp8_default,
        choices=lambda p: p.k.candidates(p.variant, p.rows),
        run=_fp8,
        illegal=lambda p, config: p.k.illegal(config, p.variant, p.device),
        key=_fp8_key,
        variants=(
            ("rowwise", "grouped_gemm_fp8"),
            ("rowwise_fast", "grouped_gemm_fp8"),
            ("blockwise", "grouped_gemm_fp8_blockwise"),
        ),
    ),
    "cluster_fp8": Tunable(
        "cuda_cluster_fast",
        "grouped_gemm_fp8",
        "grouped_gemm.cluster_fp8",
        default=lambda p: p.k.default_config(p.s.M, p.s.G, p.s.N, p.s.K // 2, p.device),
        choices=_cluster_tiles,
        run=_cluster_fp8,
        key=_fp8_key,
        variants=(("rowwise_fast", "grouped_gemm_fp8"),),
    ),
    "w4": Tunable(
        "triton, with weights of four bits",
        "grouped_gemm_w4a16",
        "four_bit.product",
        default=lambda p: p.k.default_config(p.s.M, p.s.G, p.device),
        choices=lambda p: p.k.candidates(p.rows),
        run=lambda p, config: p.k.prepare_w4(p.x.a, p.x.scale_a, p.x.weights, p.x.offs, p.x.bias, config),
        key=lambda p: p.k.w4_key(p.s.M, p.x.weights, p.dtype),
        variants=_W4,
    ),
    "w4_hopper": Tunable(
        "cuda, with weights of four bits",
        "grouped_gemm_w4a16",
        "four_bit.hopper_config",
        default=lambda p: p.k.default_config(p.s.M, _blocks(p.x, _w4_fp8(p)), False, p.device),
        choices=lambda p: p.k.candidates(p.rows),
        run=_w4_hopper,
        illegal=lambda p, config: p.k.illegal(config, _blocks(p.x, _w4_fp8(p)), False, p.device),
        key=lambda p: p.k.config_key(p.s.M, p.x.weights, _w4_fp8(p)),
        variants=_W4,
    ),
    "worklist": Tunable(
        "helion_worklist",
        "grouped_gemm",
        "grouped_gemm.helion_worklist",
        default=lambda p: p.k.default_config(p.s.M, p.s.G, p.s.N, p.dtype, p.device),
        choices=lambda p: p.k.candidates(p.rows, p.s.K),
        run=_forward("prepare_helion_worklist"),
    ),
    "helion_jagged": _helion("helion_jagged", _forward("prepare_helion_jagged"), (1, 0, 2)),
    "helion_persistent": _helion("helion_persistent", _forward("prepare_helion_persistent"), (0, 1, 2)),
    "helion_wgrad": _helion(
        *("helion_wgrad", _wgrad("prepare_helion_wgrad"), (0, 1, 2)),
        operator="grouped_gemm_wgrad",
        about="helion_jagged, the gradient of the weights",
    ),
    "mnk_helion": Tunable(
        "helion_pointers",
        "grouped_gemm_mnk",
        "grouped_gemm.mnk_helion",
        default=lambda p: p.k.default_config(p.x.a[0].device, p.dtype),
        choices=lambda p: neighbours.helion_grid(p.k.default_config(p.x.a[0].device, p.dtype), (0, 1, 2)),
        run=lambda p, config: p.k.prepare_mnk_helion(p.x.a, p.x.b, config),
        illegal=_helion_illegal,
        key=lambda p: config_key(p.x),
        operand=lambda x: x.a[0],
        in_helion=True,
    ),
    "cluster_mnk": Tunable(
        "cuda_cluster of lists",
        "grouped_gemm_mnk",
        "grouped_gemm.mnk_cluster",
        default=lambda p: p.k.default_config(p.x.a, p.x.b, p.device),
        choices=lambda p: p.k.candidates(),
        run=lambda p, config: p.k.prepare_mnk_cluster(p.x.a, p.x.b, config),
        key=lambda p: config_key(p.x),
        operand=lambda x: x.a[0],
    ),
    "gate_up": Tunable(
        "the first product",
        "moe_layer",
        "moe.gate_up",
        default=lambda p: p.k.default_config(p.s.choices, p.s.G, p.s.F, p.s.H, p.dtype, p.device),
        choices=lambda p: p.k.candidates(p.s.choices / p.s.G),
        run=_gate_up,
        key=_gate_up_key,
        operand=lambda x: x.x,
    ),
    "bias_add_permute": Tunable(
        "triton_fused, its plain kernel",
        "grouped_gemm_bias_add_permute",
        "bias_add_permute.fused",
        default=lambda p: next(c for name, c, _ in p.k.configs_for(p.x.groups, p.x.op, p.device) if name == "default"),
        choices=lambda p: p.k.candidates(p.x.op),
        run=lambda p, config: p.k.prepare_fused(p.x.groups, p.x.op, config),
        illegal=lambda p, config: p.k.illegal(config, p.dtype, p.x.op, p.device),
        key=lambda p: p.k.config_key(p.x.groups, p.x.op),
        operand=lambda x: x.groups[0].a,
    ),
    "split_k": Tunable(
        "triton_fixup, its tiled kernel",
        "split_k_matmul",
        "split_k.tiled",
        default=lambda p: p.k.default_config(p.s.M, p.s.N, p.s.K, p.dtype, p.device),
        choices=lambda p: neighbours.split_k(p.s.M, p.s.N, p.s.K, p.dtype, p.device),
        run=lambda p, config: p.k.prepare_fixup(p.x.a, p.x.b, config),
        illegal=lambda p, config: p.k.illegal(config, p.s.K, p.dtype, p.device),
        key=lambda p: p.k.config_key(p.s.M, p.s.N, p.s.K, p.dtype),
    ),
    "helion_barrier": Tunable(
        "helion_barrier, its split_k",
        "split_k_matmul",
        "split_k.helion_barrier",
        default=lambda p: p.k.default_config(p.s.M, p.s.N, p.s.K, p.dtype, p.device),
        choices=lambda p: neighbours.helion_splits(
            p.k.default_config(p.s.M, p.s.N, p.s.K, p.dtype, p.device), 2 * p.s.K
        ),
        run=lambda p, config: p.k.prepare_barrier(p.x.a, p.x.b, config),
        illegal=lambda p, config: None,
        in_helion=True,
        key=lambda p: p.k.config_key(p.s.M, p.s.N, p.s.K, p.dtype),
    ),
}
