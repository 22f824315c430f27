"""Shapes of grouped products with four-bit weights, and their suites.

The text of a shape is that of a grouped product (shapes.py) with the format of the weights, which are [G, N, K]:

    G=3,M_g=0|5|17,N=128,K=256,fmt=mxfp4
    G=32,M=256,N=5760,K=2880,routing=zipf(0.8),fmt=int4(128,zp),bias=true    a bias for each expert
    G=32,M=256,N=5760,K=2880,fmt=mxfp4,scales=1x128                          fp8 activations scaled every 128 of K
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from groupbench.operators.catalog import models, shapes
from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.sizes import split
from groupbench.operators.suites import Suites

if TYPE_CHECKING:
    from groupbench.kernels.four_bit.weight_format import Format
    from groupbench.tracker.tools.traces import TraceStep

HELP = (
    f"{shapes.HELP}; with fmt=mxfp4, fmt=int4(128), fmt=int4(32) or fmt=int4(128,zp), by default mxfp4, and bias=true "
    "for a bias of each expert"
)
DECODE_TOKENS, PREFILL_TOKENS = (1, 8, 64), (4096,)  # of each rank
ROUTING = "zipf(0.8)"


@dataclass(frozen=True)
class W4Shape:
    """A grouped product with four-bit weights.

    product    its sizes and rows
    fmt        text of the weights' format, see kernels/four_bit/formats.py
    bias       whether each expert has a bias
    blockwise  whether fp8 activations have a scale for every 128 of K, not one for a row
    """

    product: GroupedShape
    fmt: str = "mxfp4"
    bias: bool = False
    blockwise: bool = False

    nk, shared, block = True, False, 0

    @property
    def G(self) -> int:
        return self.product.G

    @property
    def M(self) -> int:
        return self.product.M

    @property
    def N(self) -> int:
        return self.product.N

    @property
    def K(self) -> int:
        return self.product.K

    @property
    def rows(self) -> tuple[int, ...]:
        return self.product.rows

    @property
    def dims(self) -> dict[str, int]:
        return self.product.dims

    @cached_property
    def format(self) -> Format:
        from groupbench.kernels.four_bit.weight_format import parse_format

        return parse_format(self.fmt)

    def __str__(self) -> str:
        scales = ",scales=1x128" if self.blockwise else ""
        return f"{self.product},fmt={self.fmt}{',bias=true' * self.bias}{scales}"


def parse(text: str, fp8: bool) -> W4Shape:
    """Parse a shape. Raises ValueError with the fault and the right form."""
    kept, fields = [], {"fmt": "mxfp4", "bias": "false", "scales": "rows"}
    choices = {"bias": ("true", "false"), "scales": ("rows", "1x128") if fp8 else ("rows",)}
    for part in split(text.strip()):
        key, _, value = part.partition("=")
        if key not in fields:
            kept.append(part)
        elif key in choices and value not in choices[key]:
            raise ValueError(f"shape {text!r}: {key}={value} is not {' or '.join(choices[key])}. A shape is {HELP}")
        else:
            fields[key] = value
    named = _named(kept[0]) if len(kept) == 1 and "=" not in text else None
    if named is not None:
        return named
    product = shapes.parse(",".join(kept))
    if product.shared:
        raise ValueError(f"shape {text!r}: four-bit weights differ by expert; omit B=shared")
    if product.block:
        raise ValueError(f"shape {text!r}: interleaved rows are for grouped_gemm")
    shape = W4Shape(replace(product, nk=False), fields["fmt"], fields["bias"] == "true", fields["scales"] == "1x128")
    try:
        str(shape.format)
    except ValueError as error:
        raise ValueError(f"shape {text!r}: {error}") from error
    return shape


def _named(text: str) -> W4Shape | None:
    if "," in text or text.lstrip("-").isdecimal():
        return None
    return next((suite[text] for suite in SUITES.values() if text in suite), None)


def on_trace(shape: W4Shape, step: TraceStep) -> W4Shape:
    """Return the shape with the rows of a step of a routing trace."""
    return replace(shape, product=shapes.on_trace(shape.product, step))


def _models(tokens: tuple[int, ...], phase: str) -> dict[str, W4Shape]:
    """Return the gate-up (`gu`) and down (`dn`) projections of each model's first rank, for numbers of tokens."""
    by_name = {}
    for model, fmt in models.FOUR_BIT.items():
        for T in tokens:
            rows = T * model.ranks * model.k
            for part, N, K in (("gu", 2 * model.F, model.H), ("dn", model.H, model.F)):
                shape = shapes.of_rank(model.local, model.experts, 0, rows, N, K, ROUTING)
                count = str(T) if len(tokens) > 1 else ""
                by_name[f"{model.name}_{phase}{count}_{part}"] = W4Shape(shape, fmt, model.name.startswith("gptoss"))
    return by_name


def _sweep_batch() -> dict[str, W4Shape]:
    """Return the gate-up projection of gpt-oss-120b for 1 to 16,384 tokens."""
    return {
        f"w4_tokens{T}": W4Shape(GroupedShape(128, 4 * T, 5760, 2880, routing="multinomial"), bias=True)
        for T in (2**i for i in range(15))
    }


def _smoke() -> dict[str, W4Shape]:
    return {
        "mxfp4_ragged": W4Shape(shapes.listed((0, 5, 1, 17), 96, 160)),
        "int4_tail": W4Shape(shapes.listed((33, 2), 64, 200), "int4(128)", bias=True),
        "int4_zero": W4Shape(shapes.listed((9,), 80, 128), "int4(32,zp)"),
    }


SUITES: Suites[dict[str, W4Shape]] = Suites(
    {
        "decode": partial(_models, DECODE_TOKENS, "decode"),
        "prefill": partial(_models, PREFILL_TOKENS, "prefill"),
        "sweep_batch": _sweep_batch,
        "smoke": _smoke,
    }
)
