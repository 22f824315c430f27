"""Log-softmax of each row: torch's, and one in Triton that reads and writes each row once."""

import torch
import triton
import triton.language as tl

from groupbench.operators.define import operator


@operator({"smoke": ["M=3,N=100"], "rows": ["M=4096,N=4096", "M=32768,N=1024", "M=8192,N=32768"]})
def row_log_softmax(M, N, dtype, device):
    return torch.randn(M, N, dtype=dtype, device=device)


@row_log_softmax.reference
@row_log_softmax.backend(name="torch")
def log_softmax(x):
    return torch.log_softmax(x, -1)


@triton.jit
def kernel(x, out, N, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * N + columns, mask=columns < N, other=-float("inf")).to(tl.float32)
    row -= tl.max(row, 0)
    tl.store(out + tl.program_id(0) * N + columns, row - tl.log(tl.sum(tl.exp(row), 0)), mask=columns < N)


@row_log_softmax.backend(name="triton", kind="triton")
def one_pass(x):
    M, N = x.shape
    out = torch.empty_like(x)
    kernel[(M,)](x, out, N, BLOCK=triton.next_power_of_2(N), num_warps=8)
    return out
