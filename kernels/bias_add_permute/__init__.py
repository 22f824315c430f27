"""Grouped GEMM with a bias, an elementwise operand and a permuted output, fused into one launch."""
