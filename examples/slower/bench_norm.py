"""Define this repository's function as an operator: inputs by size, a reference, and a backend to measure."""

import numpy as np
from norm import rms_norm

from groupbench.operators.define import operator


@operator({"smoke": ["M=32,N=1024"]}, dtypes=["fp32"])
def norm(M, N, dtype: np.dtype):
    return np.random.standard_normal((M, N)).astype(dtype)


@norm.reference
def exact(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


norm.backend(rms_norm)
