"""Four-bit weight formats, and their values in plain torch.

    mxfp4            e2m1 codes; an e8m0 scale, 2^(s - 127), for every 32 values along K; s = 255 is NaN (OCP MX 1.0)
    int4(128)        codes 0..15 for the values -8..7; a bf16 scale for every 128 values along K, or another group
    int4(128,zp)     codes 0..15 with a zero point 0..15 for every group: (code - zero) * scale

Stored weights, for all formats:

    codes   [G, N, ceil(K / 2)] uint8, two codes in a byte, the even k's in the lower half
    scales  [G, N, ceil(K / group)] uint8 (e8m0) or bf16
    zeros   the same size, uint8, or None

e2m1 codes are a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Sources: OCP Microscaling Formats 1.0; gpt-oss's
checkpoints for two codes in a byte; AWQ and GPTQ for zero points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from groupbench.kernels.four_bit.weight_format import MXFP4, Format, parse_format

__all__ = ["MXFP4", "Format", "Weights", "parse_format"]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS, NAN = 127, 255  # of e8m0
MIDDLE = 8  # the zero point of int4 without zero points


@dataclass(frozen=True)
class Weights:
    """All experts' packed weights; see above."""

    fmt: Format
    K: int
    codes: Tensor  # [G, N, ceil(K / 2)]
    scales: Tensor  # [G, N, ceil(K / group)]
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        G, N, width = self.codes.shape
        expected = {"codes": (G, N, -(-self.K // 2)), "scales": (G, N, self.fmt.groups(self.K))}
        expected |= {"zeros": expected["scales"]} if self.fmt.zero_point else {}
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is None or tuple(tensor.shape) != shape:
                got = None if tensor is None else tuple(tensor.shape)
                raise ValueError(f"{self.fmt} weights with K={self.K} need {name} {shape}, got {got}")
        scale_dtype = torch.uint8 if self.fmt.floating else torch.bfloat16
        if (self.codes.dtype, self.scales.dtype) != (torch.uint8, scale_dtype):
            raise ValueError(f"{self.fmt} has codes of uint8 and scales of {scale_dtype}")
        if width == 0 or G == 0:
            raise ValueError(f"weights of size {tuple(self.codes.shape)}")

    @property
    def G(self) -> int:
        return self.codes.size(0)

    @property
    def N(self) -> int:
        return self.codes.size(1)

    def __getitem__(self, g: int) -> Weights:
        """Return one expert's weights, with G = 1."""
        zeros = None if self.zeros is None else self.zeros[g : g + 1]
        return Weights(self.fmt, self.K, self.codes[g : g + 1], self.scales[g : g + 1], zeros)

    @cached_property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.zeros) if t is not None)


def unpack(codes: Tensor, K: int) -> Tensor:
    """Return the codes one by one, [..., K] uint8."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :K]


def pack(codes: Tensor) -> Tensor:
    """Return codes [..., K], 0 to 15, two in a byte."""
    codes = torch.nn.functional.pad(codes, (0, codes.size(-1) % 2)).to(torch.uint8).unflatten(-1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4


def dequantize(w: Weights, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the values [G, N, K]; exact in fp64 and, but for the smallest e8m0 scales, in fp32."""
    codes, K = unpack(w.codes, w.K), w.K

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(w.fmt.group, -1)[..., :K]

    if w.fmt.floating:
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype, device=codes.device)
        scales = torch.where(w.scales == NAN, float("nan"), power_of_two(w.scales.long() - BIAS).to(dtype))
        return table[codes.int()] * spread(scales)
    zeros = MIDDLE if w.zeros is None else spread(w.zeros.to(dtype))
    return (codes.to(dtype) - zeros) * spread(w.scales.to(dtype))


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp64, exact; int64 exponents within fp64's normal numbers."""
    return (exponent + 1023 << 52).view(torch.float64)


def quantize_reference(x: Tensor, fmt: Format) -> Weights:  # x [G, N, K]
    """Return the nearest codes for the scales each group's largest value asks for.

    mxfp4: the scale is 2^(floor(log2(amax)) - 2), and codes saturate at 6 (OCP MX 1.0, section 6.3). int4: amax / 7, or
    with zero points the range, which has zero in it, over 15. A group with NaN or infinity is NaN throughout.
    """
    K = x.size(-1)
    groups = torch.nn.functional.pad(x.float(), (0, -K % fmt.group)).unflatten(-1, (-1, fmt.group))
    if fmt.floating:
        amax = groups.abs().amax(-1)
        exponent = (torch.frexp(amax).exponent - 3).clamp(min=-BIAS)
        finite = torch.isfinite(amax)
        scales = torch.where(finite, torch.where(amax > 0, exponent + BIAS, 0), NAN).to(torch.uint8)
        codes = nearest_e2m1(groups * power_of_two(torch.where(finite, -exponent, 0).long())[..., None])
        return Weights(fmt, K, pack(codes.flatten(-2)[..., :K]), scales)
    low = -groups.abs().amax(-1)
    if fmt.zero_point:
        low = groups.amin(-1).clamp(max=0)
        scales = (groups.amax(-1).clamp(min=0) - low) * (1 / 15)
    else:
        scales = -low * (1 / 7)
    scales = torch.where(torch.isfinite(scales), scales, float("nan")).to(torch.bfloat16)
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    zeros = (-low * inverse).round().clamp(0, 15) if fmt.zero_point else None
    codes = (groups * inverse[..., None]).round() + (MIDDLE if zeros is None else zeros[..., None])
    codes = codes.clamp(0, 15).nan_to_num(0)
    packed = None if zeros is None else zeros.nan_to_num(0).to(torch.uint8)
    return Weights(fmt, K, pack(codes.flatten(-2)[..., :K]), scales, packed)


def nearest_e2m1(x: Tensor) -> Tensor:
    """Return the nearest e2m1 values' codes, ties to even, uint8."""
    size = x.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for limit, tie in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5, False)):
        code += size >= limit if tie else size > limit
    return code | (x < 0).to(torch.uint8) << 3


def grouped_gemm_w4_reference(
    a: Tensor,  # [M, K]; a value is a * scale_a
    scale_a: Tensor | None,  # [M] or [M, ceil(K / 128)], of fp8
    w: Weights,
    offs: Tensor,  # [G] end offsets
    bias: Tensor | None = None,  # [G, N]
) -> Tensor:  # [M, N] fp64; rows past offs[-1] are zero
    """Return the packed values' product in fp64, expert by expert."""
    from groupbench.kernels.grouped_gemm.quantize import dequantize as of_fp8

    out = torch.zeros(a.size(0), w.N, dtype=torch.float64, device=a.device)
    start = 0
    for g, end in enumerate(offs.tolist()):
        if end > start:
            rows = a[start:end].double() if scale_a is None else of_fp8(a[start:end], scale_a[start:end]).double()
            out[start:end] = rows @ dequantize(w[g])[0].T
            if bias is not None:
                out[start:end] += bias[g].double()
        start = end
    return out
