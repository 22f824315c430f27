"""Grouped GEMM, one kernel a file: out[rows of g] = a[rows of g] @ b[g] for every group g."""
