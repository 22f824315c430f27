"""Invalid sizes: every operator names the size that is wrong and its range."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.registry import get_operator
from groupbench.operators.sizes import size, whole

INT32 = 2**31 - 1

# operator, text, message
WRONG = [
    ("vector_add", "N=0", f"N=0 is out of range: 1 to {2**40}"),
    ("vector_add", "N=-1", f"N=-1 is out of range: 1 to {2**40}"),
    ("vector_add", "N=3,stride=0", f"stride=0 is out of range: 1 to {2**40}"),
    ("vector_add", "M=0,N=3", f"M=0 is out of range: 1 to {2**40}"),
    ("vector_add", f"N={2**41}", f"N={2**41} is out of range: 1 to {2**40}"),
    ("vector_add", "N=x", "N=x is not an integer"),
    ("split_k_matmul", "M=16,N=16,K=0", f"K=0 is out of range: 1 to {INT32}"),
    ("split_k_matmul", "M=-1,N=16,K=16", f"M=-1 is out of range: 1 to {INT32}"),
    ("matmul_outer_k", "16,-1,16", f"N=-1 is out of range: 1 to {INT32}"),
    ("matmul_outer_k", "16,16,1.5", "K=1.5 is not an integer"),
    ("quantize_fp8", "rowwise,M=0,K=8", f"M=0 is out of range: 1 to {INT32}"),
    ("quantize_fp8", "blockwise,K=-8,M=8", f"K=-8 is out of range: 1 to {INT32}"),
    ("quantize_fp8", "rowwise,M=x,K=1", "M=x is not an integer"),
    ("canary", "copy,N=0", f"N=0 is out of range: 1 to {2**20}"),
    ("canary", "matmul,M=1,N=-2,K=1", f"N=-2 is out of range: 1 to {2**20}"),
    ("canary", "matmul,N=²", "N=² is not an integer"),
    ("canary", "matmul,N=٣", "N=٣ is not an integer"),
    ("grouped_gemm", "4,0,8,0", f"K=0 is out of range: 1 to {INT32}"),
    ("grouped_gemm", "G=2,M=-4,N=4,K=4", f"M=-4 is out of range: 0 to {INT32}"),
    ("grouped_gemm", "G=2,M_g=5|-4,N=4,K=4", f"M_g=-4 is out of range: 0 to {INT32}"),
    ("grouped_gemm", "G=2,M=4,N=x,K=4", "N=x is not an integer"),
    ("grouped_gemm_fp8", "G=2,M=4,N=0,K=4", f"N=0 is out of range: 1 to {INT32}"),
    ("moe_layer", "T=1,k=1,G=1,H=8,F=0", f"F=0 is out of range: 1 to {2**20}"),
    ("moe_layer", "T=1,k=1,G=1,H=-8,F=8", f"H=-8 is out of range: 1 to {2**20}"),
    ("moe_layer", "T=-1,k=1,G=1,H=8,F=8", "T=-1, k=1: the number of choices, T·k, must be 0 to "),
    ("moe_permute", "T=1,k=1,G=x,H=8", "G=x is not an integer"),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG, ids=[f"{name}-{text}" for name, text, _ in WRONG])
def test_a_size_that_cannot_be_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        get_operator(name).parse_shape(text)
    assert str(caught.value).startswith(f"shape {text!r}: {message}")
    assert ". A shape is " in str(caught.value)
    assert "\n" not in str(caught.value)


# Of each operator, texts that are not a shape for another reason.
NO_SHAPES = {
    "row_softmax": ["", "M=1", "M=0,N=1", "1,2,3", "M=1,2", "M=x,N=1"],
    "causal_attention": ["", "S=1", "S=1,H=2,D=0", "S=1,H=3,KV=2,D=8", "B=3,S=1|2,H=1,D=8", "S=0,H=1,D=8",
                         "S=1,H=1,D=999", "S=1,S=1,H=1,D=8", "S=1,H=1,D=8,G=1"],
    "split_k_matmul": ["", "16,16", "16,16,16,16", "M=16,N=16", "M=1,M=1,N=1,K=1", "M=1,N=1,K=1,W=kn", "M=²,N=1,K=1",
                       "M=1,N=1,K=1,A=nk", "G=1,M=1,N=1,K=1", f"1,1,{2**31}", "2000000000,2000000000,2000000000"],
    "vector_add": ["", "N", "N=²", "M=3", "M=3,N=0", "N=3,y=t", "N=3,stride=2,y=t", "M=2,N=3,stride=2", "N=3,N=3",
                   f"M={2**21},N={2**21}"],
    "grouped_gemm_mnk": ["", "groups=", "1x2", "groups=1x2", "groups=1x2x3*0", "groups=1x2x3,W=kn", "G=1",
                         "groups=1x2x3,W=nk,W=nk", "groups=1x2x-3", "groups=1x2x3|", "groups=9999999999x1x1",
                         "groups=1x1x1*9999999", "groups=2147483647x2147483647x2147483647"],
    "quantize_fp8": ["", "rowwise", "rowwise,M=3", "rowwise,M=3,M=3", "tensor,M=3,K=3", "rowwise,M=3,N=1"],
    "quantize_w4": ["fmt=int4(128),N=3,K=64"],
    "grouped_gemm_w4a16": ["G=2,M_g=3,N=64,K=96,fmt=int4", "G=2,M_g=3,N=64,K=96,B=shared", "nothing", "1,2,3"],
    "moe_layer_w4a16": ["T=3,k=1,G=2,H=33,F=32"],
    "canary": ["", ",", "matmul", "matmul,N=5,W=nk", "copy,N=2,N=3", "copy,M=1,N=2,K=3", "matmul,M=1,N=2", "conv,N=2",
               f"matmul,N={2**21}"],
    "moe_layer": ["", "T=1,k=1,G=1", "T=1,k=1,G=1,H=8", "T=1,T=1,k=1,G=1,H=8,F=8", "T=1,k=1,G=1,H=8,F=8,N=3",
                  "T=1.5,k=1,G=1,H=8,F=8", "T=1,k=3,G=2,H=8,F=8", "T=1,k=1,G=4,H=8,F=8,E=3", "T=1,k=1,G=4097,H=8,F=8",
                  "T=2147483647,k=2,G=4,H=8,F=8", "T=1,k=1,G=1,H=8,F=8,routing=magic",
                  f"T={'9' * 5000},k=1,G=1,H=8,F=8"],
}  # fmt: skip


@pytest.mark.parametrize("name", NO_SHAPES)
def test_text_that_is_no_shape_gets_the_form_of_one(name: str) -> None:
    for text in NO_SHAPES[name]:
        with pytest.raises(ValueError, match="shape") as caught:
            get_operator(name).parse_shape(text)
        assert ("A shape is " in str(caught.value) or "w4" in name) and "\n" not in str(caught.value)


@given(st.integers(-(10**29), 10**29), st.integers(0, 5), st.integers(5, 10**28))
def test_numbers_within_the_limits_and_no_others(number: int, least: int, most: int) -> None:
    assert whole("N", str(number)) == number
    if least <= number <= most:
        assert size("N", str(number), most, least) == number
    else:
        with pytest.raises(ValueError, match=f"^N={number} is out of range: {least} to {most}$"):
            size("N", str(number), most, least)


@given(st.text(max_size=8) | st.text("-0123456789", max_size=8))
def test_text_is_a_number_or_refused(text: str) -> None:
    if re.fullmatch("-?[0-9]+", text):
        assert whole("N", text) == int(text)
    else:
        with pytest.raises(ValueError, match=r"is not an integer$"):
            whole("N", text)


def test_thousands_of_digits_are_counted() -> None:
    with pytest.raises(ValueError, match=r"^N=9{30}\.\.\. is too large: it has 5000 digits$"):
        whole("N", "9" * 5000)
