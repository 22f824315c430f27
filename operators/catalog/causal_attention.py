"""Causal attention of sequences of equal or unlike lengths, packed without padding, and its gradients.

    out[i, h] = sum over j <= i of softmax(scale * <q[i, h], k[j, h // R]>) v[j, h // R]        within a sequence

    q, out [T, H, D]   k, v [T, KV, D], H a multiple of KV (grouped-query attention)   T rows of all sequences

The kernels are in kernels/attention: item e of gpu-mode's Triton course. One launch computes all sequences, as a
grouped GEMM computes all experts. The text of a shape:

    B=4,S=2048,H=32,D=128                 4 sequences of 2048 rows
    S=1000|37|4096,H=32,KV=8,D=128        sequences of these lengths, 32 heads of q on 8 of k and v

TritonBench's flash_attention has other inputs; this operator has another name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from groupbench.operators.catalog.backends import drawing, helion, lazy, triton
from groupbench.operators.catalog.inductor import no_gpu_to_compile_for
from groupbench.operators.deferred import F, Tensor, torch
from groupbench.operators.dtypes import BYTES
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend, Backward, Operator, Run, Target
from groupbench.operators.sizes import fields_of, shape_parser, size, within
from groupbench.operators.tolerances import TOLERANCES, Tolerance

MAX_ROWS, MAX_HEADS, MAX_D, MAX_TEXT = 2**27, 1024, 256, 20_000
HELP = "B=SEQUENCES,S=ROWS,H=HEADS,D=HEAD_SIZE, or S=ROWS|ROWS|...; ,KV=HEADS of k and v if fewer"


@dataclass(frozen=True)
class AttentionShape:
    """Sequences of these lengths with H heads of D elements; KV heads of keys and values."""

    lengths: tuple[int, ...]
    H: int
    KV: int
    D: int

    def __post_init__(self) -> None:
        within("B", len(self.lengths), MAX_ROWS)
        within("T", sum(self.lengths), MAX_ROWS)
        within("H", self.H, MAX_HEADS)
        within("D", self.D, MAX_D)
        if not 1 <= self.KV <= self.H or self.H % self.KV:
            raise ValueError(f"KV={self.KV} does not divide H={self.H}")
        if len(str(self)) > MAX_TEXT:
            raise ValueError(f"its text has more than {MAX_TEXT} characters")

    @property
    def T(self) -> int:
        return sum(self.lengths)

    @property
    def dims(self) -> dict[str, int]:
        longest = max(self.lengths)
        return {"B": len(self.lengths), "T": self.T, "S": longest, "H": self.H, "KV": self.KV, "D": self.D}

    def __str__(self) -> str:
        alike = len(set(self.lengths)) == 1
        rows = f"B={len(self.lengths)},S={self.lengths[0]}" if alike else f"S={'|'.join(map(str, self.lengths))}"
        return f"{rows},H={self.H}" + (f",KV={self.KV}" if self.KV != self.H else "") + f",D={self.D}"


@shape_parser(HELP)
def parse_shape(text: str) -> AttentionShape:
    """Parse a shape of a form in HELP. Raises ValueError."""
    fields = fields_of(text, "S H D", "B KV")
    lengths = tuple(size("S", row, MAX_ROWS, least=0) for row in fields["S"].split("|"))
    B = size("B", fields["B"], MAX_ROWS) if "B" in fields else len(lengths)
    if len(lengths) not in (1, B):
        raise ValueError(f"S lists {len(lengths)} sequences, and B is {B}")
    H, D = size("H", fields["H"], MAX_HEADS), size("D", fields["D"], MAX_D)
    KV = size("KV", fields["KV"], MAX_HEADS) if "KV" in fields else H
    return AttentionShape(lengths * B if len(lengths) == 1 else lengths, H, KV, D)


@dataclass(frozen=True)
class AttentionInputs:
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, KV, D]
    v: Tensor  # [T, KV, D]
    ends: Tensor  # [B] int32, where each sequence's rows end
    lengths: tuple[int, ...]  # of each sequence, on the host


@dataclass(frozen=True)
class AttentionStep:
    """The inputs of the forward pass, and the output's gradient."""

    x: AttentionInputs
    dout: Tensor  # [T, H, D]


