"""Products with four-bit weights: formats, layout, the Triton kernel, the kernel for Hopper, packing, experts."""

from __future__ import annotations

import gzip
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from grouped import DEVICE, HOPPER, NO_HOPPER
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from groupbench.kernels.device import KNOWN, device_of
from groupbench.kernels.four_bit import formats, hopper, hopper_config, layer, layout, product
from groupbench.kernels.four_bit.formats import E2M1, MXFP4, NAN, Weights, parse_format
from groupbench.kernels.four_bit.hopper_config import HopperConfig, default_config, illegal
from groupbench.kernels.four_bit.quantize import prepare_quantize_w4
from groupbench.kernels.grouped_gemm import quantize as fp8
from groupbench.kernels.ops import transformers

HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
H100 = KNOWN["sm_90"]
H200 = replace(H100, name="NVIDIA H200", gb_per_s=4800)
FORMATS = ("mxfp4", "int4(32)", "int4(64,zp)", "int4(128)", "int4(128,zp)", "int4(192)")
GROUPS = {"empty": (0, 5, 0, 17), "one_row": (1, 0), "one_group": (19,), "several_tiles": (33, 2)}
CONFIGS = (
    HopperConfig(8, depth=2, stages=3, per_sm=2), HopperConfig(16, depth=4, stages=2, per_sm=2),
    HopperConfig(32, depth=1, stages=4), HopperConfig(64, depth=2, stages=3, per_sm=2),
    HopperConfig(64, 2, stages=4), HopperConfig(128, stages=4), HopperConfig(192, stages=3),
    HopperConfig(256, stages=3), HopperConfig(32, 2, depth=2, stages=2, workers=4),
    HopperConfig(16, depth=3, workers=6), HopperConfig(96, stages=3, workers=3),
    HopperConfig(32, depth=4, stages=2, per_sm=2, workers=3),
)  # fmt: skip


def weights_of(fmt: str, G: int, N: int, K: int, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return on(formats.quantize_reference(torch.randn(G, N, K, generator=generator), parse_format(fmt)))


def on(w: Weights) -> Weights:
    moved = (None if part is None else part.to(DEVICE) for part in (w.codes, w.scales, w.zeros))
    return Weights(w.fmt, w.K, *moved)


def activations(M: int, K: int, recipe: str) -> tuple[Tensor, Tensor | None]:
    a = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).to(HALF).to(DEVICE)
    if recipe == "a16":
        return a, None
    q, scale = (fp8.quantize_rows_reference if recipe == "rows" else fp8.quantize_blocks_reference)(a.float())
    padded = fp8.empty_fp8(M, K, DEVICE)
    padded.copy_(q)
    if scale.ndim == 2:
        scale = torch.empty(scale.shape[::-1], device=DEVICE).t().copy_(scale)
    return padded, scale


def check_product(out: Tensor, expected: Tensor, limit: float = 4e-3) -> None:
    assert torch.equal(out.isnan(), expected.isnan())
    out, expected = out.double().nan_to_num(0), expected.nan_to_num(0)
    assert float((out - expected).norm()) <= limit * float(expected.norm())


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", FORMATS)
def test_a_format_is_its_text(text):
    assert str(parse_format(text)) == text


@pytest.mark.parametrize("text", ["fp4", "int4", "int4(0)", "int4(16)", "int4(96)", "int4(128,z)", "int4(-64)"])
def test_other_formats_are_refused(text):
    with pytest.raises(ValueError, match="is not mxfp4"):
        parse_format(text)


def test_values_of_mxfp4_are_exact():
    codes = formats.pack(torch.arange(16).repeat(2).view(1, 1, 32))
    for scale, factor in ((127, 1.0), (0, 2.0**-127), (254, 2.0**127), (NAN, float("nan"))):
        w = Weights(MXFP4, 32, codes, torch.full((1, 1, 1), scale, dtype=torch.uint8))
        expected = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64) * factor
        assert torch.equal(formats.dequantize(w)[0, 0, :16].nan_to_num(9), expected.nan_to_num(9))


