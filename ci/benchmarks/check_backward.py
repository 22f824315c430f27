"""Check gradients on this GPU against torch in fp32, and CUDA graphs that are replayed with other offsets.

python ci/benchmarks/check_backward.py

Prints the relative RMS errors of each check. The exit code is 1 if one exceeds the limit.
"""

from __future__ import annotations

import sys

import torch

from groupbench.kernels.grouped_gemm import wgrad
from groupbench.kernels.grouped_gemm.autograd import grouped_gemm
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_wgrad_reference

LIMIT = 5e-3  # relative RMS of bf16
SIZES = ((1000, 0, 1, 700, 129), (0, 0, 0), (2048,), (64,) * 40)
SHAPES = ((512, 768), (2880, 2880), (500, 360), (45, 33))  # (N, K): whole tiles, ragged ones, pointers


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (out.float() - expected.float()).square().mean().sqrt()
    return (difference / expected.float().square().mean().sqrt().clamp_min(1e-30)).item()


def main() -> int:
    torch.manual_seed(0)
    worst = 0.0
    for sizes in SIZES:
        for N, K in SHAPES:
            for nk in (False, True):
                rows = sum(sizes)
                a = torch.randn(rows + 9, K, device="cuda", dtype=torch.bfloat16)
                dc = torch.randn(rows + 9, N, device="cuda", dtype=torch.bfloat16)
                a[rows:] = dc[rows:] = float("nan")
                b = torch.randn(len(sizes), *((N, K) if nk else (K, N)), device="cuda", dtype=torch.bfloat16)
                b = b.transpose(1, 2) if nk else b
                offs = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
                results = []
                for reference in (False, True):
                    x, y = (t.detach().float() if reference else t.detach() for t in (a, b))
                    x, y = x.requires_grad_(), y.requires_grad_()
                    out = grouped_gemm(x, y, offs, reference=reference)
                    results.append((out, *torch.autograd.grad(out, (x, y), dc.float() if reference else dc)))
                errors = [error(out, expected) for out, expected in zip(*results, strict=True)]
                worst = max([worst, *[e if e == e else float("inf") for e in errors]])
                print(f"{str(sizes)[:40]} N={N} K={K} {'nk' if nk else 'kn'}: {' '.join(f'{e:.1e}' for e in errors)}")
    for name in ("large", "paired", "short"):
        a, dc = (torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16) for _ in "ab")
        offs = torch.tensor([1000, 1000, 4096], device="cuda", dtype=torch.int32)
        run = wgrad.prepare_wgrad(a, dc, offs, config=wgrad.CONFIGS[name])
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for ends in ((1000, 1000, 4096), (0, 4000, 4001), (1, 2, 3)):
            offs.copy_(torch.tensor(ends))
            graph.replay()
            worst = max(worst, rms := error(out, grouped_gemm_wgrad_reference(a, dc, offs)))
            print(f"graph of {name}, ends {ends}: {rms:.1e}")
    print(f"worst {worst:.1e}, allowed {LIMIT:.0e}")
    return int(not worst < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