def make_inputs(shape: AttentionShape, dtype: str, device: str, seed: int) -> AttentionInputs:
    """Draw standard normal values."""
    normal = drawing(dtype, device, seed)
    ends = torch.tensor([*accumulate(shape.lengths)], dtype=torch.int32, device=device)
    q, k, v = (normal(shape.T, heads, shape.D) for heads in (shape.H, shape.KV, shape.KV))
    return AttentionInputs(q, k, v, ends, shape.lengths)


def make_step(shape: AttentionShape, dtype: str, device: str, seed: int) -> AttentionStep:
    """Draw the inputs of the forward pass, and a standard normal gradient."""
    dout = drawing(dtype, device, seed + 1)(shape.T, shape.H, shape.D)
    return AttentionStep(make_inputs(shape, dtype, device, seed), dout)


reference = lazy("attention.causal:causal_attention_reference", "q k v lengths")


def reference_backward(step: AttentionStep) -> dict[str, Tensor]:
    """Return the gradients in a wider dtype, one head of k and v and one sequence at a time."""
    from groupbench.kernels.attention.causal import causal_attention_reference

    x, R = step.x, step.x.q.size(1) // step.x.k.size(1)
    wide = torch.float64 if x.q.dtype == torch.float32 else torch.float32
    gradients = [torch.zeros_like(part, dtype=wide) for part in (x.q, x.k, x.v)]
    start = 0
    for length in x.lengths:
        rows = slice(start, start + length)
        start += length
        for kv in range(x.k.size(1)):
            heads = (slice(kv * R, kv * R + R), slice(kv, kv + 1), slice(kv, kv + 1))
            leaves = [
                part[rows, head].to(wide).requires_grad_() for part, head in zip((x.q, x.k, x.v), heads, strict=True)
            ]
            out = causal_attention_reference(leaves[0], leaves[1], leaves[2], (length,))
            parts = torch.autograd.grad(out, leaves, step.dout[rows, heads[0]].to(out.dtype))
            for gradient, head, part in zip(gradients, heads, parts, strict=True):
                gradient[rows, head] = part.to(wide)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def decode(output: Any) -> Any:
    """Return the output as [T, H * D], and gradients as [heads * D, T].

    The accuracy check judges every row. The gradient of q is close to zero in the first rows of a sequence: all the
    weight of a row's first key does not change with q.
    """
    if isinstance(output, torch.Tensor):
        return output.flatten(1)
    if isinstance(output, dict):
        return {name: part.flatten(1).t() for name, part in output.items()}
    return tuple(part.flatten(1).t() for part in output)


def flops(shape: AttentionShape) -> int:
    """Count two products over the keys up to each row."""
    return 2 * shape.H * shape.D * sum(length * (length + 1) for length in shape.lengths)


def min_bytes(shape: AttentionShape, dtype: str) -> int:
    return 2 * shape.T * (shape.H + shape.KV) * shape.D * BYTES[dtype]


def min_bytes_backward(shape: AttentionShape, dtype: str) -> int:
    """Count q, k, v, the output, its gradient, and three gradients once."""
    return 4 * shape.T * (shape.H + shape.KV) * shape.D * BYTES[dtype]


# --- torch ------------------------------------------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Call torch's attention once for equal lengths, otherwise for each sequence."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, S, heads, D] each
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    if len(set(lengths)) == 1:
        return attend(*(part.unflatten(0, (len(lengths), -1)) for part in (q, k, v))).flatten(0, 1)
    parts = zip(*(part.split(list(lengths)) for part in (q, k, v)), strict=True)
    return torch.cat([attend(*(part[None] for part in parts_of))[0] for parts_of in parts])