def test_values_of_integers_have_a_zero_point():
    codes = formats.pack(torch.arange(16).repeat(2).view(1, 1, 32))
    scale = torch.full((1, 1, 1), 0.5, dtype=torch.bfloat16)
    w = Weights(parse_format("int4(32)"), 32, codes, scale)
    assert torch.equal(formats.dequantize(w)[0, 0, :16], (torch.arange(16.0) - 8).double() / 2)
    w = Weights(parse_format("int4(32,zp)"), 32, codes, scale, torch.full((1, 1, 1), 3, dtype=torch.uint8))
    assert torch.equal(formats.dequantize(w)[0, 0, :16], (torch.arange(16.0) - 3).double() / 2)


def test_e2m1_rounds_to_nearest_and_ties_to_even():
    x = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 9.0, -0.75, -6.0])
    assert formats.nearest_e2m1(x).tolist() == [0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 10, 15]


def test_weights_that_do_not_fit_together_are_refused():
    w = weights_of("mxfp4", 1, 2, 64)
    with pytest.raises(ValueError, match="need scales"):
        replace(w, scales=w.scales[..., :1])
    with pytest.raises(ValueError, match="codes of uint8"):
        replace(w, codes=w.codes.int())


@pytest.mark.parametrize("text", FORMATS)
def test_packing_gives_the_codes_of_the_reference(text):
    x = torch.randn(2, 20, 361, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[0, 0], x[0, 1], x[0, 2], x[1, 3, 0], x[1, 4, 5] = 0, 2.0**-100, 2.0**100, float("nan"), float("inf")
    expected, got = formats.quantize_reference(x, parse_format(text)), prepare_quantize_w4(x, parse_format(text))()
    assert torch.equal(got.scales.float().nan_to_num(9), expected.scales.float().nan_to_num(9))
    values, wanted = (formats.dequantize(w) for w in (got, expected))
    assert torch.equal(values.isnan(), wanted.isnan())
    assert (values != wanted).logical_and(~wanted.isnan()).float().mean() <= (0 if text == "mxfp4" else 1e-3)


# --- the Triton kernel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["a16", "rows", "blocks"])
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("groups", GROUPS)
def test_the_product_matches_the_reference(groups, text, recipe):
    rows, K = GROUPS[groups], 361 if groups == "empty" else 256
    w = weights_of(text, len(rows), 100, K)
    if text == "mxfp4":
        w.scales[0, 3, 2] = NAN
    a, scale = activations(sum(rows) + 2, K, recipe)
    offs = torch.tensor(rows, device=DEVICE).cumsum(0).int()
    bias = torch.randn(len(rows), 100, device=DEVICE, dtype=HALF) if groups != "one_row" else None
    out = product.prepare_w4(a, scale, w, offs, bias)()
    assert out.dtype == (HALF if scale is None else torch.bfloat16)
    assert not out[sum(rows) :].any()
    check_product(out, formats.grouped_gemm_w4_reference(a, scale, w, offs, bias))


def test_many_groups():
    G = 896
    w = weights_of("mxfp4", G, 8, 32)
    rows = torch.arange(G) % 5 == 0
    offs = rows.cumsum(0).int().to(DEVICE)
    a, _ = activations(int(rows.sum()), 32, "a16")
    expected = formats.grouped_gemm_w4_reference(a, None, w, offs)
    check_product(product.prepare_w4(a, None, w, offs)(), expected)
    if HOPPER:
        check_product(hopper.prepare_hopper(a, None, w, offs)(), expected)


def test_operands_that_do_not_fit_together_are_refused():
    w, offs = weights_of("mxfp4", 2, 16, 64), torch.tensor([1, 3], device=DEVICE, dtype=torch.int32)
    a, scale = activations(3, 64, "rows")
    with pytest.raises(ValueError, match="expected a"):
        product.prepare_w4(a[:, :32].to(HALF), None, w, offs)
    with pytest.raises(ValueError, match="fp32 scales"):
        product.prepare_w4(a, scale[:2], w, offs)
    with pytest.raises(ValueError, match="expected bias"):
        product.prepare_w4(a, scale, w, offs, torch.zeros(2, 8, device=DEVICE))
    with pytest.raises(ValueError, match="must be contiguous"):
        product.prepare_w4(a, scale, replace(w, codes=w.codes.mT.contiguous().mT), offs)


# --- the layout for Hopper --------------------------------------------------------------------------------------------


def values_in_registers(b: layout.Blocks) -> Tensor:
    """Return the weights as the kernel makes them from the blocks, [G, N, K] fp64: an emulation of four_bit.cu."""
    groups, step = b.groups, layout.block_k(b.fp8)
    size = 64 * step // 2
    G, nb, kb, _ = b.blocks.shape
    words = b.blocks[..., :size].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    rest = b.blocks[..., size:]
    out = torch.zeros(G, nb, 64, kb, step, dtype=torch.float64)
    warp, r, c = torch.meshgrid(torch.arange(4), torch.arange(8), torch.arange(4), indexing="ij")
    row = 16 * warp + r
    words = words.view(G, nb, kb, 4, 8, 4, -1)
    table = None if b.table is None else b.table.view(torch.float8_e4m3fn).double()
    both = [words[..., i] & 0x06030603 | rotated(words[..., i + 1], 2) & 0xF9FCF9FC for i in (0, 2)]
    last = [rotated(both[i // 2], 12 if i % 2 else 6) for i in range(4)]  # registers
    for i in range(4):
        for half in (0, 1):
            for k_half in (0, 1):
                for value in range(4 if b.fp8 else 2):
                    if b.fp8:
                        w, at = words[..., 2 * i + half], 4 * k_half + value
                        code = w >> 4 * at & 7 | (w >> 8 * value + (3 if k_half else 7) & 1) << 3
                        if not (b.fmt.floating or b.fmt.zero_point):
                            nibble = w >> 8 * value + 4 * k_half & 15
                            code = torch.where(nibble & 1 == 1, 7 - (nibble >> 1), 8 + (nibble >> 1))
                        k = 32 * i + 16 * k_half + 4 * c + value
                    else:
                        register = half + 2 * k_half
                        code = words[..., i] >> 16 * value + 4 * register & 15
                        if b.fmt.floating:
                            w = last[i] if register == 3 else rotated(words[..., i], (0, 4, 10)[register])
                            code = w >> 16 * value + 12 & 8 | w >> 16 * value + 6 & 7
                        k = 16 * i + 8 * k_half + 2 * c + value
                    group = i * groups // 4
                    value_of = _scaled(b, rest, code, half, group, table)
                    out[:, :, row + 8 * half, :, k] = value_of.permute(3, 4, 5, 0, 1, 2)
    out = out.flatten(1, 2).flatten(2)[:, : b.N, : b.K]
    return out if b.factors is None else out * b.factors[:, : b.N, None].double()


def rotated(words: Tensor, left: int) -> Tensor:
    return (words << left | words >> 32 - left) & 0xFFFFFFFF


def _scaled(b: layout.Blocks, rest: Tensor, code: Tensor, half: int, group: int, table: Tensor | None) -> Tensor:
    """Return the values of codes [G, blocks, blocks, warp, row, thread]."""
    shape = code.shape
    if b.fmt.floating:
        order = (4, 8, 2, 2) if not b.fp8 else (b.groups, 4, 8, 2)
        scale = rest.view(*shape[:3], *order)
        scale = (scale[..., half, group] if not b.fp8 else scale[..., group, :, :, half])[..., None].long()
        if table is None:
            sign = 1.0 - 2.0 * (code >> 3)
            power = torch.where(scale == 0, 0.0, 2.0 ** (scale - layout.LARGEST).double())  # bf16 of these bits
            return sign * torch.tensor(E2M1, dtype=torch.float64)[code & 7] * power
        return (1.0 - 2.0 * (code >> 3)) * table[scale * 8 + (code & 7)]
    of_scales = rest[..., : b.groups * 128].contiguous().view(torch.bfloat16).view(*shape[:3], b.groups, 4, 8, 2)
    scale = of_scales[..., group, :, :, half][..., None].double()
    zero = torch.full_like(code, 8)
    if b.fmt.zero_point:
        zeros = rest[..., b.groups * 128 :].reshape(*shape[:3], b.groups, 4, 8, 2)
        zero = zeros[..., group, :, :, half][..., None].long().expand(shape)
    return (table[zero * 16 + code] if table is not None else (code - zero).double()) * scale


@pytest.mark.parametrize("of_fp8", [False, True], ids=["a16", "a8"])
@pytest.mark.parametrize("text", FORMATS)
def test_the_layout_keeps_every_value(text, of_fp8):
    w = weights_of(text, 2, 72, 416)
    stored = Weights(w.fmt, 416, *(None if part is None else part.cpu() for part in (w.codes, w.scales, w.zeros)))
    if stored.fmt.floating:
        stored.scales[0, 5, 3], stored.scales[1, 6, 1] = NAN, 118 if of_fp8 else 90
        stored.scales[1, 7] = torch.arange(13) + (120 if of_fp8 else 100)
    values, expected = values_in_registers(layout.lay_out(stored, of_fp8)), formats.dequantize(stored)
    broken = expected.isnan().any(-1)
    assert torch.equal(values.isnan().all(-1), broken)  # a factor that is NaN makes all of a row NaN
    assert torch.equal(values[~broken], expected[~broken])


def test_extreme_scales_stay_exact_for_bf16_and_are_refused_for_fp8():
    w = weights_of("mxfp4", 1, 64, 96)
    w = Weights(MXFP4, 96, w.codes.cpu(), torch.tensor([254, 0, 140], dtype=torch.uint8).expand(1, 64, 3).contiguous())
    values, expected = values_in_registers(layout.lay_out(w, False)), formats.dequantize(w)
    assert torch.equal(values[..., :32], expected[..., :32])
    assert torch.equal(values[..., 64:], expected[..., 64:])
    assert not values[..., 32:64].any()  # 2^254 below the rest of the row
    with pytest.raises(ValueError, match="e4m3 cannot hold"):
        layout.lay_out(w, True)
    w.codes[..., 16:32] = 0  # a group of zeros may have any scale
    w.scales[..., 2] = 245
    assert torch.equal(values_in_registers(layout.lay_out(w, True)), formats.dequantize(w))


def test_packed_bytes_are_counted():
    w = weights_of("int4(128,zp)", 2, 64, 256)
    assert w.nbytes == 2 * 64 * (128 + 2 * 3) == 2 * 64 * w.fmt.row_bytes(256)
    b = layout.lay_out(w, True)
    assert b.nbytes == w.nbytes


# --- the kernel for Hopper --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (HopperConfig(24), "not 24"),
        (HopperConfig(256, 2), "do not fit in its registers"),
        (HopperConfig(192, per_sm=2), "do not fit in its registers"),
        (HopperConfig(16, per_sm=3, workers=3), "on an SM at most 8"),
        (HopperConfig(16, workers=8), "threads at most 1024"),
        (HopperConfig(16, stages=1), "stages at least 2"),
        (HopperConfig(256, stages=8), "bytes of"),
    ],
)
def test_illegal_configs_have_a_reason(config, text):
    b = layout.lay_out(weights_of("mxfp4", 1, 64, 256), False)
    assert text in str(illegal(config, b, False, H100))
    assert "sm_80" in str(illegal(config, b, False, KNOWN["sm_80"]))


TILES = Path(__file__).parents[1] / "data/h200_four_bit.jsonl.gz"


def sized(G, N, K, fmt, fp8):
    """Return blocks without memory, for weights [G, N, K]."""
    one = layout.lay_out(weights_of(fmt, 1, 64, 256), fp8)
    of_block = one.blocks.size(-1)
    number = G * -(-N // 64) * -(-K // layout.block_k(fp8))
    blocks = SimpleNamespace(size=lambda at: of_block, numel=lambda: number * of_block)
    return layout.Blocks(one.fmt, G, N, K, fp8, blocks, None, None)


def test_the_config_taken_is_nearly_the_fastest_measured():
    """h200_four_bit.jsonl.gz has times in us on an H200 (2026-12-01, driver 580.159.04, torch 2.11.0).

    They are medians of five calls in turns, L2 flushed, by rows, blocks, depth, per_sm and workers of a config, and for
    the fastest of about 80 configs.
    """
    ratios = {}
    for line in gzip.decompress(TILES.read_bytes()).splitlines():
        row = json.loads(line)
        b = sized(*(row[name] for name in ("G", "N", "K", "fmt", "fp8")))
        c = default_config(row["M"], b, False, H200)
        us = row["us"].get(f"{c.rows},{c.blocks},{c.depth},{c.per_sm},{c.workers}")
        if us is not None:
            ratios.setdefault((row["fp8"], b.fmt.floating), []).append(us / row["fastest_us"])
    assert sum(map(len, ratios.values())) >= 170
    for of_kind in ratios.values():
        assert statistics.geometric_mean(of_kind) < 1.045
        assert max(of_kind) < 1.3


@pytest.mark.parametrize("fp8_values", [False, True])
@pytest.mark.parametrize("mean_rows", [1, 11, 24, 26, 32, 52, 64, 100, 128, 150, 200])
def test_a_tile_holds_the_rows_of_an_expert(fp8_values, mean_rows):
    b = sized(64, 4096, 4096, "mxfp4", fp8_values)
    assert mean_rows <= default_config(64 * mean_rows, b, False, H200).rows <= max(2.5 * mean_rows, 32)


@given(
    G=st.integers(1, 1024),
    mean_rows=st.sampled_from([1, 2, 20, 26, 40, 48, 150, 512]),
    K=st.sampled_from([32, 2880, 7168]),
    fmt=st.sampled_from(FORMATS),
    recipe=st.sampled_from(["a16", "rows", "blocks"]),
)
def test_every_default_is_legal(G, mean_rows, K, fmt, recipe):
    b = sized(G, 4096, K, fmt, recipe != "a16")
    assert illegal(default_config(G * mean_rows, b, recipe == "blocks", H100), b, recipe == "blocks", H100) is None


@NO_HOPPER
@pytest.mark.parametrize("recipe", ["a16", "rows", "blocks"])
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(
    ("rows", "N", "K"), [((0, 5, 17, 1, 40), 136, 256), ((300, 0, 33), 200, 384), ((3,), 64, 2880)]
)
def test_every_config_gives_the_same_bits(rows, N, K, text, recipe):
    w = weights_of(text, len(rows), N, K)
    if text == "mxfp4":
        w.scales[0, 3, 2] = NAN
    a, scale = activations(sum(rows) + 3, K, recipe)
    offs = torch.tensor(rows, device=DEVICE).cumsum(0).int()
    bias = torch.randn(len(rows), N, device=DEVICE, dtype=torch.bfloat16)
    expected = formats.grouped_gemm_w4_reference(a, scale, w, offs, bias)
    b, first = layout.lay_out(w, recipe != "a16"), None
    for config in CONFIGS:
        if illegal(config, b, recipe == "blocks", device_of(DEVICE)) is None:
            out = hopper.bind_hopper(a, scale, b, offs, bias, config)(a, scale, offs)
            check_product(out, expected, 4e-3 if recipe == "a16" else 8e-3)
            first = out if first is None else first
            assert torch.equal(out.nan_to_num(7), first.nan_to_num(7)), config


@NO_HOPPER
@pytest.mark.parametrize("recipe", ["a16", "rows", "blocks"])
@pytest.mark.parametrize("text", ["mxfp4", "int4(32)", "int4(128,zp)"])
def test_every_default_gives_the_same_bits(text, recipe):
    rows, N, K = (300, 0, 33, 150, 61), 200, 2880
    w, fp8_values = weights_of(text, len(rows), N, K), recipe != "a16"
    a, scale = activations(sum(rows) + 3, K, recipe)
    offs = torch.tensor(rows, device=DEVICE).cumsum(0).int()
    expected = formats.grouped_gemm_w4_reference(a, scale, w, offs, None)
    b, first, device = layout.lay_out(w, fp8_values), None, device_of(DEVICE)
    several = (hopper_config.FEW_ROWS_FP8, hopper_config.MANY_ROWS_FP8)
    if not fp8_values:
        several = (hopper_config.FEW_ROWS, hopper_config.MANY_ROWS)
    for config in (each for configs in several for each in configs):
        for legal in hopper_config._legal(config, b, recipe == "blocks", device):
            out = hopper.bind_hopper(a, scale, b, offs, None, legal)(a, scale, offs)
            check_product(out, expected, 4e-3 if recipe == "a16" else 8e-3)
            first = out if first is None else first
            assert torch.equal(out.nan_to_num(7), first.nan_to_num(7)), legal


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_fp8", [False, True], ids=["a16", "a8"])
@pytest.mark.parametrize(
    ("gate", "text"),
    [(layer.SILU, "int4(32)"), (layer.GPT_OSS, "mxfp4"), (layer.Gate(limit=1.5), "int4(64,zp)")],
    ids=["silu", "gpt_oss", "limit"],
)
def test_experts_match_the_reference(gate, text, of_fp8):
    T, k, G, H, F = 7, 2, 4, 64, 96
    gate_up, down = weights_of(text, G, 2 * F, H), weights_of(text, G, H, F)
    generator = torch.Generator().manual_seed(2)
    bias_up, bias_down = (torch.randn(G, n, generator=generator).to(DEVICE, HALF) for n in (2 * F, H))
    x = torch.randn(T, H, generator=generator).to(DEVICE, HALF)
    ids = torch.randint(-1, G, (T, k), generator=generator).to(DEVICE)
    weights = torch.rand(T, k, generator=generator).to(DEVICE)
    expected = layer.experts_reference(x, ids, weights, gate_up, down, bias_up, bias_down, gate)
    run = layer.FourBitExperts(gate_up, down, bias_up, bias_down, gate, of_fp8)
    check_product(run(x, ids, weights), expected, 1.5e-1 if of_fp8 else 1e-2)
    check_product(run(x[:3], ids[:3], weights[:3]), expected[:3], 1.5e-1 if of_fp8 else 1e-2)


def test_experts_that_do_not_belong_together_are_refused():
    w = weights_of("mxfp4", 2, 64, 32)
    with pytest.raises(ValueError, match="do not belong to one layer"):
        layer.FourBitExperts(w, w)
    with pytest.raises(ValueError, match="expected a bias"):
        layer.FourBitExperts(w, weights_of("mxfp4", 2, 32, 32), torch.zeros(2, 3))


def test_a_gpt_oss_checkpoint_in_mxfp4_is_used_by_the_function_for_transformers():
    """A tiny checkpoint: the names and layouts are those of gpt-oss, and the module has transformers' attributes."""

    class Experts(torch.nn.Module):
        num_experts, has_gate, has_bias, is_transposed = 4, True, True, True

    G, H, F = 4, 64, 32
    gate_up, down = weights_of("mxfp4", G, 2 * F, H), weights_of("mxfp4", G, H, F)
    biases = torch.randn(G, 2 * F, device=DEVICE), torch.randn(G, H, device=DEVICE)
    tensors = {}
    for name, w, bias in (("gate_up_proj", gate_up, biases[0]), ("down_proj", down, biases[1])):
        tensors[f"mlp.experts.{name}_blocks"] = w.codes.unflatten(2, (-1, 16))
        tensors[f"mlp.experts.{name}_scales"], tensors[f"mlp.experts.{name}_bias"] = w.scales, bias
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": Experts()}), "other": torch.nn.Identity()})
    assert transformers.use_mxfp4(model, tensors) == 1
    x = torch.randn(5, H, device=DEVICE, dtype=HALF)
    ids, weights = torch.randint(0, G, (5, 2), device=DEVICE), torch.rand(5, 2, device=DEVICE)
    out = transformers.experts(model["mlp"]["experts"], x, ids, weights)
    expected = layer.experts_reference(x, ids, weights, gate_up, down, *biases, layer.GPT_OSS)
    assert out.dtype == x.dtype
    check_product(out, expected, 1e-2)
