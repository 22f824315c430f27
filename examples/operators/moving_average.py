"""A moving average of NumPy arrays on the CPU: neither torch nor a GPU."""

import numpy as np

from groupbench.operators.define import operator
from groupbench.operators.tolerances import Tolerance


@operator(
    {"smoke": ["N=1000,window=10"], "long": ["N=1000000,window=10", "N=1000000,window=1000"]},
    dtypes=["fp64", "fp32"],
    tolerances={"fp64": Tolerance(rms=1e-10, rtol=1e-9, atol=1e-9)},  # a running sum keeps the error of every step
)
def moving_average(N, window, dtype: np.dtype):
    return {"x": np.random.standard_normal(N).astype(dtype), "window": window}


@moving_average.reference
@moving_average.backend
def by_convolution(x, window):
    return np.convolve(x, np.full(window, 1 / window, x.dtype), "valid")


@moving_average.backend
def by_windows(x, window):
    return np.lib.stride_tricks.sliding_window_view(x, window).mean(-1)


@moving_average.backend
def by_running_sum(x, window):
    """a running sum in fp64, and the difference of two of its elements"""
    total = np.cumsum(np.concatenate([np.zeros(1), x]), dtype=np.float64)
    return ((total[window:] - total[:-window]) / window).astype(x.dtype)