def varlen(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return torch's attention of packed sequences. Raises Unavailable without it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no varlen_attn") from error
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
    causal: dict[str, Any] = {"window_size": (-1, 0)}
    try:
        varlen_attn(q[:0], k[:0], v[:0], ends[:1], ends[:1], 1, 1, **causal)
    except TypeError:  # torch 2.10
        causal = {"is_causal": True}
    except Exception:  # noqa: S110 # of operands without rows
        pass
    groups = q.size(1) // k.size(1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(groups, 1) if groups > 1 else part for part in (k, v))
        out: Any = varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths), **causal)
        attended: Tensor = out
        return attended

    return attend


def no_flash_attention(target: Target) -> str | None:
    if target.device != "cuda" or target.dtype == "fp32":
        return "torch's flash attention runs on GPUs, in fp16 and bf16"
    return None


def flex(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return torch.compile's attention with a block mask of all sequences, which is made here."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.utils._python_dispatch import _disable_current_modes

    if q.size(2) < 16:
        raise Unavailable(f"flex_attention needs heads of at least 16 elements, not {q.size(2)}")
    sequence = torch.repeat_interleave(torch.tensor(lengths, device=q.device))
    T = q.size(0)
    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (sequence[i] == sequence[j]), None, None, T, T, device=q.device, _compile=True
    )
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        with _disable_current_modes():  # under a dispatch mode Dynamo would not run its compiled code
            # For less than 128 rows torch 2.11 chooses its kernel for decoding, which lacks configs for many heads.
            options = {"FORCE_USE_FLEX_ATTENTION": True}
            out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
        return out[0].transpose(0, 1)

    return attend


def _torch_backend(name: str, attention_of: Callable[..., Callable[..., Tensor]], source: str, **facts: Any) -> Backend:
    """Return a backend of a function of q, k and v, with torch's derivative."""

    def prepare(x: AttentionInputs) -> Run:
        attend = attention_of(x.q, x.k, x.v, x.lengths)
        return lambda: attend(x.q, x.k, x.v)

    def prepare_bwd(step: AttentionStep) -> Run:
        leaves = [part.detach().requires_grad_() for part in (step.x.q, step.x.k, step.x.v)]
        out = attention_of(*leaves, step.x.lengths)(*leaves)
        return lambda: torch.autograd.grad(out, leaves, step.dout, retain_graph=True)

    return Backend(name, prepare, source, prepare_bwd=prepare_bwd, **facts)


def _backward_by(module: str, backward: str) -> Callable[[AttentionStep], Run]:
    """Return the `prepare_bwd` of a module below kernels/attention, with the forward pass' own output and lse."""

    def prepare(step: AttentionStep) -> Run:
        from importlib import import_module

        from groupbench.kernels.attention.causal import prepare_with_lse

        x = step.x
        out, lse = prepare_with_lse(x.q, x.k, x.v, x.lengths)()
        prepare_backward = getattr(import_module(f"groupbench.kernels.attention.{module}"), backward)
        run: Run = prepare_backward(x.q, x.k, x.v, out, lse, step.dout, x.lengths)
        return run

    return prepare


# --- suites -----------------------------------------------------------------------------------------------------------

# 16 requests of one serving step, and documents packed to 16k tokens.
PREFILL = (2048, 37, 512, 1, 4096, 900, 128, 3000, 64, 1500, 250, 777, 2200, 15, 333, 1000)
DOCUMENTS = (5000, 200, 3500, 1200, 64, 2420, 4000)


def _shapes(*texts: str) -> tuple[AttentionShape, ...]:
    return tuple(map(parse_shape, texts))


