"""Shared CUDA C++ for Hopper: hopper.cuh, and wgmma for several column counts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DECLARED = """
// sums = a @ b, or sums += a @ b if `add`: 64 rows, 32 bytes of K. A thread has half as many sums as there are columns.
// The caller commits and waits.
template <int columns>
__device__ __forceinline__ void multiply(float* sums, u64 a, u64 b, int add);
"""


def instructions(columns: Iterable[int]) -> str:
    """Return hopper.cuh and a function `multiply<columns>` for each number of columns, multiples of 8 up to 256.

    The source must define TRANSPOSE_A and TRANSPOSE_B: 1 if the operand's rows or columns, not K, are contiguous in
    shared memory. Of fp8, that is K.
    """
    return Path(__file__).with_name("hopper.cuh").read_text() + DECLARED + "".join(map(_multiply, columns))


def products_of_values(columns: int) -> str:
    """Return a function `multiply_values<columns>`: sums = a @ b, or sums += a @ b if `add`, with a in registers.

    a has 64 rows and 32 bytes of K, four registers of each thread. K is contiguous in b.
    """
    count = columns // 2
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    values = ", ".join(f"%{count + i}" for i in range(4))
    return f"""
template <int columns>
__device__ __forceinline__ void multiply_values(float* sums, const u32* a, u64 b, int add);

template <>
__device__ __forceinline__ void multiply_values<{columns}>(float* sums, const u32* a, u64 b, int add) {{
  asm volatile(
      "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 5}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}" OPERANDS
      " {{{names}}}, {{{values}}}, %{count + 4}, add, 1, 1" LAYOUTS(", 0") ";\\n}}"
      : {sums} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}}
"""


def _multiply(columns: int) -> str:
    """Return the function: PTX names each of a thread's sums."""
    count = columns // 2
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return f"""
template <>
__device__ __forceinline__ void multiply<{columns}>(float* sums, u64 a, u64 b, int add) {{
  asm volatile(
      "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}" OPERANDS
      " {{{names}}}, %{count}, %{count + 1}, add, 1, 1" LAYOUTS(", %{count + 3}, %{count + 4}") ";\\n}}"
      : {sums} : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
}}
"""
