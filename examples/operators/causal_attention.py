"""Causal attention: torch's, and a flash attention in Triton, whose blocks of keys pass through an online softmax."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from groupbench.operators.define import operator


@operator(
    {"smoke": ["B=1,H=2,S=40,D=16"], "prefill": ["B=4,H=32,S=2048,D=128", "B=1,H=32,S=8192,D=128"]},
    dtypes=["bf16", "fp16"],
    flops=lambda B, H, S, D: 2 * B * H * S * (S + 1) * D,  # two products, of the lower triangle
)
def causal_attention(B, H, S, D, dtype, device):
    q, k, v = torch.randn(3, B, H, S, D, dtype=dtype, device=device).unbind()
    return q.contiguous(), k.contiguous(), v.contiguous()


@causal_attention.reference
def exact(q, k, v):
    """[B, H, S, D], as q"""
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(later, -float("inf"))
    return torch.softmax(scores, -1) @ v


@causal_attention.backend
def torch_sdpa(q, k, v):
    """torch's scaled_dot_product_attention"""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@triton.jit
def kernel(q, k, v, out, S, scale, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    start = tl.program_id(1).to(tl.int64) * S * D  # of this head
    rows, keys, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    at = start + rows[:, None] * D + d
    queries = tl.load(q + at, mask=rows[:, None] < S, other=0.0)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, tl.minimum(S, (tl.program_id(0) + 1) * ROWS), KEYS):
        here = first + keys
        kt = tl.load(k + start + here[None, :] * D + d[:, None], mask=here[None, :] < S, other=0.0)
        scores = tl.where(rows[:, None] >= here[None, :], tl.dot(queries, kt) * scale, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        powers = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        values = tl.load(v + start + here[:, None] * D + d, mask=here[:, None] < S, other=0.0)
        total = total * shrink + tl.sum(powers, 1)
        result = tl.dot(powers.to(values.dtype), values, result * shrink[:, None])
        highest = higher
    tl.store(out + at, (result / total[:, None]).to(queries.dtype), mask=rows[:, None] < S)


@causal_attention.prepare(kind="triton")
def triton_flash(q, k, v):
    """flash attention's forward, after Dao et al. (2022) and Triton's tutorial"""
    B, H, S, D = q.shape
    scale = D**-0.5 * 1.44269504  # exp2 in place of exp
    grid = (triton.cdiv(S, 64), B * H)

    def run():
        out = torch.empty_like(q)
        kernel[grid](q, k, v, out, S, scale, ROWS=64, KEYS=32, D=D, num_warps=4)
        return out

    return run