SUITES: dict[str, tuple[AttentionShape, ...]] = {
    # 16k tokens of 2,048 values a head, as in flash attention's and Triton's own benchmarks.
    "course": _shapes(
        *(f"B={16384 // S},S={S},H=16,D=128" for S in (512, 1024, 2048, 4096, 8192, 16384)),
        *(f"B={16384 // S},S={S},H=32,D=64" for S in (1024, 4096, 16384)),
    ),
    # Llama 3 8B and 70B, Qwen3-30B, Mixtral 8x7B, gpt-oss (heads of 64), Gemma (heads of 256), up to 32k.
    "models": _shapes(
        "B=2,S=4096,H=32,KV=8,D=128",
        "B=1,S=8192,H=64,KV=8,D=128",
        "B=1,S=32768,H=32,KV=8,D=128",
        "B=4,S=4096,H=32,KV=4,D=128",
        "B=1,S=16384,H=64,KV=8,D=64",
        "B=2,S=8192,H=8,KV=4,D=256",
    ),
    "varlen": _shapes(
        f"S={'|'.join(map(str, PREFILL))},H=32,KV=8,D=128",
        f"S={'|'.join(map(str, DOCUMENTS))},H=16,D=128",
        f"S={'|'.join(['4096', '1024'] + ['128'] * 64)},H=32,KV=8,D=64",
    ),
    "smoke": _shapes(
        "B=1,S=40,H=2,D=16", "S=33|1|0|70,H=4,KV=2,D=32", "B=2,S=5,H=2,D=24", "B=1,S=1,H=1,D=8", "S=96|31,H=3,KV=1,D=16"
    ),
}

CAUSAL_ATTENTION = Operator(
    name="causal_attention",
    baseline="torch_sdpa",
    backends=(
        _torch_backend(
            "torch_sdpa",
            lambda q, k, v, lengths: partial(sdpa, lengths=lengths),
            "scaled_dot_product_attention by torch's own choice of kernel; for unlike lengths once per sequence",
        ),
        _torch_backend(
            "torch_varlen",
            varlen,
            "torch's varlen_attn: flash attention of packed sequences",
            unavailable=no_flash_attention,
        ),
        _torch_backend(
            "torch_compile",
            flex,
            "torch.compile of flex_attention with a block mask of all sequences",
            unavailable=no_gpu_to_compile_for,
        ),
        triton(
            "triton",
            lazy("attention.causal:prepare_causal", "q k v lengths"),
            "online softmax over blocks of keys, TMA, one launch for all sequences; after flash attention 2",
            prepare_bwd=_backward_by("causal_backward", "prepare_causal_backward"),
        ),
        helion(
            "helion",
            lazy("attention.helion_causal:prepare_causal_helion", "q k v lengths"),
            "the same tiles in Helion; after Helion's examples/attention.py",
            prepare_bwd=_backward_by("helion_causal", "prepare_causal_backward_helion"),
        ),
    ),
    suites=SUITES,
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=lambda x: decode(reference(x)),
    decode=decode,
    flops=flops,
    min_bytes=min_bytes,
    returns="[T, H, D]",
    shapes_help=HELP,
    # Several products in a row, each result rounded. Few rows average little out: of five rows in fp16, dk is off by
    # 0.0016 in one feature by flash attention, by torch.compile and by ours.
    tolerances={
        "bf16_attention": Tolerance(rms=1.6e-2, rtol=6.4e-2, atol=2.5e-1),
        "fp16_attention": Tolerance(rms=2e-3, rtol=8e-3, atol=3.2e-2),
        "fp32_attention": TOLERANCES["fp32_layer"],
    },
    backward=Backward(
        make_inputs=make_step,
        reference=lambda step: decode(reference_backward(step)),
        flops=lambda shape: 5 * flops(shape) // 2,  # five products
        min_bytes=min_bytes_backward,
        returns="(dq [T, H, D], dk [T, KV, D], dv [T, KV, D])",
        moves=("dout",),  # the rest was saved by the forward pass
        output_dtype=lambda dtype: f"{dtype}_attention",
        # One row in all has a gradient of zero for q, from which any error is infinitely far.
        suites={name: tuple(s for s in suite if max(s.lengths) > 1) for name, suite in SUITES.items()},
    ),
)
