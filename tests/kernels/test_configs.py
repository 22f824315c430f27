"""Test which configs of grouped products are legal, and which an untuned problem takes, the preferred one first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import helion
import pytest
import torch
from grouped import LOCKSTEP, LONG, LONGEST, NARROW, SHORT, SPECIALIZED, TALLER, UNEVEN, UNTUNED

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import cluster, cluster_fp8, cluster_tiles, cluster_wgrad, flat, fp8, wgrad
from groupbench.kernels.grouped_gemm import helion_worklist as worklist
from groupbench.kernels.grouped_gemm.quantize import E4M3
from groupbench.kernels.grouped_gemm.tuned import problem_key, tuned_configs, tuning_key
from groupbench.kernels.moe import gate_up

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H100 = KNOWN["sm_90"]
ROWS = (1, 4, 8, 16, 17, 64, 65, 96, 97, 300, 1200, 2000, 5000)
"""Rows of a group on average."""


# --- legal ones -------------------------------------------------------------------------------------------------------


def on_h100(illegal: Callable[..., str | None]) -> Callable[..., str | None]:
    return partial(illegal, device=H100)


def plain(configs: Iterable[Any]) -> list[Any]:
    return [config for config in configs if not config.specialized]


def listed(candidates: Callable[..., list[Any]], *of: Any) -> list[Any]:
    return [config for rows in ROWS for config in candidates(*of, rows)]


LEGAL: dict[str, tuple[Callable[..., str | None], list[Any], Any]] = {
    "flat": (flat.illegal, listed(flat.candidates), BF16),
    "wgrad": (wgrad.illegal, listed(wgrad.candidates), BF16),
    "wgrad_on_hopper": (on_h100(wgrad.illegal), [c for c in wgrad.candidates(300) if c.specialized], BF16),
    "gate_up": (gate_up.illegal, listed(gate_up.candidates), BF16),
    "gate_up_of_flat": (gate_up.illegal, list(map(gate_up.from_flat, plain(listed(flat.candidates)))), FP16),
    "worklist": (
        worklist.illegal,
        [c for K in (768, 2880, 7168) for r in ROWS for c in worklist.candidates(r, K)],
        BF16,
    ),
    "cluster": (on_h100(cluster.illegal), cluster_tiles.candidates(), BF16),
    "cluster_fp8": (on_h100(cluster.illegal), cluster_tiles.candidates(), E4M3),
    "cluster_wgrad": (on_h100(cluster_wgrad.illegal), cluster_wgrad.candidates(), BF16),
    **{f"fp8_{m}": (fp8.illegal, [*fp8.CONFIGS[m].values(), *listed(fp8.candidates, m)], m) for m in fp8.MODES},
    **{
        f"{module.__name__.rpartition('.')[2]}_{name}": (module.illegal, [config], FP32 if name == "fp32" else FP16)
        for module in (wgrad, gate_up)
        for name, config in module.CONFIGS.items()
    },
}


@pytest.mark.parametrize("name", LEGAL)
def test_candidates_and_defaults_are_legal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgrad, "TRITON", (3, 8))  # for a later one, a tuner skips configs that do not fit
    illegal, configs, of = LEGAL[name]
    assert configs
    assert {config: reason for config in configs if (reason := illegal(config, of))} == {}


@pytest.mark.parametrize("K", [768, 2880, 7168])
@pytest.mark.parametrize("mean_rows", ROWS)
def test_candidates_are_distinct(mean_rows: int, K: int) -> None:
    for configs in (gate_up.candidates(mean_rows), worklist.candidates(mean_rows, K)):
        assert len(set(configs)) == len(configs)
    assert all(isinstance(config.to_helion(tma=True), helion.Config) for config in configs)


@pytest.mark.parametrize("kernel", ["flat", "wgrad", "fp8", "worklist"])
def test_tuned_configs_are_legal(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgrad, "TRITON", (3, 6))  # with which they were tuned
    make: Any = {
        "flat": lambda values: flat.FlatConfig(**values),
        "wgrad": lambda values: wgrad.WgradConfig(**values),
        "fp8": lambda values: fp8.Fp8Config(**values),
        "worklist": worklist.config_from,
    }[kernel]
    configs = {key: make(values) for key, values in tuned_configs(kernel, H100.name).items()}
    assert configs
    for key, config in configs.items():
        of = key.rpartition(",")[2] if kernel == "fp8" else BF16
        assert LEGAL[kernel if kernel != "fp8" else "fp8_rowwise"][0](config, of) is None, key
        assert make(json.loads(json.dumps(asdict(config)))) == config


LARGE = {module: module.CONFIGS["large"] for module in (flat, wgrad, gate_up, worklist)}
FAST = fp8.CONFIGS[fp8.ROWWISE_FAST]["plain"]
ILLEGAL: dict[str, tuple[Callable[..., str | None], Any, Any, list[tuple[dict[str, Any], str]]]] = {
    "flat": (flat.illegal, LARGE[flat], FP16, [
        ({"block_m": 48}, "a power of two"), ({"num_stages": 5}, "bytes"), ({"split_store": False}, "output tile"),
        ({"swap": True}, "stored whole"), ({"halves": True}, "do not flatten"), ({"per_sm": 2}, "bytes"),
    ]),
    "flat_specialized": (flat.illegal, SPECIALIZED, BF16, [
        ({"block_m": 256}, "128 x 256 x 64"), ({"num_stages": 3}, "in 4 stages"), ({"swap": True}, "no swap"),
        ({"num_warps": 8}, "groups of 4 warps"), ({"per_sm": 2}, "one program per SM"), ({"halves": True}, "no swap"),
        ({"lockstep": 3}, "lockstep must be 0, or at least 4"),
    ]),
    "flat_in_fp32": (on_h100(flat.illegal), SPECIALIZED, FP32, [({}, "float32")]),
    "flat_on_ampere": (partial(flat.illegal, device=KNOWN["sm_80"]), SPECIALIZED, BF16, [({}, "sm_80")]),
    "wgrad": (wgrad.illegal, LARGE[wgrad], FP16, [
        ({"block_p": 48}, "block_p=48: tl.dot needs a power of two"), ({"num_stages": 5}, "bytes"),
        ({"block_m": 8}, "block_m=8: tl.dot needs a power of two"), ({"split_store": False}, "output tile"),
        ({"per_sm": 2}, "output tile"),
    ]),
    "wgrad_lockstep": (wgrad.illegal, LOCKSTEP, BF16, [
        ({"block_p": 256}, "128 x 256"), ({"block_p": 192}, "192 x 256 in 6"), ({"num_stages": 3}, "4 stages of 64"),
        ({"num_warps": 8}, "groups of 4 warps"), ({"lockstep": 3}, "lockstep must be 0, or at least 4"),
    ]),
    "wgrad_uneven": (wgrad.illegal, UNEVEN, BF16, [
        ({"per_sm": 2}, "one program per SM"), ({"split_store": True}, "no split_store"),
        ({"lockstep": 16}, "static schedule"),
    ]),
    "wgrad_in_fp32": (on_h100(wgrad.illegal), LOCKSTEP, FP32, [({}, "float32")]),
    "wgrad_on_ampere": (partial(wgrad.illegal, device=KNOWN["sm_80"]), LOCKSTEP, BF16, [({}, "sm_80")]),
    "gate_up": (gate_up.illegal, LARGE[gate_up], FP32, [({}, "bytes"), ({"block_f": 48}, "a power of two")]),
    "worklist": (worklist.illegal, LARGE[worklist], BF16, [({"num_stages": 6}, "bytes")]),
    "fp8_fast": (fp8.illegal, FAST, fp8.ROWWISE_FAST, [
        ({"block_m": 48}, "a power of two"), ({"num_stages": 5}, "bytes"), ({"split_store": False}, "output tile"),
        ({"swap": True}, "stored whole"), ({"per_sm": 2}, "bytes"),
    ]),
    "fp8": (fp8.illegal, FAST, fp8.ROWWISE, [({"specialized": True}, "128 x 256 x 128"), ({"block_k": 64}, "every")]),
    "fp8_blockwise": (fp8.illegal, FAST, fp8.BLOCKWISE, [({}, "one scale of the weights")]),
    "cluster": (on_h100(cluster_tiles.illegal), LONG, FP16, [
        ({"stages": 5}, "5 stages and 2 buffers take"), ({"rows": 96}, "a tile of 96 x 256"),
        ({"rows": 128, "columns": 96}, "a tile of 128 x 96"), ({"rows": 256}, "2 parts of 256 columns do not fit"),
        ({"rows": 320, "columns": 64, "in_turns": True}, "5 parts of 64 columns do not fit"),
        ({"shared": "both"}, "not 'both'"), ({"buffers": 4}, "bytes of"), ({"group_m": 0}, "at least 1"),
        ({"lockstep": 3}, "lockstep must be 0, or at least 4"), ({"from_end": 8}, "from_end is 0 to 7"),
    ]),
    "cluster_in_fp32": (on_h100(cluster_tiles.illegal), LONG, FP32, [({}, "not torch.float32")]),
    "cluster_on_ampere": (partial(cluster.illegal, device=KNOWN["sm_80"]), LONG, BF16, [({}, "sm_80")]),
    "cluster_from_end": (on_h100(cluster.illegal), LONG, BF16, [({"from_end": 1}, "from_end has no use")]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("illegal", "config", "of", "text"),
    [
        pytest.param(illegal, replace(config, **change), of, text, id=f"{name}-{text}")
        for name, (illegal, config, of, changes) in ILLEGAL.items()
        for change, text in changes
    ],
)
def test_illegal_configs_have_a_reason(illegal: Any, config: Any, of: Any, text: str) -> None:
    assert text in str(illegal(config, of))


@pytest.mark.parametrize(("triton_version", "legal"), [((3, 8), True), ((3, 9), False)], ids=["3.8", "3.9"])
def test_a_dynamic_schedule_shares_memory_up_to_triton_3_8(triton_version, legal, monkeypatch) -> None:
    monkeypatch.setattr(wgrad, "TRITON", triton_version)
    config = replace(wgrad.CONFIGS["large"], split_store=False, dynamic=True)
    assert (wgrad.illegal(config, FP16) is None) == legal


# --- choices ----------------------------------------------------------------------------------------------------------

KINDS = {LOCKSTEP: "lockstep", UNEVEN: "uneven", TALLER: "taller"}


@pytest.mark.parametrize(
    ("module", "problem", "of", "arch", "expected"),
    [
        (flat, (32768, 8, 4096, 7000), BF16, "sm_90", "specialized"),
        (flat, (32768, 8, 4096, 7000), FP16, "sm_90", "specialized"),
        (flat, (32768, 8, 4096, 7000), BF16, "sm_80", ""),
        (flat, (32768, 8, 4096, 7000), BF16, "sm_100", ""),
        (flat, (32768, 8, 4096, 7000), FP32, "sm_90", ""),
        (flat, (424, 8, 4096, 7000), BF16, "sm_90", ""),  # 64 rows hold nearly every expert
        (wgrad, (32768, 8, 4096, 4096), BF16, "sm_90", "lockstep"),
        (wgrad, (32768, 8, 4096, 4096), FP16, "sm_90", "lockstep"),
        (wgrad, (8192, 8, 4096, 4096), BF16, "sm_90", "uneven"),
        (wgrad, (32768, 8, 5760, 5760), BF16, "sm_90", "taller"),
        (wgrad, (8192, 8, 5760, 5760), BF16, "sm_90", "uneven"),
        (wgrad, (32768, 8, 4096, 4096), BF16, "sm_80", ""),
        (wgrad, (32768, 8, 4096, 4096), BF16, "sm_100", ""),
        (wgrad, (32768, 8, 4096, 4096), FP32, "sm_90", ""),
        (wgrad, (256, 8, 4096, 4096), BF16, "sm_90", ""),  # 32 rows a group
    ],
)
def test_large_products_prefer_specialised_warps_and_fall_back(module, problem, of, arch, expected) -> None:
    configs = module.configs_for(*problem, of, replace(KNOWN[arch], name="untuned"), nk=True)
    kinds = [KINDS.get(c, "specialized") if c.specialized else "plain" for _, c, reason in configs if reason is None]
    assert kinds[0] == (expected or "plain")
    assert kinds[-1] == "plain", "if Gluon fails"


def test_small_groups_have_no_specialised_candidates() -> None:
    assert not any(config.specialized for config in wgrad.candidates(4)), "writing the gradient takes the time"


def test_experts_whose_weights_take_longer_to_read_than_to_multiply_keep_the_plain_kernel() -> None:
    gpus = UNTUNED, replace(UNTUNED, gb_per_s=4917), replace(UNTUNED, gb_per_s=0)  # an H100, an H200, unknown
    preferred = [flat.configs_for(65536, 256, 4096, 7168, BF16, gpu, nk=True)[0][1].specialized for gpu in gpus]
    assert preferred == [False, True, False]


def test_gate_up_derives_its_config_from_the_plain_kernel() -> None:
    chosen = gate_up.default_config(65536, 8, 4096, 7000, BF16, UNTUNED)
    assert chosen == gate_up.from_flat(flat.default_config(65536, 8, BF16, UNTUNED))
    assert gate_up.from_flat(flat.FlatConfig(16, 64, 128, 4, 5, swap=True)).block_f == 64, "wgmma needs 64 rows"


@pytest.mark.parametrize(("N", "columns"), [(2880, 192), (4096, 256), (5760, 256), (2304, 256)])
def test_tiles_of_192_columns_are_for_sizes_that_leave_wider_ones_mostly_empty(N: int, columns: int) -> None:
    assert flat.choose_config(65536, 8, N, 7000, BF16, UNTUNED, nk=True).block_n == columns


@pytest.mark.parametrize("G", [1, 8, 256, wgrad.MOST_RANKED + 1])
@pytest.mark.parametrize("mean_rows", [1, 200, 4000])
@pytest.mark.parametrize("of", [BF16, FP32], ids=["bf16", "fp32"])
def test_the_config_chosen_for_a_gradient_can_run(G: int, mean_rows: int, of: torch.dtype) -> None:
    config = wgrad.choose_config(G * mean_rows, G, 4096, 2048, of, UNTUNED, nk=True)
    assert wgrad.illegal(config, of) is None
    assert not (config.dynamic and G > wgrad.MOST_RANKED)


of_cluster_fp8 = partial(cluster_fp8.choose_config, N=4096, device=UNTUNED)
of_cluster_wgrad = partial(cluster_wgrad.choose_config, N=4096, dtype=BF16, device=UNTUNED, nk=True)
of_worklist = partial(worklist.choose_config, dtype=BF16, device=UNTUNED)


@pytest.mark.parametrize(
    ("choose", "problem", "expected"),
    [
        (of_cluster_fp8, {"M": 32768, "G": 8, "K": 16384}, LONGEST),
        (of_cluster_fp8, {"M": 32768, "G": 8, "K": 3584}, SHORT),
        (of_cluster_wgrad, {"M": 65536, "G": 8, "K": 7168}, LONGEST),
        (of_cluster_wgrad, {"M": 65536, "G": 128, "K": 7168}, NARROW),
        (of_worklist, {"G": 4, "M": 64, "N": 1024, "K": 1024}, worklist.CONFIGS["decode"]),
        (of_worklist, {"G": 4, "M": 1024, "N": 1024, "K": 1024}, worklist.CONFIGS["medium"]),
        (of_worklist, {"G": 256, "M": 1024, "N": 4096, "K": 7168}, worklist.CONFIGS["decode"]),
        (of_worklist, {"G": 128, "M": 4096, "N": 1536, "K": 2048}, worklist.CONFIGS["decode_32"]),
        (of_worklist, {"G": 128, "M": 8192, "N": 1536, "K": 2048}, worklist.CONFIGS["small"]),
        (of_worklist, {"G": 4, "M": 32768, "N": 4096, "K": 7168}, worklist.CONFIGS["large"]),
    ],
)
def test_an_untuned_problem_takes_a_default(choose: Any, problem: dict[str, int], expected: Any) -> None:
    assert choose(**problem) == expected
    assert choose is not of_worklist or problem["K"] % expected.block_k == 0


def test_tuned_configs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    values = tuned_configs("flat", H100.name)[tuning_key(4096, 4, 1024, 1024, BF16, nk=False)]
    assert flat.choose_config(4000, 4, 1024, 1024, BF16, H100, nk=False) == flat.FlatConfig(**values)
    tuned = fp8.Fp8Config(64, 64, 128, 4, 3)
    monkeypatch.setattr(
        "groupbench.kernels.grouped_gemm.tuned.tuned_configs",
        lambda kernel, gpu: {problem_key(1000, 4, 128, 256, fp8.ROWWISE): asdict(tuned)},
    )
    assert fp8.choose_config(fp8.ROWWISE, 900, 4, 128, 256, H100) == tuned
    assert fp8.choose_config(fp8.ROWWISE_FAST, 900, 4, 128, 256, H100) == fp8.CONFIGS[fp8.ROWWISE_FAST]["large"]


def test_settings_of_a_search_override_the_fields() -> None:
    config = replace(worklist.CONFIGS["large"], helion=(("num_warps", 4), ("l2_groupings", [1])))
    assert config.to_helion(tma=False)["num_warps"] == 4
    assert config.to_helion(tma=True)["host_tensor_descriptors"] is True
