"""Addition of operands of any shape and strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from groupbench.kernels import elementwise
from groupbench.kernels.elementwise import add_reference, prepare_add


def values(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


# name: (x, y, whether they are one flat array each)
CASES: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], bool]] = {
    "one_element": (lambda: (values(1), values(1)), True),
    "a_number": (lambda: (values(1)[0], values(1)[0]), True),
    "empty": (lambda: (values(0), values(0)), True),
    "empty_matrix": (lambda: (values(5, 0), values(5, 0)), False),
    "prime": (lambda: (values(1009), values(1009)), True),
    "past_a_block": (lambda: (values((1 << 16) + 1), values((1 << 16) + 1)), True),
    "matrix": (lambda: (values(37, 53), values(37, 53)), True),
    "both_transposed": (lambda: (values(37, 53).t(), values(37, 53).t()), True),
    "one_transposed": (lambda: (values(37, 53), values(53, 37).t()), False),
    "every_third": (lambda: (values(3000)[::3], values(3000)[::3]), False),
    "slices": (lambda: (values(37, 53)[::2, 1:], values(37, 53)[::2, :-1]), False),
    "column": (lambda: (values(37, 53)[:, 1], values(37)), False),
    "row_vector": (lambda: (values(37, 53), values(53)), False),
    "column_vector": (lambda: (values(37, 1), values(37, 53)), False),
    "outer_sum": (lambda: (values(37, 1), values(1, 53)), False),
    "expanded": (lambda: (values(37, 53).expand(2, 37, 53), values(37, 53)), False),
    "four_dimensions": (lambda: (values(3, 1, 5, 7), values(2, 5, 7)), False),
    "permuted": (lambda: (values(3, 2, 5, 7).permute(3, 1, 0, 2), values(3, 2, 5, 7).permute(3, 1, 0, 2)), True),
    "permuted_otherwise": (lambda: (values(3, 2, 5, 7).permute(3, 1, 0, 2), values(7, 2, 3, 5)), False),
    "dimensions_of_one": (lambda: (values(37, 53)[:1, :1], values(1, 1)), True),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def operands(request, dtype, device):
    torch.manual_seed(0)
    x, y = request.param[0]()
    # A cast keeps the strides of dense tensors only: view the same elements of a cast storage.
    storage = [part.untyped_storage() for part in (x, y)]
    whole = [torch.empty(0).set_(s).to(device, dtype) for s in storage]
    return [w.as_strided(p.shape, p.stride(), p.storage_offset()) for w, p in zip(whole, (x, y), strict=True)]


def test_matches_the_reference(operands, dtype, check_run):
    run = prepare_add(*operands)
    out = check_run(run, add_reference(*operands), dtype)
    assert torch.equal(out, run())
    if out.numel():
        assert out.data_ptr() != run().data_ptr()


@pytest.mark.parametrize(("make", "flat"), CASES.values(), ids=CASES)
def test_operands_in_the_same_order_take_the_flat_path(make, flat):
    x, y = torch.broadcast_tensors(*make())
    assert elementwise.same_order(x, y) is flat or x.numel() == 0


@given(
    sizes=st.lists(st.integers(1, 5), max_size=4),
    order=st.permutations(range(4)),
    steps=st.lists(st.integers(1, 2), min_size=4, max_size=4),
    spread=st.sets(st.integers(0, 3)),
)
def test_merging_dimensions_leaves_every_element_in_its_place(sizes, order, steps, spread):
    dims = len(sizes)
    x = torch.arange(10**4).as_strided([size * 2 for size in sizes], [10**i for i in range(dims)])
    x = x[tuple(slice(0, 2 * size, step) for size, step in zip(sizes, steps, strict=False))]
    y = torch.arange(x.numel()).reshape(x.shape)
    for dim in spread & set(range(dims)):
        y = y.narrow(dim, 0, 1).expand(*x.shape)
    permutation = [dim for dim in order if dim < dims]
    x, y = x.permute(permutation), y.permute(permutation)
    shape, x_strides, y_strides = elementwise.merged(x, y)
    assert torch.equal(x.as_strided(shape, x_strides, x.storage_offset()).flatten(), x.flatten())
    assert torch.equal(y.as_strided(shape, y_strides, y.storage_offset()).flatten(), y.flatten())


@pytest.mark.parametrize("block", [16, 1024])
def test_any_block(block, device):
    x, y = values(37, 53).to(device), values(53, 37).to(device).t()
    for a, b in ((x, x), (x, y)):
        config = replace(elementwise.CONFIGS["strided"], block=block)
        assert torch.equal(prepare_add(a, b, config)(), a + b)


def test_fp32_is_exact_and_reads_its_inputs_on_every_call(device):
    x, y = values(1000).to(device), values(1000).to(device)
    run = prepare_add(x, y)
    assert torch.equal(run(), x + y)
    x.mul_(3)
    assert torch.equal(run(), x + y)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.ones(3), torch.ones(3).half(), "one dtype"),
        (torch.ones(3).double(), torch.ones(3).double(), "not one of"),
        (torch.ones(3), torch.ones(4), "do not broadcast"),
    ],
    ids=["mixed_dtypes", "fp64", "other_shape"],
)
def test_refuses_operands_it_cannot_add(x, y, message, device):
    with pytest.raises(ValueError, match=message):
        prepare_add(x.to(device), y.to(device))
