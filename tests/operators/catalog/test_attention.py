"""row_softmax and causal_attention: their text, and rows and sequences of every length."""

from __future__ import annotations

import pytest
import torch
from grouped import NO_HOPPER
from hypothesis import given
from hypothesis import strategies as st

from groupbench.kernels.attention import causal, causal_backward, softmax, softmax_cluster
from groupbench.operators.catalog.causal_attention import CAUSAL_ATTENTION, AttentionShape
from groupbench.operators.catalog.row_softmax import ROW_SOFTMAX, RowShape
from groupbench.operators.measure.accuracy import check_backend

HERE = "cuda" if torch.cuda.is_available() else "cpu"


@given(st.lists(st.integers(0, 500), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 256))
def test_text_goes_both_ways(lengths: list[int], KV: int, R: int, D: int) -> None:
    if sum(lengths):
        shape = AttentionShape(tuple(lengths), KV * R, KV, D)
        assert CAUSAL_ATTENTION.parse_shape(str(shape)) == shape
    assert ROW_SOFTMAX.parse_shape(f"{KV},{D}") == RowShape(KV, D) == ROW_SOFTMAX.parse_shape(f"M={KV},N={D}")


def test_long_sequences_and_their_tiles_with_most_work_come_first() -> None:
    tiles = causal.tiles_of((5, 0, 9), 4, torch.device("cpu"))
    assert tiles.tolist() == [[13, 5, 14], [9, 5, 14], [5, 5, 14], [4, 0, 5], [0, 0, 5]]
    assert causal.tiles_of((5, 9), 4, torch.device("cpu"), most_work_last=True)[0].tolist() == [5, 5, 14]
    assert causal.section(32, 8, 32768, 128, torch.float16) == 4
    assert causal.section(6, 6, 10, 128, torch.float16) == 6


def test_a_nan_stays_in_its_sequence() -> None:
    """A tile at the end of a sequence reads rows of the next one."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(53, 2, 16, dtype=torch.float16, device=HERE) for _ in range(4))
    for x in (q, k, v, dout):
        x[21:] = float("nan")
    out, lse = causal.prepare_with_lse(q, k, v, (21, 32))()
    assert not out[:21].isnan().any()
    gradients = causal_backward.prepare_causal_backward(q, k, v, out, lse, dout, (21, 32))()
    assert not any(gradient[:21].isnan().any() for gradient in gradients)


@pytest.mark.parametrize(
    ("keys", "rows"), [((64, 128), (64, 32)), ((64, 64), (128, 64)), ((128, 64), (64, 32))], ids=str
)
def test_configs_of_the_gpu_are_right_too(keys: tuple[int, int], rows: tuple[int, int]) -> None:
    """Blocks larger than the tile reach past the diagonal; the interpreter's own tiles and blocks are equal."""
    step = CAUSAL_ATTENTION.in_mode("bwd").make_inputs(
        CAUSAL_ATTENTION.parse_shape("S=150|70,H=2,KV=1,D=16"), "fp16", HERE, 0
    )
    x, operator = step.x, CAUSAL_ATTENTION.in_mode("bwd")
    forward = causal.AttentionConfig(64, 64, 4, 1)
    out, lse = causal.prepare_with_lse(x.q, x.k, x.v, x.lengths, forward)()
    expected = causal.causal_attention_reference(x.q, x.k, x.v, x.lengths)
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
    configs = tuple(causal_backward.BackwardConfig(*sizes, num_warps=4, num_stages=1) for sizes in (keys, rows))
    run = causal_backward.prepare_causal_backward(x.q, x.k, x.v, out, lse, step.dout, x.lengths, configs)
    _, problem = check_backend(run, operator.reference(step), operator, "triton", "fp16")
    assert problem is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("N", [300, 512, 700])
def test_rows_of_every_length(N: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in registers, rows of which a part is, and rows in two passes."""
    for name, value in {"SHORT_ROW": 8, "WHOLE_ROW": 1024, "WHOLE_ROW_BACKWARD": 512, "BLOCK": 128}.items():
        monkeypatch.setattr(softmax, name, value)
    torch.manual_seed(0)
    x, dy = (torch.randn(3, N, device=HERE).to(dtype) for _ in range(2))
    x[0, ::2], x[1, 5] = -float("inf"), 40.0
    y = softmax.prepare_softmax(x)()
    exact = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-8}
    torch.testing.assert_close(y.double(), softmax.softmax_reference(x), **exact)
    dx = softmax.prepare_softmax_backward(y, dy)()
    torch.testing.assert_close(dx.double(), softmax.softmax_backward_reference(y, dy), **exact)


@NO_HOPPER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("row_bytes", [16, 4096 + 16, 16384 + 16, 114688 + 16, 131072, 180224 + 16, 303872, 524288])
def test_rows_that_a_cluster_shares(row_bytes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dy = (torch.randn(67, row_bytes // dtype.itemsize, device=HERE).to(dtype) for _ in range(2))
    x[0, ::2], x[1, -1], x[2, : x.size(1) // 2], x[3] = -float("inf"), 1e4, -float("inf"), -6e4
    y = softmax_cluster.prepare_softmax_cluster(x)()
    exact = {"rtol": 1e-5, "atol": 1e-8} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    torch.testing.assert_close(y.double(), softmax.softmax_reference(x), **exact)
    dx = softmax_cluster.prepare_softmax_backward_cluster(y, dy)()
    torch.testing.assert_close(dx.double(), softmax.softmax_backward_reference(y, dy), **exact)
    x[5, -1] = float("nan")
    assert softmax_cluster.prepare_softmax_cluster(x)().isnan().any(1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_softmax_of_nothing(shape: tuple[int, int]) -> None:
    assert softmax.prepare_softmax(torch.ones(shape, device=HERE))().shape == shape


def test_operands_that_do_not_fit() -> None:
    q, k = torch.ones(8, 4, 16), torch.ones(8, 3, 16)
    with pytest.raises(ValueError, match="do not fit"):
        causal.prepare_causal(q, k, k, (8,))
    with pytest.raises(ValueError, match="contiguous"):
        causal.prepare_causal(q, q.transpose(0, 1), q, (8,))
    with pytest.raises(ValueError, match="D=5"):
        causal.prepare_causal(q[..., :5].contiguous(), q[..., :5].contiguous(), q[..., :5].contiguous(), (8,))
    with pytest.raises(ValueError, match="contiguous"):
        softmax.prepare_softmax(q[0].t())
    assert "clusters of SMs" in str(softmax_cluster.unsuitable(q[0]))
